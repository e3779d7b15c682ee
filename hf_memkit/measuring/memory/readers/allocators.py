"""The counters of torch's caching allocators: CUDA and ROCm, XPU, MPS. In: a device. Out: its counters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from hf_memkit.common.units import GIB
from hf_memkit.measuring.memory.readers.base import Mark


class CachingAllocatorReader:
    """An allocator with the counters of `torch.cuda.memory_stats`, asked for as a nested dictionary: the flat form
    takes several times as long (torch 2.13: torch/cuda/memory.py)."""

    def __init__(self, module: Any, device: torch.device) -> None:
        self.device: torch.device | None = device
        self._module = module

    def read(self) -> dict[str, float]:
        stats = self._stats()
        if not stats:  # nothing has used the device yet
            return {}
        allocated = stats["allocated_bytes"]["all"]["current"]
        reserved = stats["reserved_bytes"]["all"]["current"]
        counters = {
            "allocated_gib": allocated / GIB,
            "reserved_gib": reserved / GIB,
            "fragmentation_gib": (reserved - allocated) / GIB,
        }
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
        """What is allocated and both peaks, from one question."""
        stats = self._stats()
        if not stats:
            return Mark(None, None, None)
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


class CudaReader(CachingAllocatorReader):
    """torch's CUDA allocator (ROCm builds of torch have the same)."""

    def __init__(self, device: torch.device | int | None = None) -> None:
        super().__init__(torch.cuda, _device("cuda", device, torch.cuda.current_device))


class XpuReader(CachingAllocatorReader):
    """torch's allocator for Intel GPUs."""

    def __init__(self, device: torch.device | int | None = None) -> None:
        super().__init__(torch.xpu, _device("xpu", device, torch.xpu.current_device))


class MpsReader:
    """torch's allocator for Apple GPUs. It has no peak counter, so there are no peaks, phases or categories.

    `reserved_gib` is what Metal's driver holds for this process, and the capacity is what Metal recommends to stay
    below; GPU and host share one memory (torch 2.13: torch/mps/__init__.py).
    """

    def __init__(self) -> None:
        self.device: torch.device | None = torch.device("mps")

    def read(self) -> dict[str, float]:
        allocated, reserved = torch.mps.current_allocated_memory(), torch.mps.driver_allocated_memory()
        return {
            "allocated_gib": allocated / GIB,
            "reserved_gib": reserved / GIB,
            "fragmentation_gib": (reserved - allocated) / GIB,
        }

    def peak(self) -> dict[str, float]:
        return {}

    def reset_peak(self) -> None:
        return None

    def mark(self) -> Mark:
        return Mark(torch.mps.current_allocated_memory(), None, None)

    def capacity(self) -> dict[str, float]:
        return {"capacity_gib": torch.mps.recommended_max_memory() / GIB}


def _device(kind: str, device: torch.device | int | None, current: Any) -> torch.device:
    index = device.index if isinstance(device, torch.device) else device
    return torch.device(kind, current() if index is None else index)
