"""A proposed change to a job, or a remedy for a cause, and its text."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, cast

from hf_memkit.common.answer.answer import Item
from hf_memkit.common.answer.safe_text import printable, sentence
from hf_memkit.measuring.record_types import ProposedChange
from hf_memkit.setup.techniques.registry import Technique, assignment


@dataclass(frozen=True, slots=True)
class Change:
    """One change to a job, with the fields of a `ProposedChange`.

    `key` is `section.name`: `arguments` for fields of TrainingArguments, by their names in the run's transformers;
    `environment` for variables; `data`, `model` and `adapter` for the script's code.
    """

    key: str
    value: Any
    reason: str
    cost: str
    saves_gib: float | None = None
    basis: str | None = None
    current: Any = None
    at_most_gib: float | None = None
    """Maximum saving, by which changes are ordered; not printed."""

    @classmethod
    def of(cls, row: Technique) -> Change:
        """The change of a row of the catalogue, before it is adapted to a job."""
        return cls(row.key, row.settings[row.key], row.saves, row.costs)

    def to_json(self) -> ProposedChange:
        shown = asdict(self)
        del shown["at_most_gib"]
        return cast(ProposedChange, shown)

    @property
    def setting(self) -> str:
        """What it sets, of which a job can have one value: a command, a key, or parts of a section."""
        if self.key == "command":
            return self.assignment
        return f"{self.key}.{'.'.join(self.value)}" if isinstance(self.value, dict) else self.key

    @property
    def assignment(self) -> str:
        """`optim: adamw_torch → adamw_bnb_8bit`."""
        return printable(assignment(self.key, self.value, self.current))

    def __str__(self) -> str:
        """`optim: adamw_torch → adamw_bnb_8bit: reason. Saves 1.20 GiB (basis). Costs: cost.`"""
        line = f"{self.assignment}: {self.reason.rstrip('.')}."
        if self.saves_gib is not None:
            basis = f" ({self.basis})" if self.basis else ""
            line += f" Saves {self.saves_gib:.2f} GiB{basis}."
        return f"{line} Costs: {self.cost.rstrip('.')}." if self.cost else line


@dataclass(frozen=True, slots=True)
class Remedy:
    """One setting that helps against a cause in any job, or does not help (`helps`)."""

    key: str
    value: str
    reason: str
    helps: bool = True

    def __str__(self) -> str:
        """`"PYTORCH_ALLOC_CONF=expandable_segments:True: segments grow …"`."""
        return f"{self.assignment}: {self.reason}"

    @property
    def assignment(self) -> str:
        """The setting, without the reason."""
        return assignment(self.key, self.value)


def item_of_change(change: Change) -> Item:
    """A change as an answer lists it."""
    saves = f"{change.saves_gib:.2f} GiB" if change.saves_gib is not None else ""
    costs, basis = (f"{part.rstrip('.')}." if part else "" for part in (change.cost, change.basis))
    return Item(sentence(change.reason), change.assignment, saves, costs, basis)
