"""Models whose activations exceed fp16's range (65,504), so that their losses become NaN."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

_TYPES: Final = ("t5", "mt5", "umt5", "longt5")
"""Model types trained in bf16 with larger activations (huggingface/transformers issues 4586 and 5651). Classes of
transformers declare it themselves (`_KEPT`)."""

_KEPT: Final = "wo"
"""Last linear layer of T5's feed-forward blocks. transformers 5.23.0 loads it in fp32 in an fp16 model (modeling_t5.py
537, `_keep_in_fp32_modules`; modeling_utils.py 1109); autocast still computes it in fp16."""


def overflow_in_fp16(model_type: str | None, kept_in_fp32: Collection[str] = ()) -> str:
    """Warning that a model of this type overflows in fp16, with the fix; empty if nothing is known.

    Args:
        model_type: `model_type` of its config.
        kept_in_fp32: `_keep_in_fp32_modules` of its class.
    """
    if model_type not in _TYPES and _KEPT not in kept_in_fp32:
        return ""
    return f"fp16: activations of {model_type} exceed 65,504, and losses become NaN; train in bf16 or fp32"
