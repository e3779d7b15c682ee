"""What accumulation costs where gradients are bf16: micro-batches are summed in eight bits of mantissa."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from hf_memkit.setup import Setup

__all__ = ["BF16_SUM_ERROR", "summing_note"]

BF16_SUM_ERROR: Final[Mapping[int, tuple[float, float]]] = {
    2: (0.001748, 0.006886),
    4: (0.002555, 0.006837),
    8: (0.003431, 0.006571),
    16: (0.004564, 0.006488),
    32: (0.006232, 0.006290),
}
"""Micro-batches a step → (relative error of summing their gradients in bf16, and of bf16 arithmetic in any case).
Measured: benchmarks/results/bf16_accumulation.json, with which a test compares these."""


def summing_note(setup: Setup) -> str | None:
    """The note for a setup that sums micro-gradients in bf16; None for any other. DeepSpeed accumulates apart, and
    adapters keep fp32 gradients."""
    count = int(setup.get("arguments.gradient_accumulation_steps", 1))
    if count == 1 or setup.get("model.dtype") != "bfloat16":
        return None
    if "deepspeed.config" in setup or setup.section("adapter"):
        return None
    measured = [number for number in BF16_SUM_ERROR if number >= count]
    cost = ""
    if measured:
        summing, arithmetic = BF16_SUM_ERROR[min(measured)]
        cost = (
            f": an error of {_percent(summing)} of the gradient's norm, measured with {min(measured)} on a small "
            f"GPT-2, beside {_percent(arithmetic)} that bf16 arithmetic costs in any case"
        )
    return (
        f"The gradients of the {count} micro-batches of a step are summed in bf16{cost} "
        f"(docs/techniques/precision.md). A larger micro-batch needs fewer sums."
    )


def _percent(share: float) -> str:
    return f"{100 * share:.2f} %"
