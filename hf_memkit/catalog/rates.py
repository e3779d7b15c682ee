"""What GPUs reach, as figures that carry their source: the types of `gpu_rates`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Figure:
    """A number and where it comes from. `measured`: somebody measured it on this GPU; else it is a data sheet's,
    computed, or borrowed from a sister GPU that the source names."""

    value: float
    source: str
    measured: bool = False


@dataclass(frozen=True, slots=True)
class GpuRates:
    """
    Attributes:
        dense_tflops: by type (`"float32"` without TF32, `"tf32"`, `"bfloat16"`, `"float16"`, `"int8"`): the data
            sheet's dense rate, 10^12 operations/s. A type that the GPU does not compute in is not there.
        achievable_tflops: what large products reach of it; the same types.
        memory_gb_per_s: the data sheet's bandwidth of the GPU's memory, 10^9 bytes/s.
        achievable_memory_gb_per_s: what large copies reach of it, bytes read and bytes written together.
        pcie_gb_per_s: one direction, page-locked memory, as reached; the source names generation and lanes.
        nvlink_gb_per_s: one direction, all links of a GPU together, by the data sheet; None: it has none, or only
            with a bridge that is sold by itself.
        multiprocessors: streaming multiprocessors.
    """

    dense_tflops: Mapping[str, Figure]
    achievable_tflops: Mapping[str, Figure]
    memory_gb_per_s: Figure
    achievable_memory_gb_per_s: Figure
    pcie_gb_per_s: Figure
    nvlink_gb_per_s: Figure | None
    multiprocessors: Figure
