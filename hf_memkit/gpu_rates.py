"""How fast named GPUs are: achievable rates by type, memory bandwidth, PCIe, NVLink; each figure with its source.

*Achievable* is what a large product, or a large copy, reaches when it is measured; where nobody has published that, it
is the data sheet's dense figure times the share that the same generation reaches, and the source says so. Figures with
sparsity are refused (tests/test_gpu_rates.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

__all__ = ["RATES", "Figure", "GpuRates", "rates_of"]


@dataclass(frozen=True, slots=True)
class Figure:
    """A number and where it comes from. `measured`: somebody measured it; else it is a data sheet's, or computed."""

    value: float
    source: str
    measured: bool = False


@dataclass(frozen=True, slots=True)
class GpuRates:
    """
    Attributes:
        dense_tflops: by type (`"float32"` without TF32, `"tf32"`, `"bfloat16"`, `"float16"`, `"int8"`): the data
            sheet's dense rate, 10^12 operations/s. A type that the GPU does not compute in is not there.
        achievable_tflops: what large products reach of it.
        memory_gb_per_s: the data sheet's bandwidth of the GPU's memory, 10^9 bytes/s.
        achievable_memory_gb_per_s: what large copies reach of it.
        pcie_gb_per_s: one direction, page-locked memory, as reached.
        nvlink_gb_per_s: one direction, all links of a GPU together, by the data sheet; None: it has none.
        multiprocessors: streaming multiprocessors.
    """

    dense_tflops: Mapping[str, Figure]
    achievable_tflops: Mapping[str, Figure]
    memory_gb_per_s: Figure
    achievable_memory_gb_per_s: Figure
    pcie_gb_per_s: Figure
    nvlink_gb_per_s: Figure | None
    multiprocessors: Figure


RATES: Final[Mapping[str, GpuRates]] = {}
"""By the names of `cards.CARDS`."""


def rates_of(name: str) -> GpuRates | None:
    """Of a GPU by its name in `cards.CARDS`; None: nothing is known of it, and a plan has no times."""
    return RATES.get(name)
