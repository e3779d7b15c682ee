"""What the caching allocator is made of: blocks in segments, pools of free blocks, and the device that gives memory.

Names and rules are those of pytorch: c10/cuda/CUDACachingAllocator.cpp (`Block`, `BlockPool`, `ExpandableSegment`).
"""

from __future__ import annotations

import random
from bisect import bisect_left, insort
from dataclasses import dataclass, field
from typing import Final, Literal

AddressOrder = Literal["ascending", "descending", "shuffled"]

_SEGMENT_SPACING: Final = 2**44  # more than any GPU has, so that segments never touch
_ADDRESS_SPACE: Final = 2**48


def address_range(gpu_bytes: int) -> int:
    """The size of an expandable segment's range of addresses (`ExpandableSegment`): nine eighths of the GPU."""
    return gpu_bytes + gpu_bytes // 8


class DeviceMemory:
    """Where the allocator gets its memory: `cudaMalloc` and `cuMemCreate` with their opposites.

    Args:
        size_bytes: what the allocator can get; None: no limit.
        total_bytes: what the GPU has in all, which decides how many addresses an expandable segment has; None: more
            than can be used.
        order: how the addresses of segments follow one another, which the driver decides and nobody documents.
        seed: for `shuffled`.

    Attributes:
        same_from, same_below: every size from the one up to, but without, the other (None: without end) would have
            given the same answers so far, and an allocator that goes by them has done the same.
    """

    def __init__(
        self,
        size_bytes: int | None = None,
        *,
        total_bytes: int | None = None,
        order: AddressOrder = "ascending",
        seed: int = 0,
    ) -> None:
        self.same_from = 0
        self.same_below: int | None = None
        self._left = size_bytes
        self._used = 0
        self._range = _ADDRESS_SPACE if total_bytes is None else address_range(total_bytes)
        self._order = order
        self._count = 0
        self._random = random.Random(seed)

    def segment(self, size_bytes: int) -> int | None:
        """The address of new memory of this size; None: there is not enough."""
        return self._next_address() if self._take(size_bytes) else None

    def reserve_addresses(self, size_bytes: int) -> tuple[int, int]:
        """The first address and the size of a range for an expandable segment, with no memory behind it yet.

        One that begins with `size_bytes`, more than the GPU has, has room for that: what a job needs that fits on no
        such GPU is counted too."""
        return self._next_address(), max(self._range, size_bytes)

    def map_pages(self, address: int, size_bytes: int) -> bool:
        """Whether there was memory for these pages of such a range."""
        return self._take(size_bytes)

    def give_back(self, size_bytes: int) -> None:
        self._used -= size_bytes
        if self._left is not None:
            self._left += size_bytes

    def count_from(self, other: DeviceMemory) -> None:
        """The next segment gets the address that it would have had on `other`."""
        self._count = other._count

    def _take(self, size_bytes: int) -> bool:
        wanted = self._used + size_bytes
        if self._left is not None:
            if self._left < size_bytes:
                self.same_below = wanted if self.same_below is None else min(wanted, self.same_below)
                return False
            self._left -= size_bytes
        self._used = wanted
        self.same_from = max(wanted, self.same_from)
        return True

    def _next_address(self) -> int:
        self._count += 1
        place = self._count * _SEGMENT_SPACING + _ADDRESS_SPACE
        if self._order == "descending":
            return 2**80 - place
        if self._order == "shuffled":
            return (self._random.getrandbits(32) << 80) + place
        return place


@dataclass(slots=True)
class ExpandableSegment:
    """A range of addresses that gets memory page by page."""

    address: int
    size_bytes: int
    page_bytes: int


@dataclass(slots=True, eq=False)
class Block:
    """A stretch of a segment: in use, free (cached), or addresses without memory (`mapped` is False).

    `rank` comes before the address where free blocks of equal size are put in order (`FreeOrder`).
    """

    pool: Pool
    stream: int
    address: int
    size: int
    rank: int
    expandable: ExpandableSegment | None = None
    requested: int = 0
    allocated: bool = False
    mapped: bool = True
    previous: Block | None = None
    next: Block | None = None
    born: int = 0  # the pool's count of searches when it became free

    @property
    def is_split(self) -> bool:
        return self.previous is not None or self.next is not None

    def put_between(self, before: Block | None, after: Block | None) -> None:
        self.previous, self.next = before, after
        if before is not None:
            before.next = self
        if after is not None:
            after.previous = self


@dataclass(slots=True, eq=False)
class Pool:
    """Free blocks in the order in which the allocator looks at them: by stream, size, rank and address.

    Attributes:
        free: `(stream, size, rank, address, block)`, sorted.
        unmapped: `(stream, address, block)`, sorted: addresses of expandable segments without memory.
        searches: how often a free block was looked for, which is the clock of garbage collection.
    """

    is_small: bool
    free: list[tuple[int, int, int, int, Block]] = field(default_factory=list)
    unmapped: list[tuple[int, int, Block]] = field(default_factory=list)
    searches: int = 0

    def add(self, block: Block) -> None:
        block.born = self.searches
        insort(self.free, (block.stream, block.size, block.rank, block.address, block))

    def remove(self, block: Block) -> None:
        del self.free[bisect_left(self.free, (block.stream, block.size, block.rank, block.address))]

    def add_unmapped(self, block: Block) -> None:
        insort(self.unmapped, (block.stream, block.address, block))

    def remove_unmapped(self, block: Block) -> None:
        del self.unmapped[bisect_left(self.unmapped, (block.stream, block.address))]
