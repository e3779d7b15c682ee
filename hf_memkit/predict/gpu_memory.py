"""What a card's own libraries take beside the tensors that torch's dispatcher sees: one table, with sources.

Nothing here has been measured on a card of ours yet: `CALIBRATED` says so, and every prediction that uses it.
"""

from __future__ import annotations

from typing import Final

from hf_memkit.units import MIB

__all__ = ["CALIBRATED", "cublas_workspace_bytes", "flash_backward_bytes"]

CALIBRATED: Final = False


def cublas_workspace_bytes(capability: tuple[int, int]) -> int:
    """cuBLAS's workspace of one thread: `:4096:2:16:8`, in KiB × count, or 32 MiB on Hopper and later.

    Source: pytorch:aten/src/ATen/cuda/CublasHandlePool.cpp, `parseChosenWorkspaceSize`. CUBLAS_WORKSPACE_CONFIG
    changes it.
    """
    if capability[0] >= 9:
        return 32 * MIB
    return (4096 * 2 + 16 * 8) * 1024


def flash_backward_bytes(query: tuple[int, ...], key: tuple[int, ...], element_bytes: int) -> int:
    """Scratch of flash attention's backward: the fp32 sum of the queries' gradients, a row of fp32 numbers a head, and
    with fewer key heads the gradients of keys and values for all query heads.

    Args:
        query, key: shapes, (batch, heads, length, head size).
        element_bytes: of an element of the queries.

    Source: pytorch:aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp, `mha_bwd`: `dq_accum`,
    `softmax_d` (lengths rounded up to 128, head sizes to 32), `dk_expanded` and `dv_expanded`.
    """
    batch, heads, length, size = query
    key_heads, key_length = key[1], key[2]
    rounded_length = -(-length // 128) * 128
    rounded_size = -(-size // 32) * 32
    scratch = 4 * batch * heads * rounded_length * (rounded_size + 1)
    if key_heads != heads:
        scratch += 2 * batch * key_length * heads * size * element_bytes
    return scratch
