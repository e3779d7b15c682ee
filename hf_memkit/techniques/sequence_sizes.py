"""Which numbers of tokens, columns and rows a card multiplies fast."""

from __future__ import annotations

from typing import Final

from hf_memkit.hardware import Gpu
from hf_memkit.models import ModelFacts

__all__ = ["multiple_for", "odd_sizes", "packed_mask_bytes"]

_WHOLE_LINES: Final = (8.0, 9.0, 10.0, 10.3)
"""Compute capabilities of A100, H100/H200 and B200/B300. NVIDIA gives 128 bytes as the multiple for A100, and 16 bytes
for other cards (DU-09799-001, "Matrix Multiplication Background", section 2.2); for its successors it is assumed."""


def multiple_for(gpu: Gpu | None, bytes_per_number: int = 2) -> tuple[int, str]:
    """(how many numbers a matrix's sides should be multiples of, why): 16 bytes of them, or 128 on the large cards.

    >>> multiple_for(None)[0]
    8
    """
    if gpu is not None and gpu.capability in _WHOLE_LINES:
        return 128 // bytes_per_number, f"{gpu.name} multiplies in pieces of 128 bytes"
    return 16 // bytes_per_number, "tensor cores multiply in pieces of 16 bytes"


def odd_sizes(model: ModelFacts, multiple: int) -> list[str]:
    """What of the model's sides is no such multiple: `vocabulary 50257 (the next is 50304)`."""
    sides = {"hidden size": model.width, "vocabulary": model.vocabulary}
    return [
        f"{name} {size} (the next is {-(-size // multiple) * multiple})"
        for name, size in sides.items()
        if size % multiple
    ]


def packed_mask_bytes(row_tokens: int, rows: int = 1) -> int:
    """Bytes of the boolean mask that keeps sequences of one row apart without flash attention: rows × tokens².

    Source: transformers 5.23.0, masking_utils.py, sdpa_mask: (rows, 1, tokens, tokens), made once a forward pass.
    """
    return rows * row_tokens * row_tokens
