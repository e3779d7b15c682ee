"""One finding of the diagnosis."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal, get_args

__all__ = ["KINDS", "Finding", "Kind"]

Kind = Literal["leak", "longer batches", "fragmentation", "another process"]
"""What can be wrong with memory over the steps of a training."""

KINDS: Final[tuple[Kind, ...]] = get_args(Kind)


@dataclass(frozen=True, slots=True)
class Finding:
    """What went wrong, where it began, and what to do.

    Attributes:
        kind: see `Kind`.
        first_step: optimizer step at which it began.
        why: one sentence with the figures it is concluded from.
        fix: one sentence: what to set, or what to look for in the code.
        figures: the figures by name, units in the names (`_gib`, `_mib_per_step`); steps and counts have none. Those
            that begin with `projected_` are projections, the others measured.
    """

    kind: Kind
    first_step: int
    why: str
    fix: str
    figures: dict[str, float]

    def to_json(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "first_step": self.first_step,
            "why": self.why,
            "fix": self.fix,
            "figures": dict(self.figures),
        }
