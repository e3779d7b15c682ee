"""A proposed change to a job, or a remedy for a cause, and its text."""

from __future__ import annotations

import textwrap
from dataclasses import asdict, dataclass
from typing import Any, cast

from hf_memkit.measuring.out_of_memory.message import paragraph, printable
from hf_memkit.measuring.record_types import ProposedChange
from hf_memkit.setup.techniques.registry import Technique


def assignment(key: str, value: object, current: object = None) -> str:
    """A setting as text: `NAME=value` for the environment, else `name: value` or `name: current → value`."""
    section, _, name = key.rpartition(".")
    if key == "command":
        return str(value)
    if section == "environment":
        return f"{name}={value}"
    shown = name if section == "arguments" else key
    was = f"{current} → " if current is not None else ""
    return f"{shown}: {was}{value}" if str(value) else shown


def _heading(text: str, width: int, indent: str) -> list[str]:
    """`text` wrapped to `width` characters between words, so that it can be copied."""
    return textwrap.wrap(
        text, max(40, width), initial_indent=indent, subsequent_indent=" " * len(indent), break_long_words=False,
        break_on_hyphens=False, fix_sentence_endings=False,
    )  # fmt: skip


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
    def assignment(self) -> str:
        """`optim: adamw_torch → adamw_bnb_8bit`."""
        return printable(assignment(self.key, self.value, self.current), 200)

    @property
    def name_and_value(self) -> str:
        """`optim = adamw_bnb_8bit`, or the text of a command."""
        if self.key == "command":
            return printable(str(self.value), 120)
        value = "" if self.value is None else f" = {printable(str(self.value), 120)}"
        return self.key.removeprefix("arguments.") + value

    @property
    def saving(self) -> str | None:
        """`1.20 GiB (how the figure follows)`."""
        if self.saves_gib is None:
            return None
        return f"{self.saves_gib:.2f} GiB" + (f" ({self.basis})" if self.basis else "")

    def sentence(self, *, with_current: bool = False) -> str:
        """`name = value (now current): reason. Saves 1.20 GiB (basis). Costs: cost.`"""
        was = f" (now {self.current})" if with_current and self.current is not None else ""
        parts = [f"{self.name_and_value}{was}: {self.reason.rstrip('.')}."]
        parts += [f"Saves {self.saving}."] if self.saving is not None else []
        parts += [f"Costs: {self.cost.rstrip('.')}."] if self.cost else []
        return " ".join(parts)

    def lines(self, number: int, width: int) -> list[str]:
        """The change as lines of at most `width` characters, with `number` in front."""
        saves = f"   saves {self.saves_gib:.2f} GiB" if self.saves_gib is not None else ""
        out = _heading(f"{self.assignment}{saves}", width, f"  {number}. ")
        out += paragraph(f"{self.reason}.", width, "     ")
        out += paragraph(f"Costs: {self.cost}.", width, "     ")
        if self.basis is not None:
            out += paragraph(f"Estimated from: {self.basis}.", width, "     ")
        return out


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

    def lines(self, width: int) -> list[str]:
        """The setting and the reason, as lines of at most `width` characters."""
        return [*_heading(self.assignment, width, "  "), *paragraph(f"{self.reason}.", width, "    ")]
