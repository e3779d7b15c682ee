"""PyTorch's caching allocator, replayed: which blocks it hands out, what it asks of the device, what it gives back.

Each rule is that of pytorch: c10/cuda/CUDACachingAllocator.cpp, whose function is named beside it. CUDA graphs,
private pools and memory shared between processes are left out. A freed block can be used again at once by its stream.
"""

from __future__ import annotations

from bisect import bisect_left

from hf_memkit.catalog.library_versions import FreeOrder
from hf_memkit.prediction.allocator.blocks import Block, DeviceMemory, ExpandableSegment, Pool
from hf_memkit.prediction.allocator.settings import LARGEST_SMALL, LEAST_BLOCK, SMALL_SEGMENT, AllocatorSettings


class OutOfDeviceMemory(Exception):
    """No free block served, nothing more could be given back, and the device had not enough."""


class CachingAllocator:
    """The state of the allocator of one device.

    Args:
        settings: the options it works by.
        device: where its memory comes from; None: a GPU without limit.
        allowed_bytes: what torch lets this process take (`set_per_process_memory_fraction`); None: no limit. It is
            asked before pages are counted: an expandable segment can pass it by less than a page.
        order: what decides between free blocks of equal size; it differs between versions of torch.

    Attributes:
        allocated, requested, reserved: bytes of blocks in use, of what was asked for in them, and of what the device
            has given; peak_allocated, peak_requested, peak_reserved: the highest since `reset_peaks`.
        retries: how often everything cached had to go back before the device could give (`num_alloc_retries`).
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
        self._sizes: dict[int, int] = {}  # sizes recur, and rounding takes a while

    def malloc(self, size_bytes: int, stream: int = 0, *, search: bool = True) -> Block:
        """The block for a request of `size_bytes`, at least 1; with `search=False` one of new memory in any case.

        Raises:
            OutOfDeviceMemory: there is none, and what is cached and whole has been given back.
        """
        size = self._sizes.get(size_bytes)
        if size is None:
            size = self._sizes[size_bytes] = self.settings.rounded(size_bytes)
        pool = self.small if size <= LARGEST_SMALL else self.large
        block = self._free_block(pool, size, stream) if search else None
        if block is None:
            block = self._new_block(pool, size, stream)
        rest = block.size - size
        if rest and self._splits(pool, size, rest):
            remaining = Block(pool, stream, block.address + size, rest, block.rank, block.expandable)
            remaining.put_between(block, block.next)
            block.size = size
            block.rank = self._part_of(block)  # torch makes a new block of the part that it hands out
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
        """Puts a block back among the free ones, merged with free neighbours (`free_block`)."""
        block.allocated = False
        self.allocated -= block.size
        self.requested -= block.requested
        self._merge(block)
        block.pool.add(block)

    def reset_peaks(self) -> None:
        """The peaks begin again from what is held now."""
        self.peak_allocated, self.peak_requested, self.peak_reserved = self.allocated, self.requested, self.reserved

    def release_cached(self) -> None:
        """Gives back every free block that is a whole segment, and every whole free page (`release_cached_blocks`)."""
        for pool in (self.large, self.small):
            free = [entry[-1] for entry in pool.free]
            for block in free:
                if block.expandable is None and not block.is_split:
                    self.release_block(block)
            for block in free:
                if block.expandable is not None:
                    self.unmap_pages(block)

    def release_block(self, block: Block) -> None:
        """Gives back a free block that is a whole segment."""
        block.pool.remove(block)
        self._given_back(block.size)

    def _free_block(self, pool: Pool, size: int, stream: int) -> Block | None:
        """The smallest free block that serves (`get_free_block`)."""
        if self._collects:
            pool.searches += 1
        free = pool.free
        index = bisect_left(free, (stream, size))
        if index == len(free) or free[index][0] != stream:
            return None
        block = free[index][-1]
        if block.expandable is not None:
            # A block at the edge of what has memory counts with what it can grow to.
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
        """A block of new memory, given back first what has to be (`malloc` after `get_free_block` failed)."""
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
        """New memory of the device (`alloc_block`); None: it has not enough, or torch does not allow it."""
        asked = self.settings.segment_bytes(size)
        if self.allowed_bytes is not None and self.reserved + asked > self.allowed_bytes:
            return None
        if self.settings.expandable_segments:
            return self._expand(pool, size, stream)
        address = self.device.segment(asked)
        if address is None:
            return None
        self._given(asked)
        return Block(pool, stream, address, asked, self._next_rank())

    def _collect(self) -> None:
        """Above the threshold: gives back whole free segments of the large pool, until the process is below it
        (`garbage_collect_cached_blocks`): all blocks of at least the average age, counted in searches since they
        became free, then again of those left."""
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
        """Gives back one large free block that is enough for `size`, or several, largest first; False: they are not
        enough. Only with `max_split_size_mb` (`release_available_cached_blocks`)."""
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

    # Expandable segments: ranges of addresses of which single pages get memory, and give it back.

    def _expand(self, pool: Pool, size: int, stream: int) -> Block | None:
        """A block at the lowest address where free and unmapped blocks in a row are enough, mapped
        (`try_allocate_expandable_block`)."""
        block = self._room(pool, size, stream)
        if not block.mapped and not self.map_pages(block, min(block.size, size)):
            return None
        while block.size < size:
            following = block.next
            assert following is not None
            if not self.map_pages(following, min(size - block.size, following.size)):
                return None
            block = following  # it has taken the blocks before it
        pool.remove(block)
        return block

    def _room(self, pool: Pool, size: int, stream: int) -> Block:
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
        page = SMALL_SEGMENT if pool.is_small else self.settings.large_segment_bytes
        address, room = self.device.reserve_addresses(size)
        segment = ExpandableSegment(address, -(-room // page) * page, page)
        block = Block(pool, stream, address, segment.size_bytes, self._next_rank(), segment)
        block.mapped = False
        pool.add_unmapped(block)
        return block

    def map_pages(self, block: Block, size: int) -> bool:
        """Puts memory behind the first pages of an unmapped block, enough for `size`; False: the device has not."""
        segment, pool = block.expandable, block.pool
        assert segment is not None
        mapped = -(-size // segment.page_bytes) * segment.page_bytes
        if not self.device.map_pages(block.address, mapped):
            return False
        pool.remove_unmapped(block)
        block.mapped = True
        if mapped < block.size:
            rest = Block(
                pool, block.stream, block.address + mapped, block.size - mapped, self._part_of(block), segment
            )
            rest.mapped = False
            rest.put_between(block, block.next)
            pool.add_unmapped(rest)
            block.size = mapped
        self._merge(block)
        pool.add(block)
        self._given(mapped)
        return True

    def unmap_pages(self, block: Block) -> tuple[int, int]:
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
            left = Block(pool, block.stream, block.address, before, self._part_of(block), segment)
            left.put_between(block.previous, block)
            pool.add(left)
        if after:
            right = Block(pool, block.stream, end, after, self._part_of(block), segment)
            right.put_between(block, block.next)
            pool.add(right)
        block.address, block.size, block.mapped = start, end - start, False
        self._merge(block)
        if block.is_split:
            pool.add_unmapped(block)  # else the segment is gone, and its addresses with it
        self._given_back(end - start)
        return start, end - start

    def _splits(self, pool: Pool, size: int, rest: int) -> bool:
        """Whether what is left of a block becomes a block of its own (`should_split`)."""
        if pool.is_small or self.settings.expandable_segments:
            return rest >= LEAST_BLOCK
        limit = self.settings.max_split_bytes
        return (limit is None or size < limit) and rest > LARGEST_SMALL

    def _merge(self, block: Block) -> None:
        """Takes in the neighbours that are free and mapped as it is (`try_merge_blocks`)."""
        before = block.previous
        if before is not None and not before.allocated and before.mapped == block.mapped:
            _take_out(before)
            block.address = before.address
            block.size += before.size
            block.put_between(before.previous, block.next)
        after = block.next
        if after is not None and not after.allocated and after.mapped == block.mapped:
            _take_out(after)
            block.size += after.size
            block.put_between(block.previous, after.next)

    def _next_rank(self) -> int:
        """The rank of a block that is a new segment."""
        self._ranks += 1
        return 0 if self._order == "address" else self._ranks

    def _part_of(self, block: Block) -> int:
        """The rank of a new block that is cut from this one."""
        return self._next_rank() if self._order == "block" else block.rank

    def _given(self, size: int) -> None:
        self.reserved += size
        if self.reserved > self.peak_reserved:
            self.peak_reserved = self.reserved

    def _given_back(self, size: int) -> None:
        self.reserved -= size
        self.device.give_back(size)


def _growable(block: Block) -> int:
    """The size of a free block with the unmapped addresses behind it."""
    after = block.next
    return block.size + (after.size if after is not None and not after.mapped else 0)


def _take_out(block: Block) -> None:
    if block.mapped:
        block.pool.remove(block)
    else:
        block.pool.remove_unmapped(block)
