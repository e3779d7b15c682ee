"""The allocator's rules, each by an example that was worked out by hand from the rule in its comment."""

from __future__ import annotations

import pytest

from hf_memkit.catalog.library_versions import FreeOrder, free_order
from hf_memkit.common.units import MIB
from hf_memkit.prediction.allocator.allocator import CachingAllocator, OutOfDeviceMemory
from hf_memkit.prediction.allocator.blocks import DeviceMemory
from hf_memkit.prediction.allocator.replay import replay
from hf_memkit.prediction.allocator.settings import AllocatorSettings
from tests.prediction.traces import trace_of

EXPANDABLE = AllocatorSettings(expandable_segments=True)


def held(*sizes: int, settings: AllocatorSettings | None = None) -> tuple[int, int]:
    """Reserved and allocated bytes after these requests, none of them freed."""
    allocator = CachingAllocator(settings)
    for size in sizes:
        allocator.malloc(size)
    return allocator.reserved, allocator.allocated


def test_segments_of_fixed_size() -> None:
    assert held(1) == (2 * MIB, 512)
    assert held(MIB) == (2 * MIB, MIB)
    assert held(MIB, MIB, MIB) == (4 * MIB, 3 * MIB)  # two in a segment of 2 MiB
    assert held(MIB + 1) == (20 * MIB, MIB + 512)  # between 1 and 10 MiB: cut from 20 MiB
    assert held(*[2 * MIB] * 11) == (40 * MIB, 22 * MIB)  # ten in a segment
    assert held(10 * MIB) == (10 * MIB, 10 * MIB)  # from 10 MiB on: a separate segment, a multiple of 2 MiB
    assert held(10 * MIB + 1) == (12 * MIB, 10 * MIB + 512)  # the rest is above 1 MiB: cut off
    assert held(19 * MIB + 512) == (20 * MIB, 20 * MIB)  # the rest, 1 MiB - 512, stays with the block and counts


def test_expandable_segments_grow_by_pages() -> None:
    assert held(1, settings=EXPANDABLE) == (2 * MIB, 512)  # small pool: pages of 2 MiB
    assert held(10 * MIB + 1, settings=EXPANDABLE) == (20 * MIB, 10 * MIB + 512)  # large pool: of 20 MiB
    assert held(25 * MIB, settings=EXPANDABLE) == (40 * MIB, 25 * MIB)
    assert held(25 * MIB, 30 * MIB, settings=EXPANDABLE) == (60 * MIB, 55 * MIB)  # 15 are left: one page is enough
    assert held(19 * MIB + 512, settings=EXPANDABLE) == (20 * MIB, 19 * MIB + 512)  # any rest is cut off
    pages = AllocatorSettings(expandable_segments=True, large_segment_bytes=32 * MIB)
    assert held(25 * MIB, settings=pages) == (32 * MIB, 25 * MIB)


def test_what_decides_between_free_blocks_of_equal_size() -> None:
    # Two segments of 30, the older one at the higher address. From the older one 11 were cut: what is left of it kept
    # its block's age, and 11 is the youngest block; merged with it, 11 stays the block, so that 30 is the youngest.
    expected: dict[FreeOrder, int] = {"segment": 0, "block": 1, "address": 1}
    for order, place in expected.items():
        allocator = CachingAllocator(device=DeviceMemory(order="descending"), order=order)
        blocks = [allocator.malloc(30 * MIB) for _ in range(2)]
        addresses = [block.address for block in blocks]
        assert addresses[0] > addresses[1]
        allocator.free(blocks[0])
        part = allocator.malloc(11 * MIB)
        assert part.address == addresses[0]
        allocator.free(part)
        allocator.free(blocks[1])
        assert allocator.malloc(30 * MIB).address == addresses[place], order
    ascending = CachingAllocator(device=DeviceMemory(), order="block")
    first, second = (ascending.malloc(30 * MIB) for _ in range(2))
    for block in (second, first):
        ascending.free(block)
    assert ascending.malloc(30 * MIB) is first  # whichever was freed first: the older one
    assert [free_order(version) for version in ("2.11.0", "2.12.1+cu130", "2.13.0", "2.14.1")] == [
        "address", "block", "segment", "segment",
    ]  # fmt: skip


def test_streams_share_no_free_blocks() -> None:
    allocator = CachingAllocator()
    allocator.free(allocator.malloc(30 * MIB, 1))
    allocator.malloc(30 * MIB, 2)
    assert allocator.reserved == 60 * MIB
    allocator.malloc(30 * MIB, 1)
    assert allocator.reserved == 60 * MIB


def test_max_split_size() -> None:
    # Blocks of 32 MiB and more are not cut, and serve no request below 32 MiB, nor one 20 MiB smaller.
    settings = AllocatorSettings(max_split_bytes=32 * MIB)
    allocator = CachingAllocator(settings)
    allocator.free(allocator.malloc(50 * MIB))
    allocator.malloc(31 * MIB)
    assert allocator.reserved == 82 * MIB  # a new segment of 32
    block = allocator.malloc(40 * MIB)
    assert (allocator.reserved, block.size) == (82 * MIB, 50 * MIB)  # served whole, and counted so
    allocator.free(block)
    assert allocator.malloc(32 * MIB).size == 50 * MIB  # 50 is below 32 + 20
    other = CachingAllocator(settings)
    other.free(other.malloc(52 * MIB))
    assert other.malloc(32 * MIB).size == 32 * MIB and other.reserved == 84 * MIB  # 52 is not below 32 + 20
    wide = CachingAllocator(AllocatorSettings(max_split_bytes=32 * MIB, max_non_split_rounding_bytes=64 * MIB))
    wide.free(wide.malloc(52 * MIB))
    assert wide.malloc(32 * MIB).size == 52 * MIB


def test_garbage_collection_gives_back_what_was_longest_unused() -> None:
    # Of 100 MiB that are allowed, 50 may be held before collection. Searches of the large pool are its clock.
    settings = AllocatorSettings(garbage_collection_threshold=0.5, memory_fraction=0.5)
    allocator = CachingAllocator(settings, allowed_bytes=100 * MIB)
    first, second = allocator.malloc(20 * MIB), allocator.malloc(20 * MIB)  # searches 1 and 2
    allocator.free(first)
    allocator.free(second)
    third = allocator.malloc(30 * MIB)  # search 3; 40 held: not above 50
    allocator.free(third)
    assert allocator.reserved == 70 * MIB
    allocator.malloc(40 * MIB)  # search 4; 70 held: 20 must go. Ages 2, 2 and 1, 1.67 on average: the first two go
    assert (allocator.reserved, allocator.peak_reserved, allocator.retries) == (70 * MIB, 70 * MIB, 0)
    assert allocator.malloc(30 * MIB).address == third.address
    # Three of one age are all of the average age: all go, more than must.
    alike = CachingAllocator(settings, allowed_bytes=100 * MIB)
    for block in [alike.malloc(size * MIB) for size in (20, 20, 30)]:
        alike.free(block)
    alike.malloc(40 * MIB)
    assert (alike.reserved, alike.retries) == (40 * MIB, 0)
    # Where torch limits nothing, it collects nothing: the same requests, 110 MiB.
    free = CachingAllocator(settings)
    for block in [free.malloc(20 * MIB) for _ in range(2)]:
        free.free(block)
    free.free(free.malloc(30 * MIB))
    free.malloc(40 * MIB)
    assert free.reserved == 110 * MIB


def test_what_torch_allows_is_asked_before_pages_are_counted() -> None:
    # 22 MiB ask for 22, and 45 are allowed: 0 + 22 is allowed, and two pages come. Then 40 + 22 is not.
    allocator = CachingAllocator(EXPANDABLE, allowed_bytes=45 * MIB)
    allocator.malloc(22 * MIB)
    assert allocator.reserved == 40 * MIB
    with pytest.raises(OutOfDeviceMemory):
        allocator.malloc(22 * MIB)
    over = CachingAllocator(EXPANDABLE, allowed_bytes=25 * MIB)
    over.malloc(22 * MIB)
    assert over.reserved == 40 * MIB  # 15 more than allowed: less than a page
    small = CachingAllocator(allowed_bytes=MIB)
    with pytest.raises(OutOfDeviceMemory):
        small.malloc(1)  # asks for a segment of 2 MiB
    card = CachingAllocator(EXPANDABLE, DeviceMemory(25 * MIB))
    with pytest.raises(OutOfDeviceMemory):
        card.malloc(22 * MIB)


def test_a_replay_tells_peaks_by_phase() -> None:
    # forward: 30 and 12; backward begins with 42 held, drops 30, adds 8 (cut from 30); optimizer: 50 more, dropped
    # again; evaluate begins with 20 allocated and 92 reserved, and drops 12.
    sizes = [30 * MIB, 12 * MIB, 8 * MIB, 50 * MIB]
    trace = trace_of(
        [1, 2, -1, 3, 4, -4, -2], sizes, [(2, "forward"), (4, "backward"), (6, "optimizer"), (7, "evaluate")]
    )
    result = replay(trace)
    assert result.allocated_by_phase == {
        "forward": 42 * MIB, "backward": 42 * MIB, "optimizer": 70 * MIB, "evaluate": 20 * MIB,
    }  # fmt: skip
    assert result.reserved_by_phase == {
        "forward": 42 * MIB, "backward": 42 * MIB, "optimizer": 92 * MIB, "evaluate": 92 * MIB,
    }  # fmt: skip
    assert (result.peak_allocated_bytes, result.peak_reserved_bytes) == (70 * MIB, 92 * MIB)
    assert result.completed
    # Without the last marks the rest belongs to the last phase that is known.
    short = replay(trace_of(trace.events, sizes, [(2, "forward"), (4, "backward")]))
    assert short.reserved_by_phase == {"forward": 42 * MIB, "backward": 92 * MIB}
    assert replay(trace_of(trace.events, sizes)).reserved_by_phase == {"load": 92 * MIB}


def test_a_phase_that_comes_again_keeps_its_highest_peak() -> None:
    sizes = [30 * MIB, 12 * MIB]
    result = replay(trace_of([1, -1, 2, -2], sizes, [(1, "forward"), (2, "backward"), (4, "forward")]))
    assert result.allocated_by_phase == {"forward": 30 * MIB, "backward": 30 * MIB}


def test_storages_without_bytes_take_nothing() -> None:
    result = replay(trace_of([1, 2, -1, -2], [0, 5]))
    assert (result.peak_allocated_bytes, result.peak_requested_bytes) == (512, 5)


def test_releases_stand_before_an_event() -> None:
    trace = trace_of([1, -1, 2], [30 * MIB, 50 * MIB])
    assert replay(trace).peak_reserved_bytes == 80 * MIB
    assert replay(trace, releases={2}).peak_reserved_bytes == 50 * MIB


def test_with_max_split_size_single_large_blocks_go_back_first() -> None:
    # 100 hold 60 and 40, both free. For 44: the smallest free block of at least 44 is 60, which goes back and is
    # enough: 40 stay cached, and nothing had to be retried.
    allocator = CachingAllocator(AllocatorSettings(max_split_bytes=32 * MIB), DeviceMemory(100 * MIB))
    for block in [allocator.malloc(size * MIB) for size in (60, 40)]:
        allocator.free(block)
    allocator.malloc(35 * MIB)  # 40 serves it whole
    allocator.malloc(36 * MIB)  # 60 is 24 more: it goes back
    assert (allocator.reserved, allocator.retries) == (76 * MIB, 0)
    # No single one is enough: the largest go back until they are together. 60 + 40 for 80; 34 stay (33 asked for).
    several = CachingAllocator(AllocatorSettings(max_split_bytes=32 * MIB), DeviceMemory(134 * MIB))
    for block in [several.malloc(size * MIB) for size in (60, 40, 33)]:
        several.free(block)
    several.malloc(80 * MIB)
    assert (several.reserved, several.retries) == (114 * MIB, 0)


def test_pages_that_came_stay_when_the_rest_does_not_come() -> None:
    # Pages 0-20 and 40-60 are mapped, 20-40 and what is behind 60 are not. 70 MiB from 5 on would need both; the GPU
    # has one page left: 20-40 comes, 60-80 does not. Everything free goes back, and still there is not enough.
    allocator = CachingAllocator(EXPANDABLE, DeviceMemory(60 * MIB))
    first, middle, last = (allocator.malloc(size * MIB) for size in (5, 40, 5))
    allocator.free(middle)
    allocator.release_cached()
    allocator.free(last)
    with pytest.raises(OutOfDeviceMemory):
        allocator.malloc(70 * MIB)
    assert (allocator.retries, allocator.reserved) == (1, 20 * MIB)
    allocator.free(first)
    allocator.malloc(60 * MIB)
    assert allocator.reserved == 60 * MIB


def test_a_range_of_addresses_ends_at_nine_eighths_of_the_gpu() -> None:
    # A GPU of 160 MiB: a range of 180, full up to 160. 20-60 and 80-140 are freed. For 80 MiB the GPU has nothing
    # left; both places go back, 100 MiB. Neither has room for 80, nor has the end of the range, 20: a second segment.
    allocator = CachingAllocator(EXPANDABLE, DeviceMemory(160 * MIB, total_bytes=160 * MIB))
    blocks = [allocator.malloc(size * MIB) for size in (20, 40, 20, 60, 20)]
    allocator.free(blocks[1])
    allocator.free(blocks[3])
    far = allocator.malloc(80 * MIB)
    assert abs(far.address - blocks[0].address) > 180 * MIB
    assert (allocator.reserved, allocator.retries) == (140 * MIB, 1)
    # With more addresses it would have stood at the end of the first one.
    wide = CachingAllocator(EXPANDABLE, DeviceMemory(160 * MIB, total_bytes=220 * MIB))
    blocks = [wide.malloc(size * MIB) for size in (20, 40, 20, 60, 20)]
    wide.free(blocks[1])
    wide.free(blocks[3])
    assert wide.malloc(80 * MIB).address == blocks[0].address + 160 * MIB


def test_a_block_larger_than_the_gpu_is_counted_too() -> None:
    allocator = CachingAllocator(EXPANDABLE, DeviceMemory(total_bytes=160 * MIB))
    allocator.malloc(20 * MIB)
    allocator.malloc(200 * MIB)
    assert allocator.reserved == 220 * MIB
