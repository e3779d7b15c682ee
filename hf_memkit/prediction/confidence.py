"""How far a prediction can be trusted, and how much room a verdict leaves because of it.

No figure here comes from a GPU of ours yet. Once evidence exists (`benchmarks/results/`), the shares come from it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal, Self, get_args

from hf_memkit.units import MIB

__all__ = ["CONTEXT_SLACK_BYTES", "LEVELS", "SLACK_SHARE", "Confidence", "Level"]

Level = Literal["trace", "cpu trace", "formula"]
"""What the numbers were computed from: a trace on fake CUDA tensors, one on fake CPU tensors (CPU's kernels and
autocast rules), or the formulas of the ledger alone."""

LEVELS: Final[tuple[Level, ...]] = get_args(Level)

SLACK_SHARE: Final[dict[Level, tuple[float, float]]] = {
    "trace": (0.05, 0.05),
    "cpu trace": (0.10, 0.10),
    "formula": (0.10, 0.30),
}
"""Shares of the smallest cap and of the reserved bytes that a verdict adds to them. Assumed, not calibrated:

* trace: on a CPU the trace is equal to real allocations of the same kernels; that CUDA's kernels allocate alike, and
  what they allocate inside, no GPU of ours has shown yet. 5 % is also the worst error that is accepted on a GPU.
* cpu trace: other kernels, another attention, other autocast lists. torch accepts ±10 % for its own tracker of traced
  steps against CUDA (pytorch: test/distributed/_tools/test_mem_tracker.py, `delta=0.1`).
* formula: the large terms only, and no replay of the allocator, whose segments took up to a quarter more than was
  allocated in traced steps of small models, with the trace's 5 % on top. Where the card is full, the allocator makes
  do with little more than what is allocated.
"""

CONTEXT_SLACK_BYTES: Final = 100 * MIB
"""The CUDA context is assumed at 500 MiB (`hardware.CONTEXT_BYTES`), and 300 to 600 MiB is usual: the upper end."""


@dataclass(frozen=True, slots=True)
class Confidence:
    """What a prediction rests on.

    Attributes:
        level: what its numbers were computed from.
        rests_on: the same in words, such as `"two optimizer steps of transformers.Trainer on fake CUDA tensors"`.
        measured_on: the card, and the evidence file, on which predictions of this level were compared with a measured
            run; None: none yet.
    """

    level: Level
    rests_on: str
    measured_on: str | None = None

    def __post_init__(self) -> None:
        if self.level not in LEVELS:
            raise ValueError(f"confidence level {self.level!r} must be one of {LEVELS}")
        if not self.rests_on:
            raise ValueError("a confidence must say what it rests on")

    def cap_with_slack(self, size_bytes: int) -> int:
        """A smallest cap, and the room that a verdict leaves beside it."""
        return size_bytes + round(SLACK_SHARE[self.level][0] * size_bytes) + CONTEXT_SLACK_BYTES

    def reserved_with_slack(self, size_bytes: int) -> int:
        """Reserved bytes, and the room that a verdict leaves beside them."""
        return size_bytes + round(SLACK_SHARE[self.level][1] * size_bytes) + CONTEXT_SLACK_BYTES

    @property
    def cap_slack(self) -> str:
        """`"5 % and 100 MiB of slack"`."""
        return _words(SLACK_SHARE[self.level][0])

    @property
    def reserved_slack(self) -> str:
        """`"5 % and 100 MiB of slack"`."""
        return _words(SLACK_SHARE[self.level][1])

    def __str__(self) -> str:
        measured = f"measured on {self.measured_on}" if self.measured_on else "not yet measured on a GPU"
        return f"{self.level} ({self.rests_on}); {measured}"

    def to_json(self) -> dict[str, Any]:
        return {"level": self.level, "rests_on": self.rests_on, "measured_on": self.measured_on}

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Self:
        return cls(content["level"], content["rests_on"], content["measured_on"])


def _words(share: float) -> str:
    return f"{round(100 * share)} % and {CONTEXT_SLACK_BYTES // MIB} MiB of slack"
