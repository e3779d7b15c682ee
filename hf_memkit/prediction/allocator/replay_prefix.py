"""Replays the start of a trace once for GPUs of many sizes, and copies the allocator's state to continue."""

from __future__ import annotations

import copy
from typing import Final, NamedTuple

from hf_memkit.prediction.allocator.allocator import CachingAllocator, OutOfDeviceMemory
from hf_memkit.prediction.allocator.blocks import Block, DeviceMemory, Pool
from hf_memkit.prediction.allocator.settings import AllocatorSettings
from hf_memkit.prediction.trace.trace import Trace

_SLOTS: Final = tuple(name for name in Block.__slots__ if name not in ("next", "pool", "previous"))


class CapRange(NamedTuple):
    """All caps in [from_bytes, below_bytes) (None: no limit) give one result: the device refuses the same requests."""

    completes: bool
    from_bytes: int
    below_bytes: int | None


class ReplayPrefix:
    """A trace replayed until it first reserves more than `reserved_bytes`. Up to there every GPU with at least that
    much memory grants all requests, so the allocator's state is the same."""

    def __init__(
        self, trace: Trace, settings: AllocatorSettings, reserved_bytes: int, *, gpu_bytes: int | None
    ) -> None:
        self._trace, self._gpu_bytes, self._settings = trace, gpu_bytes, settings
        beyond = self._run(len(trace.events), reserved_bytes)
        self._beyond = self._run(beyond, None)
        self._known: list[CapRange] = []

    def _run(self, stop: int, most_reserved: int | None) -> int:
        """Replays the events before `stop`; returns the first that reserves more than `most_reserved`, or `stop`."""
        self._blocks: dict[int, Block] = {}
        self._allocator = CachingAllocator(self._settings, DeviceMemory(total_bytes=self._gpu_bytes))
        for index in range(stop):
            _replay_event(self._trace, index, self._allocator, self._blocks)
            if most_reserved is not None and self._allocator.reserved > most_reserved:
                return index
        return stop

    def outcome(self, cap_bytes: int) -> CapRange:
        """Whether the trace completes with `cap_bytes` for the allocator, and which caps give the same result."""
        for outcome in self._known:
            if outcome.from_bytes <= cap_bytes and (outcome.below_bytes is None or cap_bytes < outcome.below_bytes):
                return outcome
        held = self._allocator.reserved
        device = DeviceMemory(cap_bytes - held, total_bytes=self._gpu_bytes)
        allocator, blocks = _copy_state(self._allocator, device, self._blocks)
        completes = True
        try:
            for index in range(self._beyond, len(self._trace.events)):
                _replay_event(self._trace, index, allocator, blocks)
        except OutOfDeviceMemory:
            completes = False
        below = None if device.same_below is None else held + device.same_below
        outcome = CapRange(completes, held + device.same_from, below)
        self._known.append(outcome)
        return outcome


def _replay_event(trace: Trace, index: int, allocator: CachingAllocator, blocks: dict[int, Block]) -> None:
    number = trace.events[index]
    if number < 0:
        if (block := blocks.pop(-number, None)) is not None:
            allocator.free(block)
    elif size := trace.sizes_bytes[number - 1]:
        blocks[number] = allocator.malloc(size, trace.stream(number))


def _copy_state(
    allocator: CachingAllocator, device: DeviceMemory, blocks: dict[int, Block]
) -> tuple[CachingAllocator, dict[int, Block]]:
    """Copies the allocator's state to another device, which continues the addresses of new segments."""
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
