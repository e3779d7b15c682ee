"""Memory of a GPU's libraries outside the tensors that torch's dispatcher sees: formulas with sources.

The formulas follow the libraries' source code; nothing is fitted. They agree with peaks that others measured on GPUs
with the same libraries (docs/predict.md).

Omitted because small or rare: flash attention's split over keys in forward (only if batch × heads are too few to fill
the GPU), the sort of an embedding's backward (about 32 bytes a token), cuSOLVER's workspace in GaLore's decomposition,
cuDNN's convolutions (their workspace depends on the algorithm chosen on the GPU).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from hf_memkit.common.units import MIB

Shape = tuple[int, ...]

_CHUNK_ELEMENTS: Final = 65536  # of a tensor, per block of a multi-tensor kernel

_FUSED_FOUR_BIT_ROWS: Final = 1536
"""Rows up to which bitsandbytes may multiply without dequantising the whole weight, depending on GPU and shapes
(bitsandbytes 0.50.2: backends/cuda/ops.py, `_gemm_4bit_custom_max_m`)."""

OUTLIER_COLUMNS: Final = 7
"""Columns of an input with values above the threshold: at most 7 in models of up to 13 B parameters (Dettmers et al.
2022, LLM.int8(), arXiv 2208.07339, "Mixed-precision Decomposition")."""

OUTLIERS_ASSUMED: Final = (
    f"8 bits: {OUTLIER_COLUMNS} columns of each input are assumed to be outliers, multiplied in 16 bits; their "
    "number depends on values"
)


def cublas_workspace_bytes(capability: tuple[int, int]) -> int:
    """cuBLAS's workspace of one handle (one per thread) and stream: `:4096:2:16:8`, in KiB × count, or 32 MiB on
    Hopper and Blackwell. cuBLASLt shares it if torch unifies them, which is its default on CUDA.
    Source: pytorch:aten/src/ATen/cuda/CublasHandlePool.cpp, `parseChosenWorkspaceSize` (capabilities 9, 10, 12; later
    versions also 11). CUBLAS_WORKSPACE_CONFIG changes it.
    """
    if capability[0] >= 9:
        return 32 * MIB
    return (4096 * 2 + 16 * 8) * 1024


def flash_backward_bytes(query: Shape, key: Shape, element_bytes: int) -> int:
    """Scratch memory of flash attention's backward, for shapes (batch, heads, length, head size).

    It holds the fp32 sum of the queries' gradients, a row of fp32 numbers per head, and with fewer key heads the
    gradients of keys and values for all query heads.

    Also used for cuDNN, whose workspace only cuDNN knows (pytorch:aten/src/ATen/native/cudnn/MHA.cpp,
    `get_workspace_size`): on an H100 both were equal within 0.4 % (benchmarks/results/predict.json, `calibrate`).

    Source: pytorch:aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp, `mha_bwd`: `dq_accum`, `softmax_d`
    (lengths rounded up to 128, head sizes to 32, above 128 to 64), `dk_expanded` and `dv_expanded`.
    """
    batch, heads, length, size = query
    key_heads, key_length = key[1], key[2]
    scratch = 4 * batch * heads * _up(length, 128) * (_up(size, 32 if size <= 128 else 64) + 1)
    if key_heads != heads:
        scratch += 2 * batch * key_length * heads * size * element_bytes
    return scratch


def flash_varlen_backward_bytes(query: Shape, key: Shape, sequences: int, element_bytes: int) -> int:
    """As `flash_backward_bytes`, for (tokens, heads, head size): concatenated sequences, each starting at a new block.
    Source: as there, `mha_varlen_bwd`; the flash-attn package 2.8.3 needs the same."""
    tokens, heads, size = query
    scratch = 4 * heads * (tokens + 128 * sequences) * (_up(size, 32 if size <= 128 else 64) + 1)
    if key[1] != heads:
        scratch += 2 * key[0] * heads * size * element_bytes
    return scratch


def efficient_backward_bytes(query: Shape, key: Shape, value: Shape, element_bytes: int) -> int:
    """Scratch memory of memory-efficient attention's backward, for shapes (batch, heads, length, head size).

    It holds the fp32 sum of the queries' gradients, in 16 bits with head sizes above 128 also those of keys and
    values, and `delta`, a number per query, which torch sums in fp32 from a product of the output's size.

    Source: pytorch:aten/src/ATen/native/transformers/cuda/mem_eff_attention/kernel_backward.h, `workspace_size` and
    `kNeedsAccumGradQ`; attention_backward.cu, `_efficient_attention_backward`. Blocks are assumed to be 128 × 64, and
    keys not to be split: between the real kernels'.
    """
    batch, heads, length, size = query
    delta = 4 * batch * heads * length
    sums = 4 * batch * heads * _up(length, 128) * _up(size, 64)
    product = 0
    if element_bytes == 4:
        product = 4 * batch * heads * length * value[3]
    elif max(size, value[3]) > 128:
        sums += 4 * batch * heads * _up(key[2], 64) * (_up(size, 128) + _up(value[3], 128))
    return delta + max(sums, product)


def foreach_norm_bytes(elements: Sequence[int]) -> int:
    """Scratch memory of the norms of many tensors (given their elements) in one operation: per tensor an fp32 number
    for each chunk of the largest tensor, and 320 more.
    Source: pytorch:aten/src/ATen/native/cuda/ForeachReduceOp.cu, `output_per_tensor`, `global_output`;
    MultiTensorApply.cuh, `kChunkSize`.
    """
    chunks = -(-max(elements) // _CHUNK_ELEMENTS)
    return 4 * (len(elements) * chunks + 320)


def four_bit_product_bytes(rows: int, weight: tuple[int, int], element_bytes: int, *, nested: bool) -> int:
    """Scratch memory of a product with a 4-bit weight: the dequantised weight, and with double quantisation its scales
    in fp32, twice. With few rows a kernel may need none; it is counted from a third of `_FUSED_FOUR_BIT_ROWS` on,
    where that is rare.
    Source: bitsandbytes 0.50.2: backends/cuda/ops.py, `_dequant_linear_fallback`, `_gemm_4bit_use_custom_cuda`.
    """
    if rows < _FUSED_FOUR_BIT_ROWS // 3:
        return 0
    elements = weight[0] * weight[1]
    scales = -(-elements // 64)
    return elements * element_bytes + (2 * 4 * scales if nested else 0)


def eight_bit_inputs_bytes(elements: int, *, threshold: float) -> int:
    """Scratch memory for finding the inputs that bitsandbytes does not multiply in 8 bits: absolute values in fp16,
    and a mask of those at or above the threshold.
    Source: bitsandbytes 0.50.2: backends/cuda/ops.py, `int8_vectorwise_quant`.
    """
    return 3 * elements if threshold > 0 else 0


def eight_bit_product_bytes(elements: int, *, fp16: bool) -> int:
    """Scratch memory of an int8 product in addition to its result with `elements`: sums in int32, and the result in
    fp16, unless that is the final dtype. Memory for outliers is allocated after it is freed, and is less.
    Source: bitsandbytes 0.50.2: backends/default/ops.py, `int8_scaled_mm`, `int8_mixed_scaled_mm`;
    backends/cuda/ops.py, `int8_linear_matmul`, `int8_mm_dequant`.
    """
    return (4 if fp16 else 6) * elements


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
