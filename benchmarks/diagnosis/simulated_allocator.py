"""A process's caching allocator on a made-up GPU, with what its blocks hold. In: sizes to allocate, blocks to free.
Out: torch's counters, and bytes by tag at the peak.

The allocator is that of predictions (`hf_memkit/prediction/allocator.py`), which is compared with recordings of
torch's own. Here the GPU's limit may change while it runs, because other processes come and go.
"""

from __future__ import annotations

from collections.abc import Callable

from hf_memkit.prediction.allocator import CachingAllocator
from hf_memkit.prediction.allocator_blocks import Block, DeviceMemory
from hf_memkit.prediction.allocator_settings import AllocatorSettings


class _Gpu(DeviceMemory):
    """A GPU that leaves the process `limit()` bytes."""

    def __init__(self, limit: Callable[[], int]) -> None:
        super().__init__()
        self._limit = limit

    def _take(self, size_bytes: int) -> bool:
        return self._used + size_bytes <= self._limit() and super()._take(size_bytes)


class SimulatedAllocator(CachingAllocator):
    """One process's allocator on a GPU that leaves it `limit()` bytes."""

    def __init__(self, limit: Callable[[], int], *, expandable: bool = False) -> None:
        super().__init__(AllocatorSettings(expandable_segments=expandable), _Gpu(limit))
        self.by_tag: dict[str, int] = {}
        self.at_peak: dict[str, int] = {}
        self.watching = False
        self._tags: dict[Block, str] = {}

    @property
    def signature(self) -> tuple[int, int, int, int]:
        """Equal before and after a step: the same step again would change nothing."""
        return self.allocated, self.reserved, len(self.small.free), len(self.large.free)

    def allocate(self, size: int, tag: str) -> Block:
        """Raises OutOfDeviceMemory."""
        before = self.peak_allocated
        block = self.malloc(max(int(size), 1))
        self._tags[block] = tag
        self.by_tag[tag] = self.by_tag.get(tag, 0) + block.size
        if self.watching and self.peak_allocated > before:
            self.at_peak = dict(self.by_tag)
        return block

    def release(self, block: Block) -> None:
        self.by_tag[self._tags.pop(block)] -= block.size
        self.free(block)

    def reset_peak(self) -> None:
        self.reset_peaks()
        if self.watching:
            self.at_peak = dict(self.by_tag)
