"""What holds of every trace: no byte is lost, the limit is kept, and the same trace gives the same replay."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from hf_memkit.common.units import MIB
from hf_memkit.prediction.allocator.allocator import CachingAllocator, OutOfDeviceMemory
from hf_memkit.prediction.allocator.blocks import Block, DeviceMemory, Pool
from hf_memkit.prediction.allocator.replay import replay
from hf_memkit.prediction.allocator.settings import AllocatorSettings, parse_settings
from tests.prediction.traces import random_trace

OPTIONS = (
    "",
    "expandable_segments:True",
    "max_split_size_mb:32",
    "max_split_size_mb:24,max_non_split_rounding_mb:40,roundup_power2_divisions:2",
    "expandable_segments:True,max_split_size_mb:32,roundup_power2_divisions:8",
    "large_segment_size_mb:48,roundup_power2_divisions:[4:4,16:2,>:1]",
    "expandable_segments:True,large_segment_size_mb:33",
)
CAP = 500 * MIB


def segments(allocator: CachingAllocator, live: list[Block]) -> list[list[Block]]:
    """All blocks, a list a segment, in the order of their addresses: from the blocks' own links."""
    every = [
        *live,
        *(entry[-1] for pool in (allocator.small, allocator.large) for entry in (*pool.free, *pool.unmapped)),
    ]
    found = []
    for block in every:
        if block.previous is None:
            chain: list[Block] = []
            here: Block | None = block
            while here is not None:
                chain.append(here)
                here = here.next
            found.append(chain)
    assert sum(map(len, found)) == len(every)  # each block in one segment, and in one list
    return found


def check(allocator: CachingAllocator, live: list[Block]) -> None:
    reserved = 0
    for chain in segments(allocator, live):
        for block, after in pairwise(chain):
            assert block.address + block.size == after.address and after.previous is block
            assert block.allocated or after.allocated or block.mapped != after.mapped  # else they had merged
        reserved += sum(block.size for block in chain if block.mapped)
    assert allocator.reserved == reserved
    assert allocator.allocated == sum(block.size for block in live) <= allocator.reserved
    assert allocator.requested == sum(block.requested for block in live) <= allocator.allocated
    for pool in (allocator.small, allocator.large):
        check_order(pool)


def check_order(pool: Pool) -> None:
    assert pool.free == sorted(pool.free, key=lambda entry: entry[:4])
    for stream, size, rank, address, block in pool.free:
        assert (stream, size, rank, address) == (block.stream, block.size, block.rank, block.address)
        assert block.mapped and not block.allocated


@pytest.mark.parametrize("text", OPTIONS)
def test_no_byte_is_lost_and_the_gpu_is_not_exceeded(text: str) -> None:
    settings, _ = parse_settings(text)
    source = random.Random(text)
    allocator = CachingAllocator(settings, DeviceMemory(CAP))
    live: list[Block] = []
    failures = 0
    for number in range(3000):
        if live and source.random() < 0.49:
            allocator.free(live.pop(source.randrange(len(live))))
        else:
            try:
                live.append(allocator.malloc(source.choice((1, 700, MIB, 3 * MIB, source.randrange(1, 60 * MIB)))))
            except OutOfDeviceMemory:
                failures += 1
                for _ in range(len(live) // 2):
                    allocator.free(live.pop(source.randrange(len(live))))
        assert allocator.reserved <= CAP
        if number % 50 == 0:
            check(allocator, live)
    assert failures and allocator.retries  # otherwise the limit was not tried
    for block in live:
        allocator.free(block)
    allocator.release_cached()
    assert (allocator.allocated, allocator.requested, allocator.reserved) == (0, 0, 0)
    assert not any((pool.free, pool.unmapped) != ([], []) for pool in (allocator.small, allocator.large))


@pytest.mark.parametrize("text", OPTIONS)
def test_replays_are_repeatable_and_a_cap_above_what_is_held_changes_nothing(text: str) -> None:
    settings, _ = parse_settings(text)
    trace = random_trace(3, 2000)
    first = replay(trace, settings)
    assert first == replay(trace, settings) and first.completed and not first.retries
    assert first == replay(trace, settings, first.peak_reserved_bytes)
    assert first == replay(trace, settings, 2 * first.peak_reserved_bytes)
    assert first.peak_requested_bytes <= first.peak_allocated_bytes <= first.peak_reserved_bytes
    assert max(first.reserved_by_phase.values()) == first.peak_reserved_bytes
    less = replay(trace, settings, first.peak_requested_bytes - 1)
    assert not less.completed and trace.events[less.failed_at or 0] > 0


def test_what_is_live_does_not_hang_on_the_settings() -> None:
    """Requested bytes are the trace's own; allocated ones differ from its count by what is not cut off."""
    trace = random_trace(5, 2000)
    requests = {replay(trace, parse_settings(text)[0]).peak_requested_bytes for text in OPTIONS}
    assert len(requests) == 1
    expandable = replay(trace, AllocatorSettings(expandable_segments=True))
    assert expandable.peak_allocated_bytes == trace.peak().size_bytes  # where every rest is cut off, the very same
    assert expandable.allocated_by_phase == trace.peaks_by_phase()
