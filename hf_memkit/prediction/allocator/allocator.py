"""Simulates PyTorch's caching allocator: which blocks it hands out, and what it takes from and returns to the device.

Each rule follows pytorch: c10/cuda/CUDACachingAllocator.cpp; docstrings name its functions in parentheses. CUDA
graphs, private pools and memory shared between processes are not modelled. A stream can reuse a freed block at once.
"""

from __future__ import annotations

from bisect import bisect_left

from hf_memkit.catalog.library_versions import FreeOrder
from hf_memkit.prediction.allocator.blocks import Block, DeviceMemory, ExpandableSegment, Pool
from hf_memkit.prediction.allocator.settings import MAX_SMALL_BLOCK, MIN_BLOCK, SMALL_SEGMENT, AllocatorSettings


class OutOfDeviceMemory(Exception):
    """No free block is large enough, nothing more can be released, and the device has too little memory."""


class CachingAllocator:
    """The state of the allocator of one device.

    Args:
        settings: its options.
        device: source of its memory. Default: a GPU without limit.
        allowed_bytes: limit of torch for this process (`set_per_process_memory_fraction`). Default: no limit. It is
            checked before pages are rounded up: an expandable segment can exceed it by less than a page.
        order: how free blocks of equal size are ordered; it differs between versions of torch.

    Attributes:
        allocated, requested, reserved: bytes of blocks in use, bytes requested for them, and bytes taken from the
            device; peak_allocated, peak_requested, peak_reserved: their maximum since `reset_peaks`.
        retries: how often all cached memory was released to satisfy a request (`num_alloc_retries`).
    """

    def __init__(
        self,
        settings: AllocatorSettings | None = None,
        device: DeviceMemory | None = None,
        *,
        allowed_bytes: int | None = None,
        order: FreeOrder = "segment",
    ) -> None:
        self.settings = settings or AllocatorSettings()
        self.device = device or DeviceMemory()
        self.small = Pool(is_small=True)
        self.large = Pool(is_small=False)
        self.allocated = self.requested = self.reserved = 0
        self.peak_allocated = self.peak_requested = self.peak_reserved = 0
        self.retries = 0
        self.allowed_bytes = allowed_bytes
        self._collects = allowed_bytes is not None and self.settings.garbage_collection_threshold > 0
        self._order = order
        self._ranks = 0
        self._sizes: dict[int, int] = {}  # rounded sizes, because the same sizes recur

    def malloc(self, size_bytes: int, stream: int = 0, *, search: bool = True) -> Block:
        """Returns a block for a request of `size_bytes`, at least 1; with `search=False` always from new memory.
        Raises OutOfDeviceMemory if no memory is left, although all whole cached segments were released."""
        size = self._sizes.get(size_bytes)
        if size is None:
            size = self._sizes[size_bytes] = self.settings.rounded(size_bytes)
        pool = self.small if size <= MAX_SMALL_BLOCK else self.large
        block = self._free_block(pool, size, stream) if search else None
        if block is None:
            block = self._new_block(pool, size, stream)
        rest, limit = block.size - size, self.settings.max_split_bytes
        if pool.is_small or self.settings.expandable_segments:  # `should_split`
            splits = rest >= MIN_BLOCK
        else:
            splits = (limit is None or size < limit) and rest > MAX_SMALL_BLOCK
        if splits:
            remaining = Block(pool, stream, block.address + size, rest, block.rank, block.expandable)
            remaining.put_between(block, block.next)
            block.size = size
            block.rank = self._part_of(block)  # torch makes a new block of the part that it returns
            pool.add(remaining)
        block.allocated = True
        block.requested = size_bytes
        self.allocated += block.size
        self.requested += size_bytes
        if self.allocated > self.peak_allocated:
            self.peak_allocated = self.allocated
        if self.requested > self.peak_requested:
            self.peak_requested = self.requested
        return block

    def free(self, block: Block) -> None:
        """Returns a block to its pool and merges it with free neighbours (`free_block`)."""
        block.allocated = False
        self.allocated -= block.size
        self.requested -= block.requested
        self._merge(block)
        block.pool.add(block)

    def reset_peaks(self) -> None:
        """Restarts the peaks from the current values."""
        self.peak_allocated = self.allocated
        self.peak_requested = self.requested
        self.peak_reserved = self.reserved

    def release_cached(self) -> None:
        """Releases every free block that is a whole segment, and every whole free page (`release_cached_blocks`)."""
        for pool in (self.large, self.small):
            free = [entry[-1] for entry in pool.free]
            for block in free:
                if block.expandable is None and not block.is_split:
                    self.release_block(block)
            for block in free:
                if block.expandable is not None:
                    self.unmap_pages(block)

    def release_block(self, block: Block) -> None:
        """Releases a free block that is a whole segment."""
        block.pool.remove(block)
        self._remove_reserved(block.size)

    def _free_block(self, pool: Pool, size: int, stream: int) -> Block | None:
        """Takes the smallest free block that is large enough out of its pool (`get_free_block`)."""
        if self._collects:
            pool.searches += 1
        free = pool.free
        index = bisect_left(free, (stream, size))
        if index == len(free) or free[index][0] != stream:
            return None
        block = free[index][-1]
        if block.expandable is not None:
            # A block at the edge of the mapped part counts with the size that it can grow to.
            while index + 1 < len(free) and free[index + 1][0] == stream:
                following = free[index + 1][-1]
                if _growable(following) >= _growable(block):
                    break
                index, block = index + 1, following
        limit = self.settings.max_split_bytes
        if limit is not None:
            if size < limit <= block.size:
                return None
            if size >= limit and block.size >= size + self.settings.max_non_split_rounding_bytes:
                return None
        del free[index]
        return block

    def _new_block(self, pool: Pool, size: int, stream: int) -> Block:
        """A block of new memory, after releasing cached memory if needed (`malloc` after `get_free_block` failed)."""
        if self._collects:
            self._collect()
        block = self._grow(pool, size, stream)
        if block is None and self._release_available(pool, size, stream):
            block = self._grow(pool, size, stream)
        if block is None:
            self.release_cached()
            self.retries += 1
            block = self._grow(pool, size, stream)
        if block is None:
            raise OutOfDeviceMemory
        return block

    def _grow(self, pool: Pool, size: int, stream: int) -> Block | None:
        """A block of new memory (`alloc_block`); None if the device or torch's limit has too little left."""
        wanted = self.settings.segment_bytes(size)
        if self.allowed_bytes is not None and self.reserved + wanted > self.allowed_bytes:
            return None
        if self.settings.expandable_segments:
            return self._expand(pool, size, stream)
        address = self.device.segment(wanted)
        if address is None:
            return None
        self._add_reserved(wanted)
        return Block(pool, stream, address, wanted, self._next_rank())

    def _collect(self) -> None:
        """Releases whole free segments of the large pool until reserved memory is below the threshold. As
        `garbage_collect_cached_blocks`: releases all blocks of at least the average age, counted in searches since
        they became free, then repeats with the remaining blocks."""
        if self.allowed_bytes is None:
            return
        threshold = int(self.settings.garbage_collection_threshold * self.allowed_bytes)
        target = self.reserved - threshold
        pool = self.large
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
                    self.release_block(block)
            whole = [(age, block) for age, block in whole if age < average]

    def _release_available(self, pool: Pool, size: int, stream: int) -> bool:
        """Releases one large free block of at least `size`, or several, largest first; False if they are too small.
        Only with `max_split_size_mb` (`release_available_cached_blocks`)."""
        limit = self.settings.max_split_bytes
        if limit is None:
            return False
        wanted = max(size, limit)
        index = bisect_left(pool.free, (stream, wanted))
        if index < len(pool.free) and pool.free[index][0] == stream and pool.free[index][-1].expandable is None:
            self.release_block(pool.free[index][-1])
            return True
        released = 0
        for owner, block_size, _, _, block in reversed(pool.free[:index]):
            if released >= wanted or block_size < limit or owner != stream:
                break
            if block.expandable is None:
                released += block_size
                self.release_block(block)
        return released >= wanted

    # Expandable segments: address ranges whose pages get and lose memory individually.

    def _expand(self, pool: Pool, size: int, stream: int) -> Block | None:
        """A block at the lowest address where adjacent free and unmapped blocks are large enough, mapped
        (`try_allocate_expandable_block`)."""
        block = self._free_range(pool, size, stream)
        if not block.mapped and not self.map_pages(block, min(block.size, size)):
            return None
        while block.size < size:
            following = block.next
            assert following is not None
            if not self.map_pages(following, min(size - block.size, following.size)):
                return None
            block = following  # mapping merged the preceding blocks into it
        pool.remove(block)
        return block

    def _free_range(self, pool: Pool, size: int, stream: int) -> Block:
        """First block of such a range, in a new segment if none exists (`find_expandable_block`)."""
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
        page = SMALL_SEGMENT if pool.is_small else self.settings.large_segment_bytes
        address, room = self.device.reserve_addresses(size)
        segment = ExpandableSegment(address, -(-room // page) * page, page)
        block = Block(pool, stream, address, segment.size_bytes, self._next_rank(), segment)
        block.mapped = False
        pool.add(block)
        return block

    def map_pages(self, block: Block, size: int) -> bool:
        """Maps the first pages of an unmapped block, enough for `size`; False if the device has too little memory."""
        segment, pool = block.expandable, block.pool
        assert segment is not None
        mapped = -(-size // segment.page_bytes) * segment.page_bytes
        if not self.device.map_pages(block.address, mapped):
            return False
        pool.remove(block)
        block.mapped = True
        if mapped < block.size:
            rest = Block(
                pool, block.stream, block.address + mapped, block.size - mapped, self._part_of(block), segment
            )
            rest.mapped = False
            rest.put_between(block, block.next)
            pool.add(rest)
            block.size = mapped
        self._merge(block)
        pool.add(block)
        self._add_reserved(mapped)
        return True

    def unmap_pages(self, block: Block) -> tuple[int, int]:
        """Unmaps the whole pages in a free block of an expandable segment; returns (their first address, size)."""
        segment, pool = block.expandable, block.pool
        assert segment is not None
        page = segment.page_bytes
        start = block.address + -(block.address - segment.address) % page
        end = block.address + block.size - (block.address + block.size - segment.address) % page
        if start >= end:
            return block.address, 0
        pool.remove(block)
        if before := start - block.address:
            left = Block(pool, block.stream, block.address, before, self._part_of(block), segment)
            left.put_between(block.previous, block)
            pool.add(left)
        if after := block.address + block.size - end:
            right = Block(pool, block.stream, end, after, self._part_of(block), segment)
            right.put_between(block, block.next)
            pool.add(right)
        block.address = start
        block.size = end - start
        block.mapped = False
        self._merge(block)
        if block.is_split:
            pool.add(block)  # else the segment and its addresses are gone
        self._remove_reserved(end - start)
        return start, end - start

    def _merge(self, block: Block) -> None:
        """Merges with neighbours that are free and mapped alike (`try_merge_blocks`)."""
        before = block.previous
        if before is not None and not before.allocated and before.mapped == block.mapped:
            before.pool.remove(before)
            block.address = before.address
            block.size += before.size
            block.put_between(before.previous, block.next)
        after = block.next
        if after is not None and not after.allocated and after.mapped == block.mapped:
            after.pool.remove(after)
            block.size += after.size
            block.put_between(block.previous, after.next)

    def _next_rank(self) -> int:
        """The rank of a block that is a new segment."""
        self._ranks += 1
        return 0 if self._order == "address" else self._ranks

    def _part_of(self, block: Block) -> int:
        """The rank of a new block that is split off `block`."""
        return self._next_rank() if self._order == "block" else block.rank

    def _add_reserved(self, size: int) -> None:
        self.reserved += size
        self.peak_reserved = max(self.peak_reserved, self.reserved)

    def _remove_reserved(self, size: int) -> None:
        self.reserved -= size
        self.device.give_back(size)


def _growable(block: Block) -> int:
    """The size of a free block plus the unmapped addresses behind it."""
    after = block.next
    return block.size + (after.size if after is not None and not after.mapped else 0)
