"""Types for rates of GPUs and hosts, each figure with its source."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Figure:
    """A number with its source. `measured`: on this GPU, not from a data sheet, computed, or of a related GPU."""

    value: float
    source: str
    measured: bool = False


@dataclass(frozen=True, slots=True)
class GpuRates:
    """Rates of a GPU.

    Attributes:
        dense_tflops: dtype (`"float32"` without TF32, `"tf32"`, `"bfloat16"`, `"float16"`, `"int8"`) → the data
            sheet's dense rate, 10^12 operations/s; only dtypes that the GPU computes in.
        achievable_tflops: rate of large matrix products, measured or estimated; the same dtypes.
        memory_gb_per_s: the data sheet's memory bandwidth, 10^9 bytes/s.
        achievable_memory_gb_per_s: rate of large copies, bytes read plus bytes written.
        pcie_gb_per_s: achieved rate in one direction, page-locked memory; the source names generation and lanes.
        nvlink_gb_per_s: the data sheet's rate in one direction over all links; None without NVLink or its bridge.
        multiprocessors: number of streaming multiprocessors.
    """

    dense_tflops: Mapping[str, Figure]
    achievable_tflops: Mapping[str, Figure]
    memory_gb_per_s: Figure
    achievable_memory_gb_per_s: Figure
    pcie_gb_per_s: Figure
    nvlink_gb_per_s: Figure | None
    multiprocessors: Figure
