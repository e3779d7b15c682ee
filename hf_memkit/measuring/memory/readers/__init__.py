"""Readers of memory counters: flat numbers by name, `{"allocated_gib": 1.5, …}`."""

from __future__ import annotations

import torch

from hf_memkit.measuring.memory.readers.allocators import CachingAllocatorReader, MpsReader
from hf_memkit.measuring.memory.readers.base import MemoryReader
from hf_memkit.measuring.memory.readers.host import HostReader, PinnedReader
from hf_memkit.measuring.memory.readers.nvml import NvmlReader


def readers_for_this_machine(device: torch.device | None = None) -> list[MemoryReader]:
    """The readers for the training's device (default: torch's current accelerator, if any)."""
    if device is None:
        device = torch.accelerator.current_accelerator(check_available=True)
    readers: list[MemoryReader] = [HostReader()]
    if device is None:
        return readers
    if device.type == "cuda" and torch.cuda.is_available():
        readers += [CachingAllocatorReader(torch.cuda, device), PinnedReader()]
        if torch.version.hip is None:
            readers.append(NvmlReader(device))
    elif device.type == "xpu" and torch.xpu.is_available():
        readers.append(CachingAllocatorReader(torch.xpu, device))
    elif device.type == "mps" and torch.backends.mps.is_available():
        readers.append(MpsReader())
    return readers
