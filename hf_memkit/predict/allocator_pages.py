"""Expandable segments: ranges of addresses of which single pages get memory, and give it back."""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING

from hf_memkit.predict.allocator_blocks import Block, ExpandableSegment, Pool
from hf_memkit.predict.allocator_settings import SMALL_SEGMENT

if TYPE_CHECKING:
    from hf_memkit.predict.allocator import CachingAllocator

__all__ = ["expand", "map_pages", "unmap_pages"]


def unmap_pages(allocator: CachingAllocator, block: Block) -> tuple[int, int]:
    """Gives back the whole pages in a free block of an expandable segment: their first address and size."""
    segment, pool = block.expandable, block.pool
    assert segment is not None
    page = segment.page_bytes
    start = block.address + -(block.address - segment.address) % page
    end = block.address + block.size - (block.address + block.size - segment.address) % page
    if start >= end:
        return block.address, 0
    pool.remove(block)
    before, after = start - block.address, block.address + block.size - end
    if before:
        left = Block(pool, block.stream, block.address, before, allocator.part_of(block), segment)
        left.put_between(block.previous, block)
        pool.add(left)
    if after:
        right = Block(pool, block.stream, end, after, allocator.part_of(block), segment)
        right.put_between(block, block.next)
        pool.add(right)
    block.address, block.size, block.mapped = start, end - start, False
    allocator.merge(block)
    if block.is_split:
        pool.add_unmapped(block)  # else the segment is gone, and its addresses with it
    allocator.given_back(end - start)
    return start, end - start


def map_pages(allocator: CachingAllocator, block: Block, size: int) -> bool:
    """Puts memory behind the first pages of an unmapped block, enough for `size`; False: the device has not."""
    segment, pool = block.expandable, block.pool
    assert segment is not None
    mapped = -(-size // segment.page_bytes) * segment.page_bytes
    if not allocator.device.map_pages(block.address, mapped):
        return False
    pool.remove_unmapped(block)
    block.mapped = True
    if mapped < block.size:
        rest = Block(
            pool, block.stream, block.address + mapped, block.size - mapped, allocator.part_of(block), segment
        )
        rest.mapped = False
        rest.put_between(block, block.next)
        pool.add_unmapped(rest)
        block.size = mapped
    allocator.merge(block)
    pool.add(block)
    allocator.given(mapped)
    return True


def expand(allocator: CachingAllocator, pool: Pool, size: int, stream: int) -> Block | None:
    """A block at the lowest address where free and unmapped blocks in a row are enough, with memory put behind
    the unmapped ones (`try_allocate_expandable_block`)."""
    block = _room(allocator, pool, size, stream)
    if not block.mapped and not map_pages(allocator, block, min(block.size, size)):
        return None
    while block.size < size:
        following = block.next
        assert following is not None
        if not map_pages(allocator, following, min(size - block.size, following.size)):
            return None
        block = following  # it has taken the blocks before it
    pool.remove(block)
    return block


def _room(allocator: CachingAllocator, pool: Pool, size: int, stream: int) -> Block:
    """Where such a row begins; a new segment where there is none (`find_expandable_block`)."""
    for place in range(bisect_left(pool.unmapped, (stream,)), len(pool.unmapped)):
        owner, _, block = pool.unmapped[place]
        if owner != stream:
            break
        if block.previous is not None and not block.previous.allocated:
            block = block.previous
        here: Block | None = block
        room = 0
        while room < size and here is not None and not here.allocated:
            room += here.size
            here = here.next
        if room >= size:
            return block
    page = SMALL_SEGMENT if pool.is_small else allocator.settings.large_segment_bytes
    address, room = allocator.device.reserve_addresses()
    segment = ExpandableSegment(address, -(-room // page) * page, page)
    block = Block(pool, stream, address, segment.size_bytes, allocator.next_rank(), segment)
    block.mapped = False
    pool.add_unmapped(block)
    return block
