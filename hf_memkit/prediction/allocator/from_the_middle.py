"""A copy of an allocator in the middle of a trace, so that what comes before is replayed once for many GPUs."""

from __future__ import annotations

import copy
from typing import Final, NamedTuple

from hf_memkit.prediction.allocator.allocator import CachingAllocator, OutOfDeviceMemory
from hf_memkit.prediction.allocator.blocks import Block, DeviceMemory, Pool
from hf_memkit.prediction.allocator.settings import AllocatorSettings
from hf_memkit.prediction.trace.trace import Trace

_SLOTS: Final = tuple(name for name in Block.__slots__ if name not in ("next", "pool", "previous"))


class CapRange(NamedTuple):
    """Of every cap from `from_bytes` up to, but without, `below_bytes` (None: without end) comes the same: the device
    grants and refuses the same requests."""

    completes: bool
    from_bytes: int
    below_bytes: int | None


class Started:
    """A trace, replayed up to where it first reserves more than `reserved_bytes`: until then a GPU that has at least
    so much refuses nothing, and the allocator does the same on all of them."""

    def __init__(
        self, trace: Trace, settings: AllocatorSettings, reserved_bytes: int, *, gpu_bytes: int | None
    ) -> None:
        self._trace, self._gpu_bytes, self._settings = trace, gpu_bytes, settings
        beyond = self._run(len(trace.events), reserved_bytes)
        self._beyond = self._run(beyond, None)
        self._known: list[CapRange] = []

    def _run(self, stop: int, most_reserved: int | None) -> int:
        """The first event before `stop` that reserves more than `most_reserved`, or `stop`."""
        self._blocks: dict[int, Block] = {}
        self._allocator = CachingAllocator(self._settings, DeviceMemory(total_bytes=self._gpu_bytes))
        for index in range(stop):
            _do(self._trace, index, self._allocator, self._blocks)
            if most_reserved is not None and self._allocator.reserved > most_reserved:
                return index
        return stop

    def outcome(self, cap_bytes: int) -> CapRange:
        """What comes of a GPU that has `cap_bytes` for the allocator, and of which others the same."""
        for each in self._known:
            if each.from_bytes <= cap_bytes and (each.below_bytes is None or cap_bytes < each.below_bytes):
                return each
        held = self._allocator.reserved
        device = DeviceMemory(cap_bytes - held, total_bytes=self._gpu_bytes)
        allocator, blocks = _copied(self._allocator, device, self._blocks)
        completes = True
        try:
            for index in range(self._beyond, len(self._trace.events)):
                _do(self._trace, index, allocator, blocks)
        except OutOfDeviceMemory:
            completes = False
        below = None if device.same_below is None else held + device.same_below
        found = CapRange(completes, held + device.same_from, below)
        self._known.append(found)
        return found


def _do(trace: Trace, index: int, allocator: CachingAllocator, blocks: dict[int, Block]) -> None:
    """One event, as `replay` does it."""
    number = trace.events[index]
    if number < 0:
        block = blocks.pop(-number, None)
        if block is not None:
            allocator.free(block)
    elif size := trace.sizes_bytes[number - 1]:
        blocks[number] = allocator.malloc(size)


def _copied(
    allocator: CachingAllocator, device: DeviceMemory, blocks: dict[int, Block]
) -> tuple[CachingAllocator, dict[int, Block]]:
    """The same state on another device, of which new segments get the addresses that they would have had."""
    device.count_from(allocator.device)
    result = copy.copy(allocator)
    result.device = device
    result.small, result.large = Pool(is_small=True), Pool(is_small=False)
    twins: dict[int, Block] = {}
    olds = list(blocks.values())
    for pool in (allocator.small, allocator.large):
        olds += [entry[-1] for entry in pool.free]
        olds += [entry[-1] for entry in pool.unmapped]
    for old in olds:
        twin = twins[id(old)] = Block.__new__(Block)
        for name in _SLOTS:
            setattr(twin, name, getattr(old, name))
        twin.pool = result.small if old.pool is allocator.small else result.large
    for old in olds:
        twin = twins[id(old)]
        twin.previous = None if old.previous is None else twins[id(old.previous)]
        twin.next = None if old.next is None else twins[id(old.next)]
    for pool, new in ((allocator.small, result.small), (allocator.large, result.large)):
        new.free = [(*entry[:-1], twins[id(entry[-1])]) for entry in pool.free]
        new.unmapped = [(*entry[:-1], twins[id(entry[-1])]) for entry in pool.unmapped]
        new.searches = pool.searches
    return result, {number: twins[id(block)] for number, block in blocks.items()}
