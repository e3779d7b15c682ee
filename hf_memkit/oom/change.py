"""A proposed change to a job."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, cast

from hf_memkit.record_types import ProposedChange

__all__ = ["Change", "Proposal"]


@dataclass(frozen=True, slots=True)
class Change:
    """One change.

    Attributes:
        key: what to set, `section.name`: `arguments` are fields of TrainingArguments under the name that the run's
            transformers knows, `environment` variables, `data`, `model` and `adapter` what the script itself decides.
        value: what to set it to.
        reason: why, with what this run's records say.
        cost: what it costs, in words.
        saves_gib: GiB of device memory, only where this run's records give the figure.
        basis: how the figure follows from the records; None without one.
        current: what it is set to; None where that is not known.
    """

    key: str
    value: Any
    reason: str
    cost: str
    saves_gib: float | None = None
    basis: str | None = None
    current: Any = None

    def to_json(self) -> ProposedChange:
        return cast(ProposedChange, asdict(self))


@dataclass(frozen=True, slots=True)
class Proposal:
    """A change, and what only its place in the order needs: `at_most_gib` is the memory that it works on, `last` says
    that it changes what is trained, so that it comes after those that do not."""

    change: Change
    at_most_gib: float
    last: bool = False
