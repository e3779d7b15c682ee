"""What a prediction rests on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

from hf_memkit.catalog.fit import LEVELS, Level


@dataclass(frozen=True, slots=True)
class Confidence:
    """What a prediction rests on.

    Attributes:
        measured_on: the GPU, and the evidence file, on which such predictions were compared with a measured run; None:
            none yet.
    """

    level: Level  # what its numbers were computed from
    rests_on: str  # the same in words, such as `"two optimizer steps of transformers.Trainer on fake CUDA tensors"`
    measured_on: str | None = None

    def __post_init__(self) -> None:
        if self.level not in LEVELS:
            raise ValueError(f"confidence level {self.level!r} must be one of {LEVELS}")
        if not self.rests_on:
            raise ValueError("a confidence must say what it rests on")

    @property
    def measured(self) -> str:
        """`"checked on RTX 4090 (results/gpu.json)"`, or that it is not."""
        return f"checked on {self.measured_on}" if self.measured_on else "not yet checked on a GPU"

    def __str__(self) -> str:
        return f"{self.level} ({self.rests_on}); {self.measured}"

    def to_json(self) -> dict[str, Any]:
        return {"level": self.level, "rests_on": self.rests_on, "measured_on": self.measured_on}

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Self:
        return cls(content["level"], content["rests_on"], content["measured_on"])
