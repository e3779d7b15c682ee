"""The catalogue: a row for each way to save memory, which presets, recipes, plans, advice, rules and docs read.

Rows stand in `hf_memkit/setup/techniques/`, one file a family; importing that fills the catalogue. A row that presets
and recipes can name comes with a function `setup -> setup` below the decorator `technique` (DeepSpeed's are in
`hf_memkit/deepspeed/techniques.py`): it puts settings with their reasons and never touches a live object. A call of
`advice` adds a row that is only advice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal, get_args

from hf_memkit.common.errors import InputError, did_you_mean
from hf_memkit.common.terms import Category
from hf_memkit.setup.setup import Setup

Apply = Callable[[Setup], Setup]

Bounds = Mapping[str, tuple[float | None, float | None]]
"""(least, what it must be below) of a value, by its name; None: no such bound."""

Proof = Literal["cpu", "curve", "gpu"]
"""What shows that a technique works: `cpu`: the same result, tested on a CPU. `curve`: another algorithm, whose
learning curve on real text is kept as evidence. `gpu`: only a GPU can show it."""

Group = Literal["same result", "nearly the same", "another method"]
"""What a technique does to the result of the training. Plans rank the three apart: they never propose the second or
third instead of the first without a word.

* same result: the same losses and weights, up to the order in which numbers are added.
* nearly the same: the same method with other rounding, states in fewer bits or other random draws of dropout.
* another method: another training, such as LoRA instead of full fine-tuning.
"""

GROUPS: Final[tuple[Group, ...]] = get_args(Group)

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
    "checkpoints",
    "generation",
    "data",
    "machine",
]
_ONLY_ADVICE: Final = ("checkpoints", "generation", "data", "machine")
FAMILIES: Final[tuple[Family, ...]] = tuple(family for family in get_args(Family) if family not in _ONLY_ADVICE)
"""In the order in which their techniques are applied, whatever order a preset names them in: what comes later may
read what came before (an optimizer reads which weights are trained)."""


@dataclass(frozen=True)
class InPlans:
    """What `memkit plan` tries.

    Attributes:
        slot: what it decides: of each slot a setup has one choice.
        name: as the plan's table shows it.
        result: what changes in the result, in words.
        turn: its place in the slot, from the fastest to the leanest.
        never: why no plan has it, whatever the script; empty: plans have it.
    """

    slot: str
    name: str
    result: str = ""
    turn: int = 0
    never: str = ""


@dataclass(frozen=True)
class Technique:
    """One way to save memory. Call it as `setup -> setup`, with a setup that has a job.

    Attributes:
        name: in kebab-case; unique.
        family: the file it stands in, and its page in `docs/techniques/`.
        saves, costs, not_when: one line each, for a person who chooses.
        group: what it does to the result of the training.
        settings: what a job that memkit did not set up changes: key → value, the first is the one that advice shows.
            `arguments.NAME` is a field of TrainingArguments, `model.NAME` an option of from_pretrained,
            `environment.NAME` a variable. "half", "fewer" and "smaller" stand for half of the present number.
        slows: whether no step is faster with it.
        frees: category of memory → the largest share of it that goes: the estimate from a record.
        offered: where advice proposes it, and in which order there: what the memory was for (`logits`), or the phase
            (`load`); `host/load` is about RAM, `pinned/`, `shared memory/` and `disk/` about those.
        devices: kinds of devices that it works on; empty: all.
        only_with, unless: features in use, or arguments that are set, without or with which advice leaves it out.
        planned: how plans try it; None: they do not.
        proof: what shows that it works.
        slot: two techniques of one slot cannot be used together; empty if any number can.
        packages: what must be installed beyond the core dependencies.
        values: names and types of what a recipe's variant or `preset(values=…)` may give it.
        bounds: what numbers among `values` may be; those that it lacks may be any.
        gpu_only: why a CPU cannot show the memory that it saves; empty if a test measures it on a CPU.
        apply: puts its settings; None: it is only advice.
    """

    name: str
    family: Family
    saves: str
    costs: str
    not_when: str = ""
    group: Group = "same result"
    settings: Mapping[str, Any] = field(default_factory=dict)
    slows: bool = False
    frees: Mapping[Category, float] = field(default_factory=dict)
    offered: Mapping[str, int] = field(default_factory=dict)
    devices: tuple[str, ...] = ()
    only_with: tuple[str, ...] = ()
    unless: tuple[str, ...] = ()
    planned: InPlans | None = None
    proof: Proof = "cpu"
    slot: str = ""
    packages: tuple[str, ...] = ()
    values: Mapping[str, type] = field(default_factory=dict)
    bounds: Bounds = field(default_factory=dict)
    gpu_only: str = ""
    apply: Apply | None = field(default=None, repr=False)

    def __call__(self, setup: Setup) -> Setup:
        if self.apply is None:
            raise ValueError(f"{self.name} is only advice: no setup has it")
        return self.apply(setup)

    @property
    def key(self) -> str:
        """Of the setting that advice shows."""
        return next(iter(self.settings))

    @property
    def in_ram_only(self) -> bool:
        """Whether it makes room in RAM or on a disk, and none on the GPU."""
        return bool(self.offered) and all("/" in place or place == "host" for place in self.offered)

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


CATALOGUE: Final[dict[str, Technique]] = {}
"""Every row by its name."""

TECHNIQUES: Final[dict[str, Technique]] = {}
"""Those that presets and recipes can name."""


def technique(
    name: str, *, family: Family, saves: str, costs: str, not_when: str, slot: str | None = None, **more: Any
) -> Callable[[Apply], Technique]:
    """Registers the decorated function, with the fields of `Technique`. `slot` is the family's name if it is not
    given. Refuses a name, and names of values, that another technique has, and bounds of no value."""

    def register(apply: Apply) -> Technique:
        made = Technique(
            name, family, saves, costs, not_when, slot=family if slot is None else slot, apply=apply, **more
        )  # fmt: skip
        taken = {value for other in TECHNIQUES.values() if other.slot != made.slot for value in other.values}
        if twice := taken & set(made.values):
            raise ValueError(f"technique {name!r}: values {sorted(twice)} belong to another technique")
        if loose := set(made.bounds) - set(made.values):
            raise ValueError(f"technique {name!r}: bounds of {sorted(loose)}, which are no values of it")
        TECHNIQUES[name] = _added(made)
        return made

    return register


def advice(name: str, family: Family, settings: Mapping[str, Any], saves: str, costs: str, **more: Any) -> Technique:
    """Adds a row that only advice has: no preset or recipe can name it."""
    return _added(Technique(name, family, saves, costs, settings=settings, **more))


def applies(name: str) -> Callable[[Apply], Technique]:
    """Gives the row called `name` the decorated function: presets and recipes can then name it."""

    def register(apply: Apply) -> Technique:
        CATALOGUE[name] = TECHNIQUES[name] = replace(CATALOGUE[name], apply=apply)
        return TECHNIQUES[name]

    return register


def _added(row: Technique) -> Technique:
    if row.name in CATALOGUE:
        raise ValueError(f"there are two techniques {row.name!r}")
    CATALOGUE[row.name] = row
    return row


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
