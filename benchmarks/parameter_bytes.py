"""Bytes of one parameter under each precision, by formula: what tests measure and the docs show."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class ParameterBytes:
    """Bytes that one parameter takes.

    Attributes:
        weights: the weight itself.
        copies: the 16-bit copy that autocast makes of an fp32 weight in the forward pass. It is kept for the backward
            pass with the activations, and is gone after it (torch: autocast's weight cache). Weights of matrix
            products only.
        gradients: its gradient, if it is trained.
        states: the two moments of torch's AdamW, which take the weight's own dtype (torch/optim/adamw.py:
            `torch.zeros_like(p)`).
        elsewhere: what another engine keeps besides: DeepSpeed's fp32 master weight and both fp32 moments.
    """

    weights: int
    copies: int
    gradients: int
    states: int
    elsewhere: int = 0

    @property
    def held(self) -> int:
        """Bytes between two steps, wherever they are."""
        return self.weights + self.gradients + self.states + self.elsewhere


PARAMETER_BYTES: Final[dict[str, ParameterBytes]] = {
    "fp32": ParameterBytes(weights=4, copies=0, gradients=4, states=8),
    "tf32": ParameterBytes(weights=4, copies=0, gradients=4, states=8),
    "bf16-autocast": ParameterBytes(weights=4, copies=2, gradients=4, states=8),
    "fp16-autocast": ParameterBytes(weights=4, copies=2, gradients=4, states=8),
    "pure-bf16": ParameterBytes(weights=2, copies=0, gradients=2, states=4),
    "half-weights-deepspeed": ParameterBytes(weights=2, copies=0, gradients=2, states=0, elsewhere=12),
    "half-weights-frozen": ParameterBytes(weights=2, copies=0, gradients=0, states=0),
}
"""By technique, for a trained parameter with AdamW; with `half-weights-frozen` for a frozen one."""
