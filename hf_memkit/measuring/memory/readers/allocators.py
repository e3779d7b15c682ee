"""Counters of torch's caching allocators: CUDA and ROCm, XPU, MPS."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from hf_memkit.common.units import GIB
from hf_memkit.measuring.memory.readers.base import Mark, MemoryReader


class CachingAllocatorReader(MemoryReader):
    """An allocator with the counters of `torch.cuda.memory_stats` (CUDA, ROCm, XPU), read as a nested dictionary: the
    flat form takes several times as long (torch 2.13: torch/cuda/memory.py)."""

    def __init__(self, module: Any, device: torch.device) -> None:
        self.device = device
        self._module = module

    def read(self) -> dict[str, float]:
        stats = self._stats()
        if not stats:  # nothing has used the device yet
            return {}
        allocated = stats["allocated_bytes"]["all"]["current"]
        reserved = stats["reserved_bytes"]["all"]["current"]
        counters = _counters(allocated, reserved)
        for name, key in (("alloc_retries", "num_alloc_retries"), ("allocator_ooms", "num_ooms")):
            if key in stats:  # XPU counts neither
                counters[name] = stats[key]
        return counters

    def peak(self) -> dict[str, float]:
        mark = self.mark()
        if mark.peak_allocated is None or mark.peak_reserved is None:
            return {}
        return {"peak_allocated_gib": mark.peak_allocated / GIB, "peak_reserved_gib": mark.peak_reserved / GIB}

    def mark(self) -> Mark:
        """Allocated bytes and both peaks from one call."""
        stats = self._stats()
        if not stats:
            return Mark()
        allocated = stats["allocated_bytes"]["all"]
        return Mark(allocated["current"], allocated["peak"], stats["reserved_bytes"]["all"]["peak"])

    def reset_peak(self) -> None:
        if self._module.is_initialized():
            self._module.reset_peak_memory_stats(self.device)

    def capacity(self) -> dict[str, float]:
        return {"capacity_gib": self._module.get_device_properties(self.device).total_memory / GIB}

    def _stats(self) -> Mapping[str, Any]:
        stats: Mapping[str, Any] = self._module.memory_stats_as_nested_dict(self.device)
        return stats


class MpsReader(MemoryReader):
    """torch's allocator for Apple GPUs. It has no peak counter, so there are no peaks, phases or categories.
    `reserved_gib` is the memory that Metal's driver holds for this process, and the capacity is Metal's recommended
    maximum; GPU and host share one memory (torch 2.13: torch/mps/__init__.py)."""

    def __init__(self) -> None:
        self.device = torch.device("mps")

    def read(self) -> dict[str, float]:
        return _counters(torch.mps.current_allocated_memory(), torch.mps.driver_allocated_memory())

    def mark(self) -> Mark:
        return Mark(torch.mps.current_allocated_memory())

    def capacity(self) -> dict[str, float]:
        return {"capacity_gib": torch.mps.recommended_max_memory() / GIB}


def _counters(allocated: int, reserved: int) -> dict[str, float]:
    sizes = {"allocated_gib": allocated, "reserved_gib": reserved, "fragmentation_gib": reserved - allocated}
    return {name: size / GIB for name, size in sizes.items()}
