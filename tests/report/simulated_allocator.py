"""torch's CUDA caching allocator in Python. In: sizes to allocate and blocks to free. Out: its counters.

The rules are those of torch 2.13, c10/cuda/CUDACachingAllocator.cpp; the constants of c10/core/AllocatorConfig.h.
Sizes are rounded up to 512 bytes; requests up to 1 MiB come from segments of 2 MiB, those below 10 MiB from segments
of 20 MiB, larger ones from a segment of their own, rounded up to 2 MiB; the smallest free block that fits is taken
and split; neighbours that are free are joined; nothing goes back to the card until a request fails, and then every
segment that is free as a whole does (`num_alloc_retries`). With expandable segments each pool is one range that grows
at its end; what is given back there is simplified to the free end of the range.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable

__all__ = ["Block", "CardFull", "SimulatedAllocator"]

_ROUND = 512
_SMALL = 2**20
_SMALL_SEGMENT = 2 * 2**20
_LARGE_SEGMENT = 20 * 2**20
_OWN_SEGMENT = 10 * 2**20
_OWN_ROUND = 2 * 2**20


class CardFull(Exception):
    """No memory after the cache was given back: what torch raises OutOfMemoryError for."""


class Block:
    """A piece of a segment. `tag` says what it holds, for the categories of a record."""

    __slots__ = ("free", "next", "previous", "serial", "size", "small", "tag")

    def __init__(self, size: int, serial: int, small: bool) -> None:
        self.size = size
        self.serial = serial
        self.small = small
        self.free = True
        self.previous: Block | None = None
        self.next: Block | None = None
        self.tag = ""


class SimulatedAllocator:
    """One process's allocator on a card that leaves it `limit()` bytes."""

    def __init__(self, limit: Callable[[], int], *, expandable: bool = False) -> None:
        self.allocated = self.reserved = 0
        self.peak_allocated = self.peak_reserved = 0
        self.retries = 0
        self.by_tag: dict[str, int] = {}
        self.at_peak: dict[str, int] = {}
        self.watching = False
        self._limit = limit
        self._expandable = expandable
        self._serial = 0
        self._free: dict[bool, list[tuple[int, int, Block]]] = {True: [], False: []}
        self._tail: dict[bool, Block] = {}

    @property
    def signature(self) -> tuple[int, int, int, int]:
        """Equal before and after a step: the same step again would change nothing."""
        return self.allocated, self.reserved, len(self._free[True]), len(self._free[False])

    def allocate(self, size: int, tag: str) -> Block:
        """Raises CardFull."""
        size = max(-(-int(size) // _ROUND), 1) * _ROUND
        small = size <= _SMALL
        free = self._free[small]
        index = bisect_left(free, (size,))
        block = free.pop(index)[2] if index < len(free) else self._segment(size, small)
        rest = block.size - size
        if rest >= _ROUND if small else rest > _SMALL:
            self._split(block, size)
        block.free = False
        block.tag = tag
        self.allocated += block.size
        self.by_tag[tag] = self.by_tag.get(tag, 0) + block.size
        if self.allocated > self.peak_allocated:
            self.peak_allocated = self.allocated
            if self.watching:
                self.at_peak = dict(self.by_tag)
        return block

    def release(self, block: Block) -> None:
        self.allocated -= block.size
        self.by_tag[block.tag] -= block.size
        block.free = True
        free = self._free[block.small]
        for neighbour in (block.previous, block.next):
            if neighbour is not None and neighbour.free:
                del free[bisect_left(free, (neighbour.size, neighbour.serial))]
                self._join(block, neighbour)
        insort(free, (block.size, block.serial, block))

    def reset_peak(self) -> None:
        self.peak_allocated, self.peak_reserved = self.allocated, self.reserved
        if self.watching:
            self.at_peak = dict(self.by_tag)

    def empty_cache(self) -> None:
        """Gives back what is free as a whole."""
        for small, free in self._free.items():
            if self._expandable:
                self._shrink(small)
                continue
            kept = [entry for entry in free if entry[2].previous is not None or entry[2].next is not None]
            self.reserved -= sum(entry[0] for entry in free) - sum(entry[0] for entry in kept)
            self._free[small] = kept

    def _segment(self, size: int, small: bool) -> Block:
        wanted = _SMALL_SEGMENT if small else _LARGE_SEGMENT
        tail = self._tail.get(small)
        if self._expandable:  # the range grows by what its free end lacks
            lacking = size - (tail.size if tail is not None and tail.free else 0)
            wanted = -(-lacking // wanted) * wanted
        elif not small and size >= _OWN_SEGMENT:
            wanted = -(-size // _OWN_ROUND) * _OWN_ROUND
        if self.reserved + wanted > self._limit():
            self.empty_cache()
            self.retries += 1
            tail = self._tail.get(small)
            if self._expandable:
                lacking = size - (tail.size if tail is not None and tail.free else 0)
                wanted = -(-lacking // _SMALL_SEGMENT) * _SMALL_SEGMENT
            if self.reserved + wanted > self._limit():
                raise CardFull
        self.reserved += wanted
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        self._serial += 1
        block = Block(wanted, self._serial, small)
        if self._expandable:
            if tail is not None:
                tail.next, block.previous = block, tail
                if tail.free:
                    free = self._free[small]
                    del free[bisect_left(free, (tail.size, tail.serial))]
                    self._join(block, tail)
            self._tail[small] = block
        return block

    def _shrink(self, small: bool) -> None:
        tail = self._tail.get(small)
        if tail is None or not tail.free or tail.previous is None:
            return
        free = self._free[small]
        del free[bisect_left(free, (tail.size, tail.serial))]
        self.reserved -= tail.size
        tail.previous.next = None
        self._tail[small] = tail.previous

    def _split(self, block: Block, size: int) -> None:
        self._serial += 1
        rest = Block(block.size - size, self._serial, block.small)
        block.size = size
        rest.previous, rest.next = block, block.next
        if rest.next is not None:
            rest.next.previous = rest
        block.next = rest
        if self._tail.get(block.small) is block:
            self._tail[block.small] = rest
        insort(self._free[block.small], (rest.size, rest.serial, rest))

    def _join(self, block: Block, neighbour: Block) -> None:
        """`block` takes over a free neighbour, which is on no list any more."""
        block.size += neighbour.size
        if neighbour is block.previous:
            block.previous = neighbour.previous
            if block.previous is not None:
                block.previous.next = block
        else:
            block.next = neighbour.next
            if block.next is not None:
                block.next.previous = block
        if self._tail.get(block.small) is neighbour:
            self._tail[block.small] = block
