"""Counters outside the device: RAM of this process and of the machine, pinned memory, files of swapped states."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import psutil
import torch

from hf_memkit.common.units import GIB
from hf_memkit.deepspeed.engine_tensors import swapped_bytes
from hf_memkit.measuring.memory.cgroup import available_bytes
from hf_memkit.measuring.memory.readers.base import RateLimit, RateLimitedReader

_STATM = "/proc/self/statm"
_OWN_EVERY_S = 0.1
_AVAILABLE_EVERY_S = 0.5
_SWAP_EVERY_S = 5.0


class HostReader(RateLimitedReader):
    """This process's RAM and the available RAM, at limited rates because the kernel computes them for each read."""

    def __init__(self) -> None:
        super().__init__(_OWN_EVERY_S)
        self._available_limit = RateLimit(_AVAILABLE_EVERY_S)
        self._counters: dict[str, float] = {}

    def read(self) -> dict[str, float]:
        if self._limit.is_due():
            self._counters["host_rss_gib"] = self._rss_bytes() / GIB
            if self._available_limit.is_due():
                limited = available_bytes()
                free = int(psutil.virtual_memory().available)
                self._counters["host_available_gib"] = (free if limited is None else min(free, limited)) / GIB
        return dict(self._counters)

    def refresh(self) -> None:
        super().refresh()
        self._available_limit.reset()

    def _rss_bytes(self) -> int:
        # /proc/self is the reading process, also after a fork. The second number is resident pages (man 5 proc).
        try:
            descriptor = os.open(_STATM, os.O_RDONLY)
        except OSError:
            return int(psutil.Process().memory_info().rss)
        try:
            return int(os.read(descriptor, 128).split()[1]) * os.sysconf("SC_PAGE_SIZE")
        finally:
            os.close(descriptor)


class PinnedReader(RateLimitedReader):
    """Torch's page-locked RAM, with cached blocks; sizes are powers of two (torch 2.13: `cuda.host_memory_stats`)."""

    def __init__(self) -> None:
        super().__init__(_AVAILABLE_EVERY_S)

    def read(self) -> dict[str, float]:
        if not self._limit.is_due():
            return {}
        allocated = torch.cuda.host_memory_stats_as_nested_dict().get("allocated_bytes")
        return {} if allocated is None else {"pinned_gib": allocated["current"] / GIB}


class SwapReader(RateLimitedReader):
    """Bytes of this process in ZeRO-Infinity's files, at most every five seconds."""

    def __init__(self, folders: Sequence[Path], rank: int) -> None:
        super().__init__(_SWAP_EVERY_S)
        self._folders = tuple(folders)
        self._rank = rank

    def read(self) -> dict[str, float]:
        if not self._limit.is_due():
            return {}
        sizes = [size for folder in self._folders for size in swapped_bytes(folder, self._rank).values()]
        return {"disk_swap_gib": sum(sizes) / GIB}
