"""Models whose activations exceed what fp16 holds (65,504): their losses become NaN."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

_TYPES: Final = ("t5", "mt5", "umt5", "longt5")
"""Trained in bf16 with activations above that (huggingface/transformers issues 4586 and 5651). Of a class that is at
hand, transformers says it itself."""

_KEPT: Final = "wo"
"""The last product of T5's feed-forward layers. transformers 5.23.0 loads it in fp32 where all else is fp16
(modeling_t5.py 537, `_keep_in_fp32_modules`; modeling_utils.py 1109); autocast computes it in fp16 all the same."""


def overflow_in_fp16(model_type: str | None, kept_in_fp32: Collection[str] = ()) -> str:
    """What happens to a model of this type in fp16, and what to do; empty: nothing is known. `kept_in_fp32`:
    `_keep_in_fp32_modules` of its class."""
    if model_type not in _TYPES and _KEPT not in kept_in_fp32:
        return ""
    return f"fp16: activations of {model_type} exceed 65,504, and losses become NaN; train in bf16 or fp32"
