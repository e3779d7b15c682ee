"""What the caching allocator gives back before it gives back everything: by age, and single large blocks."""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hf_memkit.predict.allocator import CachingAllocator
    from hf_memkit.predict.allocator_blocks import Pool

__all__ = ["collect", "release_available"]


def collect(allocator: CachingAllocator) -> None:
    """Above the threshold: gives back whole free segments of the large pool, those longest unused first, until the
    process is below it (`garbage_collect_cached_blocks`).

    A block's age is the number of searches in its pool since it became free. All blocks of at least the average age
    go at once, then again of those left.
    """
    if allocator.allowed_bytes is None:
        return
    threshold = int(allocator.settings.garbage_collection_threshold * allocator.allowed_bytes)
    target = allocator.reserved - threshold
    pool = allocator.large
    whole = [
        (pool.searches - block.born, block)
        for *_, block in pool.free
        if not block.is_split and block.expandable is None
    ]
    released = 0
    while whole and released < target:
        average = sum(age for age, _ in whole) / len(whole)
        for age, block in whole:
            if age >= average:
                released += block.size
                allocator.release_block(block)
        whole = [(age, block) for age, block in whole if age < average]


def release_available(allocator: CachingAllocator, pool: Pool, size: int, stream: int) -> bool:
    """Gives back one large free block that is enough for `size`, or several, largest first; False: they are not
    enough. Only with `max_split_size_mb` (`release_available_cached_blocks`)."""
    limit = allocator.settings.max_split_bytes
    if limit is None:
        return False
    wanted = max(size, limit)
    index = bisect_left(pool.free, (stream, wanted))
    if index < len(pool.free) and pool.free[index][0] == stream and pool.free[index][-1].expandable is None:
        allocator.release_block(pool.free[index][-1])
        return True
    released = 0
    for owner, block_size, _, _, block in reversed(pool.free[:index]):
        if released >= wanted or block_size < limit or owner != stream:
            break
        if block.expandable is None:
            released += block_size
            allocator.release_block(block)
    return released >= wanted
