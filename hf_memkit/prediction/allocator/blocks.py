"""Blocks in segments, pools of free blocks, and the device memory of the caching allocator.

Names and rules follow pytorch: c10/cuda/CUDACachingAllocator.cpp (`Block`, `BlockPool`, `ExpandableSegment`).
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
    """The size of an expandable segment's address range: nine eighths of the GPU (`ExpandableSegment`)."""
    return gpu_bytes + gpu_bytes // 8


class DeviceMemory:
    """The source of the allocator's memory: `cudaMalloc`, `cuMemCreate` and their counterparts.

    Args:
        size_bytes: memory available to the allocator. Default: no limit.
        total_bytes: capacity of the GPU, which sets the address range of an expandable segment. Default: more than
            can be used.
        order: order of the addresses of new segments, which the driver chooses and nobody documents.
        seed: for `shuffled`.

    Attributes:
        same_from, same_below: a device with any size in [same_from, same_below) would have granted and refused the
            same requests so far (same_below None: no upper limit).
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
        """The address of a new segment of this size; None if the device has too little memory."""
        return self._next_address() if self._take(size_bytes) else None

    def reserve_addresses(self, size_bytes: int) -> tuple[int, int]:
        """The first address and the size of a range for an expandable segment, still without memory. The range is
        larger than the GPU if `size_bytes` is, so that the needs of a job that does not fit are counted."""
        return self._next_address(), max(self._range, size_bytes)

    def map_pages(self, address: int, size_bytes: int) -> bool:
        """Takes memory for these pages; False if the device has too little."""
        return self._take(size_bytes)

    def give_back(self, size_bytes: int) -> None:
        self._used -= size_bytes
        if self._left is not None:
            self._left += size_bytes

    def count_from(self, other: DeviceMemory) -> None:
        """Continues the addresses of new segments where `other` stands."""
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
    """An address range that gets memory page by page."""

    address: int
    size_bytes: int
    page_bytes: int


@dataclass(slots=True, eq=False)
class Block:
    """A part of a segment: in use, free (cached), or addresses without memory (`mapped` is False). `rank` precedes the
    address in the order of free blocks of equal size (`FreeOrder`)."""

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
    born: int = 0  # `Pool.searches` when it became free

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
    """Free blocks in the order in which the allocator searches them: by stream, size, rank and address.

    Attributes:
        free: `(stream, size, rank, address, block)`, sorted.
        unmapped: `(stream, address, block)`, sorted: addresses of expandable segments without memory.
    """

    is_small: bool
    free: list[tuple[int, int, int, int, Block]] = field(default_factory=list)
    unmapped: list[tuple[int, int, Block]] = field(default_factory=list)
    searches: int = 0  # for a free block, the clock of garbage collection

    def add(self, block: Block) -> None:
        block.born = self.searches
        if block.mapped:
            insort(self.free, (block.stream, block.size, block.rank, block.address, block))
        else:
            insort(self.unmapped, (block.stream, block.address, block))

    def remove(self, block: Block) -> None:
        if block.mapped:
            del self.free[bisect_left(self.free, (block.stream, block.size, block.rank, block.address))]
        else:
            del self.unmapped[bisect_left(self.unmapped, (block.stream, block.address))]
