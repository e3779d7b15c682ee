"""Time of one operation on a GPU: the longer of computing and moving bytes, plus the start of its kernels.

```
seconds = max(FLOPs / rate of the dtype, bytes / bandwidth) + kernels × 2 µs
```

A kernel that torch.compile generates moves its bytes at the same bandwidth as an eager one: assumed, and in line with
a compiled Llama of 1 B on an H200 (154 ms a step predicted, 147 measured; eager 194 and 188; benchmarks/gpu.py).

Products are cut into tiles, one per multiprocessor; an incomplete tile or an incomplete last round of tiles wastes
time. No constant is fitted to the trainings of benchmarks/plan_speed.py, unless its docstring says that it is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

from hf_memkit.catalog.rates import GpuRates
from hf_memkit.prediction.trace.work import Operation

_KERNEL_S: Final = 2e-6
"""From the end of a kernel's work to the next one's full speed: start, ramp, tail. Assumed; matters below 50 µs."""

_ROUND_TRIP_S: Final = 10e-6  # minimum of a copy between host and GPU; assumed

_TILES: Final = ((256, 128, 1.0), (128, 128, 0.95), (128, 64, 0.8), (64, 64, 0.65))
"""Rows, columns, and share of the rate that a multiprocessor reaches with such a tile: smaller tiles load more per
product. NVIDIA's "Matrix Multiplication Background" lists the sizes that cuBLAS uses, in this order; the shares follow
from the bytes loaded per product and are assumed."""

_SPLITS: Final = (1, 2, 4, 8, 16, 32)
"""Parts into which the summed dimension may be cut, so that more multiprocessors work (cuBLAS's split-K); each part
makes an fp32 result, which must be added."""

_TILE_START_S: Final = 1e-6
"""Time until a multiprocessor reaches its rate in a new tile: a first load from memory takes about half a microsecond
(RRZE-HPC/gpu-benches, gpu-latency), and a few of them fill its pipeline. During that time, and while it writes the
finished tile, it computes nothing, so short sums lose a share of the rate (CUTLASS, "Efficient GEMM": main loop and
epilogue). Kernels for Hopper and later overlap both with the next tile's main loop (there, "Warp Specialization",
persistent kernels)."""

_LEAST_SPLIT: Final = 256  # minimum length of the summed dimension in one part

_ATTENTION: Final[Mapping[str, tuple[float, float]]] = {
    "flash": (0.6, 0.5),
    "cudnn": (0.55, 0.45),
    "efficient": (0.4, 0.3),
}
"""Shares of the data sheet's rate that fused attention reaches in 16 bits, forward and backward. FlashAttention-2 on
an A100: "50-73% of the theoretical maximum" (Dao 2023, arXiv 2307.08691, abstract), the maximum for long rows without
a causal mask; the table has a fifth less than the maximum, for short rows and the mask. cuDNN's kernel, which torch
uses on Hopper, lies between FlashAttention-2 and 3 there (35 and 75 %: Shah et al. 2024, arXiv 2407.08608) with heads
of 128. Memory-efficient attention: two thirds of flash's, assumed."""

_SMALL_HEADS: Final = (0.7, 0.67)
"""Share of cuDNN's rate with heads of 128 that it reaches with heads of 64. Measured on an H200 (2048 tokens, causal;
1500 without a mask): 0.38 and 0.30 of the data sheet's rate."""

_ROWS_OF_A_TILE: Final = 128  # cuDNN computes whole tiles: 197 rows take as long as 256. Measured on an H200 (ViT).

_DROPOUT: Final[Mapping[str, tuple[float, float]]] = {"cudnn": (0.3, 0.6), "efficient": (0.4, 0.55)}
"""Share of its rate that attention reaches with dropout, which draws a number per score. Measured on an H200 (GPT-2,
BERT and T5, dropout 0.1; torch 2.11); T5's also has a bias."""

_EFFICIENT_ON_HOPPER: Final = (0.13, 0.1)
"""Memory-efficient attention uses Ampere's instructions: an A100's share, of Hopper's data sheet."""

_UNALIGNED: Final[Mapping[bool, Mapping[int, float]]] = {
    True: {8: 1.0, 4: 0.3, 2: 0.33, 1: 0.155},
    False: {8: 1.0, 4: 0.9, 2: 0.9, 1: 0.7},
}
"""Share of the rate that a 16-bit product reaches, by the alignment of its rows; True: on Hopper, which reads 16 bytes
at once, so cuBLAS uses Ampere's kernels there, and Turing's for odd rows. Measured on an H200: logits of 50257 words
(GPT-2) at 95 to 147 TFLOP/s, of 30522 (BERT) at 252 to 268; four elements: 3.5 times slower (m87-labs/kestrel#143).
Others: 107 to 115 TFLOP/s, not 156, on an RTX 4090 (pytorch/pytorch#181718), odd rows; 2 and 4 elements assumed. Not
for compiled code: inductor times such a product with padded rows, and pads them if that is faster (torch 2.13:
_inductor/fx_passes/pad_mm.py)."""

_PASSES: Final[Mapping[str, float]] = {
    "native_layer_norm_backward": 2.3, "_fused_rms_norm_backward": 2.3, "native_layer_norm": 1.5,
    "_fused_rms_norm": 1.5, "sum": 2.0, "_log_softmax": 1.75, "_log_softmax_backward_data": 1.3, "_to_copy": 1.2,
    "copy_": 1.2, "clone": 1.2,
}  # fmt: skip
"""Time of operations that read rows twice, sum columns or cast, in multiples of the time of their bytes. Measured on
an H200 (GPT-2, BERT, T5, Llama, Whisper, ViT; torch 2.11): 2.2 to 2.7, 1.4 to 1.8, 1.5 to 2.6, 1.7, 1.3, 1.1 to 1.5.
RMS norms: assumed as for layer norms."""

_BLOCKWISE_S: Final = 3.6e-9
"""Time of one multiprocessor to update one parameter with 8-bit moments, which it looks up in a table of 256 values.
Measured on an H200: 42 ms for 1.56 billion (bitsandbytes 0.50, AdamW)."""

_FLASH_ON_HOPPER: Final = (0.35, 0.3)
"""FlashAttention-2 on an H100: 35 % (Shah et al. 2024, arXiv 2407.08608, abstract)."""

_FLASH_ON_CUDA_CORES: Final = (0.6, 0.5)  # in fp32, without tensor cores, it is compute-bound like products; assumed

_FALLBACK_DTYPES: Final[Mapping[str, tuple[str, ...]]] = {
    "tf32": ("float32",),
    "bfloat16": ("float32",),
    "float16": ("float32",),
    "int8": ("float16", "float32"),
    "float8_e4m3fn": ("bfloat16", "float32"),
    "float8_e5m2": ("bfloat16", "float32"),
}
"""Dtypes instead of those without units on a GPU: before Ampere, PyTorch emulates bf16 (torch 2.13: cuda/__init__.py,
`is_bf16_supported(including_emulation=True)`), products run on the CUDA cores in fp32, and TF32 is fp32."""

_SIXTEEN_BITS: Final = ("bfloat16", "float16")

_L2_BYTES: Final[Mapping[float, float]] = {8.0: 40e6, 8.9: 48e6, 9.0: 50e6, 10.0: 120e6, 12.0: 64e6}
"""By compute capability (NVIDIA's white papers; Ada and consumer Blackwell: 24 to 128 MB). Other GPUs: up to 6 MB."""

_L2_SPEEDUP: Final = 2.0
"""Speed of the L2 cache relative to memory, if an operation reads what the previous one wrote: an A100 reads 5120
bytes a clock from it, more than three times as fast (white paper), but not all reads hit it."""

_FLOAT64_SHARE: Final = 1 / 32  # share of the fp32 rate: 1/2 on data center GPUs, 1/64 on consumer GPUs


def computes_as(dtype: str, rates: GpuRates) -> str:
    """The dtype in which this GPU computes products of `dtype`."""
    if dtype in rates.achievable_tflops:
        return dtype
    return next((name for name in _FALLBACK_DTYPES.get(dtype, ()) if name in rates.achievable_tflops), "float32")


def product_tflops(dtype: str, rates: GpuRates) -> float:
    """The rate that large products in `dtype` reach, the same for bf16 and fp16, which use the same units. The lower
    of two measurements applies, because some are the best of hundreds of shapes (MAMF), others of a few squares."""
    used = computes_as(dtype, rates)
    same = _SIXTEEN_BITS if used in _SIXTEEN_BITS else (used,)
    return min(rates.achievable_tflops[name].value for name in same if name in rates.achievable_tflops)


class OperationSeconds:
    """Computes the time of operations on one GPU, with its row in `gpu_rates.RATES` and compute capability."""

    def __init__(self, rates: GpuRates, capability: float) -> None:
        self._rates = rates
        self._hopper = 9.0 <= capability < 12.0  # Hopper or data center Blackwell; consumer Blackwell is like Ampere
        self._l2_bytes = _L2_BYTES.get(capability, 6e6)
        self._bytes_per_s = 1e9 * rates.achievable_memory_gb_per_s.value
        self._pcie = 1e9 * rates.pcie_gb_per_s.value
        self._multiprocessors = int(rates.multiprocessors.value)

    def of(self, operation: Operation) -> float:
        """Seconds of one call, from the moment when the GPU starts it."""
        if operation.kind == "transfer":
            seconds = operation.moved_bytes / self._pcie + _ROUND_TRIP_S
        else:
            moving = operation.moved_bytes / self._bytes_per_s
            if operation.moved_bytes < self._l2_bytes / 2:  # the next operation hits the cache, too
                moving /= _L2_SPEEDUP
            moving *= _PASSES.get(operation.name.removeprefix("aten.").split(".")[0], 1.0)
            if operation.kind == "matmul":
                computing = self._product(operation)
            elif operation.kind == "attention":
                computing = self._attention(operation)
            elif "8bit_blockwise" in operation.name:
                computing = _BLOCKWISE_S * operation.flops / self._multiprocessors
            else:
                computing = operation.flops / self._rate("float32") if operation.flops else 0.0
            seconds = max(computing, moving) + _KERNEL_S * operation.launches
        return seconds

    def _rate(self, dtype: str) -> float:
        if dtype.startswith(("float64", "complex")):
            return _FLOAT64_SHARE * self._rate("float32")
        return 1e12 * product_tflops(dtype, self._rates)

    def _product(self, operation: Operation) -> float:
        rate = self._rate(operation.dtype)
        if operation.dtype in _SIXTEEN_BITS and operation.called_by != "compiled":
            rate *= _UNALIGNED[self._hopper][operation.alignment]
        if len(operation.shape) != 4 or not all(operation.shape):
            return operation.flops / rate
        multiprocessor_rate = rate / self._multiprocessors
        written = 2 if operation.dtype in _SIXTEEN_BITS else 4
        tiled = min(self._tiled(operation.shape, multiprocessor_rate, written))
        exact = 2 * math.prod(operation.shape) / rate
        # A convolution has the shape of one of its products; the lost share is the same.
        return operation.flops / rate * tiled / exact if exact else 0.0

    def _tiled(self, shape: tuple[int, ...], multiprocessor_rate: float, element_bytes: int) -> list[float]:
        """Seconds with each tile size and split; `multiprocessor_rate` in FLOP/s."""
        batch, m, n, k = shape
        times = []
        for rows, columns, share in _TILES:
            for high, wide in {(rows, columns), (columns, rows)}:
                tiles = batch * -(-m // high) * -(-n // wide)
                for split in _SPLITS:
                    if split > 1 and k < split * _LEAST_SPLIT:
                        break
                    tile_s = 2 * high * wide * -(-k // split) / (multiprocessor_rate * share)
                    if not self._hopper:
                        written_bytes = min(tiles * split, self._multiprocessors) * high * wide * element_bytes
                        tile_s += _TILE_START_S + written_bytes / (_L2_SPEEDUP * self._bytes_per_s)
                    added = 2 * 4 * batch * m * n * split / self._bytes_per_s if split > 1 else 0.0
                    rounds = float(-(-tiles * split // self._multiprocessors))
                    times.append(rounds * tile_s + added)
        return times

    def _attention(self, operation: Operation) -> float:
        backward = "backward" in operation.name
        kernel = next((name for name in _ATTENTION if name in operation.name), "flash")
        if computes_as(operation.dtype, self._rates) in ("float32", "tf32"):
            return operation.flops / (_FLASH_ON_CUDA_CORES[backward] * self._rate("float32"))
        share = _ATTENTION[kernel][backward]
        flops = float(operation.flops)
        if self._hopper and kernel != "cudnn":
            share = (_FLASH_ON_HOPPER if kernel == "flash" else _EFFICIENT_ON_HOPPER)[backward]
        if kernel == "cudnn":
            _, rows, columns, size = operation.shape
            share *= _SMALL_HEADS[backward] if size < 128 else 1.0
            for length in (rows, columns):
                flops *= -(-length // _ROWS_OF_A_TILE) * _ROWS_OF_A_TILE / length
        if operation.name.endswith("(dropout)") and kernel in _DROPOUT:
            share *= _DROPOUT[kernel][backward]
        dense = 1e12 * self._rates.dense_tflops[computes_as(operation.dtype, self._rates)].value
        return flops / (share * dense)
