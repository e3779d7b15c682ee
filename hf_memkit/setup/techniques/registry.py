"""The catalogue: a row for each way to save memory. Presets, recipes, plans, advice, rules and docs read it.

The rows are in `hf_memkit/setup/techniques/`, one file a family, and are registered on import. The decorator
`technique` adds a row with a function `setup -> setup` that puts the settings; presets and recipes can name it.
`advice` adds a row without a function. `applies` adds a function to such a row (`hf_memkit/deepspeed/techniques.py`).
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
"""Name of a value → (minimum, exclusive maximum); None: no bound."""

Proof = Literal["cpu", "curve", "gpu"]
"""Evidence that a technique works. `cpu`: a test on a CPU shows the same result. `curve`: another algorithm, with a
learning curve on real text. `gpu`: only a GPU can show it."""

Group = Literal["same result", "nearly the same", "another method"]
"""Effect of a technique on the result of the training. Plans rank the three groups separately.

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
"""A file of the catalogue. The order is that of application: later techniques read the settings of earlier ones (an
optimizer reads which weights are trained)."""

_ONLY_ADVICE: Final = ("checkpoints", "generation", "data", "machine")
FAMILIES: Final[tuple[Family, ...]] = tuple(family for family in get_args(Family) if family not in _ONLY_ADVICE)
"""Families that presets and recipes can name."""


@dataclass(frozen=True)
class InPlans:
    """A technique in `memkit plan`.

    Attributes:
        slot: a plan's setup has at most one technique of each slot.
        name: name in the plan's table.
        result: how it changes the result, in words.
        turn: position among the techniques of the slot, from most to least memory.
        never: why no plan contains it; empty if plans do.
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
        family: its file, and its page in `docs/techniques/`.
        saves, costs, not_when: one sentence each, without a full stop.
        group: how it changes the result of the training.
        settings: key → value to change in a job; advice shows the first. `arguments.NAME` is a field of
            TrainingArguments, `model.NAME` an option of from_pretrained, `environment.NAME` a variable. "half",
            "fewer" and "smaller" mean half of the current number.
        slows: whether it slows every step.
        frees: category of memory → maximum share that it frees (0 to 1), for estimates from a record.
        offered: where memory ran out → rank of the row in advice. Keys are an allocation (`logits`) or a phase
            (`load`); a prefix names memory other than the GPU's: `host/load`, `pinned/`, `shared memory/`, `disk/`.
        devices: device types that it supports; empty: all.
        only_with: advice requires one of these features or arguments in the job; empty: nothing.
        unless: advice omits it if the job has one of these features or arguments.
        planned: how plans use it; None if they do not know it.
        proof: evidence that it works.
        slot: a setup has at most one technique of each slot; empty: no restriction.
        packages: import names of packages beyond the core dependencies.
        values: names and types of its values in a recipe's variant or `preset(values=…)`.
        bounds: bounds of these values.
        gpu_only: why a CPU cannot show the memory that it saves; empty if a test measures it on a CPU.
        apply: puts its settings; None if it is only advice.
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
        """Key of the setting that advice shows."""
        return next(iter(self.settings))

    @property
    def in_ram_only(self) -> bool:
        """Whether it frees RAM or disk space, and no GPU memory."""
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
"""All rows by name."""

TECHNIQUES: Final[dict[str, Technique]] = {}
"""Rows that presets and recipes can name."""


def technique(
    name: str, *, family: Family | None = None, slot: str | None = None, **fields: Any
) -> Callable[[Apply], Technique]:
    """Registers the decorated function as a row with these fields of `Technique`.

    Args:
        family: None: from the name of the function's file (`optimizers_small_states.py`: optimizers).
        slot: None: the family.
    """

    def register(apply: Apply) -> Technique:
        file = apply.__module__.rpartition(".")[2]
        row_family = next(each for each in FAMILIES if file.startswith(each)) if family is None else family
        row_slot = row_family if slot is None else slot
        row = Technique(name, row_family, slot=row_slot, apply=apply, **fields)

        used = {value for other in TECHNIQUES.values() if other.slot != row.slot for value in other.values}
        if twice := used & set(row.values):
            raise ValueError(f"technique {name!r}: values {sorted(twice)} belong to another technique")
        if loose := set(row.bounds) - set(row.values):
            raise ValueError(f"technique {name!r}: bounds of {sorted(loose)}, which are no values of it")

        TECHNIQUES[name] = _add(row)
        return row

    return register


def advice(name: str, family: Family, settings: Mapping[str, Any], saves: str, costs: str, **more: Any) -> Technique:
    """Adds a row that presets and recipes cannot name."""
    return _add(Technique(name, family, saves, costs, settings=settings, **more))


def applies(name: str) -> Callable[[Apply], Technique]:
    """Adds the decorated function to the row `name`: presets and recipes can then name it."""

    def register(apply: Apply) -> Technique:
        CATALOGUE[name] = TECHNIQUES[name] = replace(CATALOGUE[name], apply=apply)
        return TECHNIQUES[name]

    return register


def _add(row: Technique) -> Technique:
    if row.name in CATALOGUE:
        raise ValueError(f"there are two techniques {row.name!r}")
    CATALOGUE[row.name] = row
    return row


def assignment(key: str, value: object, current: object = None) -> str:
    """A setting as text: `NAME=value` for the environment, else YAML's `name: value` or `name: current → value`."""
    section, _, name = key.rpartition(".")
    if key == "command":
        return str(value)
    if section == "environment":
        return f"{name}={value}"
    shown = name if section == "arguments" else key
    was = f"{_in_yaml(current)} → " if current is not None else ""
    return f"{shown}: {was}{_in_yaml(value)}" if str(value) else shown


def _in_yaml(value: object) -> object:
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{name}: {_in_yaml(inner)}' for name, inner in value.items())}}}"
    return str(value).lower() if isinstance(value, bool) else value


def setting_of(name: str) -> str:
    """The first setting of the row `name` as text, such as `optim: adamw_bnb_8bit`."""
    row = CATALOGUE[name]
    return assignment(row.key, row.settings[row.key])


def find_technique(name: str) -> Technique:
    """The technique `name`; raises an InputError if there is none."""
    if name not in TECHNIQUES:
        near = did_you_mean(name, TECHNIQUES)
        raise InputError(f"unknown technique {name!r} (`memkit preset list --techniques` names all){near}")
    return TECHNIQUES[name]


def in_order(techniques: list[Technique]) -> list[Technique]:
    """The techniques without repetition, sorted by family."""
    unique = {one.name: TECHNIQUES[one.name] for one in techniques}
    return sorted(unique.values(), key=lambda one: FAMILIES.index(one.family))


def wrong_value(techniques: Iterable[Technique], name: str, value: Any) -> str:
    """Error message if `value` is wrong for the value `name` of one of `techniques`; empty if it is right.

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
        if not ((low is None or number >= low) and (high is None or number < high)):  # so that nan is refused
            limits = [f"at least {low:g}" if low is not None else "", f"below {high:g}" if high is not None else ""]
            return f"must be {' and '.join(filter(None, limits))}"
    return ""
