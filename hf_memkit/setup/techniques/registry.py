"""Techniques: one way to save memory each, in a registry that presets, recipes, docs and tests read.

A technique is a function `setup -> setup`, registered by the decorator `technique`. It works from the setup's job,
puts settings with their reasons, and never touches a live object. The functions stand in
`hf_memkit/setup/techniques/`, one file a family, and `hf_memkit/deepspeed/techniques.py`; importing
`hf_memkit.setup.techniques` and that fills the registry.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, get_args

from hf_memkit.common.errors import InputError, did_you_mean
from hf_memkit.setup.setup import Setup

Apply = Callable[[Setup], Setup]

Bounds = Mapping[str, tuple[float | None, float | None]]
"""(least, what it must be below) of a value, by its name; None: no such bound."""

Proof = Literal["cpu", "curve", "gpu"]
"""What shows that a technique works: `cpu`: the same result, tested on a CPU. `curve`: another algorithm, whose
learning curve on real text is kept as evidence. `gpu`: only a GPU can show it."""

Family = Literal[
    "precision",
    "loading",
    "attention",
    "adapters",
    "offload",
    "replicas",
    "batch",
    "optimizers",
    "activation_functions",
    "checkpointing",
    "loss",
    "compile",
    "sequences",
    "evaluation",
    "allocator",
]
FAMILIES: Final[tuple[Family, ...]] = get_args(Family)
"""In the order in which their techniques are applied, whatever order a preset names them in: what comes later may
read what came before (an optimizer reads which weights are trained)."""


@dataclass(frozen=True)
class Technique:
    """One way to save memory. Call it as `setup -> setup`, with a setup that has a job.

    Attributes:
        name: in kebab-case; unique.
        family: the file it stands in, and its page in `docs/techniques/`.
        saves, costs, not_when: one line each, for a person who chooses.
        proof: what shows that it works.
        slot: two techniques of one slot cannot be used together; empty if any number can.
        packages: what must be installed beyond the core dependencies.
        values: names and types of what a recipe's variant or `preset(values=…)` may give it.
        bounds: what numbers among `values` may be; those that it lacks may be any.
        gpu_only: why a CPU cannot show the memory that it saves; empty if a test measures it on a CPU.
        apply: puts its settings.
    """

    name: str
    family: Family
    saves: str
    costs: str
    not_when: str
    proof: Proof
    slot: str
    packages: tuple[str, ...]
    values: Mapping[str, type]
    bounds: Bounds
    gpu_only: str
    apply: Apply = field(repr=False)

    def __call__(self, setup: Setup) -> Setup:
        return self.apply(setup)

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "family": self.family,
            "saves": self.saves,
            "costs": self.costs,
            "not_when": self.not_when,
            "proof": self.proof,
            "packages": list(self.packages),
            "values": {name: kind.__name__ for name, kind in self.values.items()},
        }


TECHNIQUES: Final[dict[str, Technique]] = {}
"""Every technique by its name, filled by the decorator."""


def technique(
    name: str,
    *,
    family: Family,
    saves: str,
    costs: str,
    not_when: str,
    proof: Proof = "cpu",
    slot: str | None = None,
    packages: tuple[str, ...] = (),
    values: Mapping[str, type] | None = None,
    bounds: Bounds | None = None,
    gpu_only: str = "",
) -> Callable[[Apply], Technique]:
    """Registers the decorated function. `slot` is the family's name if it is not given; "" stands for none. Refuses a
    name, and names of values, that another technique has, and bounds of no value."""

    def register(apply: Apply) -> Technique:
        if name in TECHNIQUES:
            raise ValueError(f"there are two techniques {name!r}")
        taken = {value for other in TECHNIQUES.values() if other.slot != used for value in other.values}
        if twice := taken & set(values or {}):
            raise ValueError(f"technique {name!r}: values {sorted(twice)} belong to another technique")
        if loose := set(bounds or {}) - set(values or {}):
            raise ValueError(f"technique {name!r}: bounds of {sorted(loose)}, which are no values of it")
        made = Technique(
            name, family, saves, costs, not_when, proof, used, packages, dict(values or {}), dict(bounds or {}),
            gpu_only, apply,
        )  # fmt: skip
        TECHNIQUES[name] = made
        return made

    used = family if slot is None else slot
    return register


def find_technique(name: str) -> Technique:
    """The technique called `name`; an InputError where there is none."""
    if name not in TECHNIQUES:
        near = did_you_mean(name, TECHNIQUES)
        raise InputError(f"unknown technique {name!r} (`memkit preset list --techniques` names all){near}")
    return TECHNIQUES[name]


def in_order(techniques: list[Technique]) -> list[Technique]:
    """Each once, by family; those of one family in the order given."""
    unique = list(dict.fromkeys(one.name for one in techniques))
    return sorted((TECHNIQUES[name] for name in unique), key=lambda one: FAMILIES.index(one.family))


def wrong_value(techniques: Iterable[Technique], name: str, value: Any) -> str:
    """What is wrong with `value` for those of `techniques` that take a value `name`; empty if nothing is.

    >>> import hf_memkit.setup.techniques
    >>> wrong_value(hf_memkit.setup.techniques.registry.TECHNIQUES.values(), "rank", 0)
    'must be at least 1'
    """
    for one in techniques:
        kind = one.values.get(name)
        if kind is None:
            continue
        if type(value) is not kind and not (kind is float and type(value) is int):
            return f"must be {kind.__name__}"
        low, high = one.bounds.get(name, (None, None))
        number: Any = value
        # Written so that a number that is none (nan) is refused.
        if not ((low is None or number >= low) and (high is None or number < high)):
            told = [f"at least {low:g}" if low is not None else "", f"below {high:g}" if high is not None else ""]
            return f"must be {' and '.join(filter(None, told))}"
    return ""
