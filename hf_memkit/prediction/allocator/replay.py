"""Replays a trace through the caching allocator: peaks by phase, and the event that runs out of memory."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from hf_memkit.catalog.library_versions import FreeOrder
from hf_memkit.common.terms import PHASES, Phase
from hf_memkit.prediction.allocator.allocator import CachingAllocator, OutOfDeviceMemory
from hf_memkit.prediction.allocator.blocks import Block, DeviceMemory
from hf_memkit.prediction.allocator.settings import AllocatorSettings
from hf_memkit.prediction.trace.trace import Trace


@dataclass(frozen=True, slots=True)
class Replay:
    """Result of a replay. Peaks of phases that occurred, in the order of `PHASES`, count memory held before them."""

    peak_allocated_bytes: int  # as `torch.cuda.max_memory_allocated()`
    peak_requested_bytes: int  # of the requested bytes, without rounding
    peak_reserved_bytes: int  # as `torch.cuda.max_memory_reserved()`
    allocated_by_phase: dict[Phase, int]
    reserved_by_phase: dict[Phase, int]
    retries: int  # how often all cached memory was released to satisfy a request (`num_alloc_retries`)
    failed_at: int | None  # index of the event that got no memory, where the replay ended; None if it completed

    @property
    def completed(self) -> bool:
        return self.failed_at is None


def replay(
    trace: Trace,
    settings: AllocatorSettings | None = None,
    cap_bytes: int | None = None,
    *,
    gpu_bytes: int | None = None,
    allowed_bytes: int | None = None,
    device: DeviceMemory | None = None,
    releases: Collection[int] = (),
    order: FreeOrder = "segment",
) -> Replay:
    """Replays a trace.

    Args:
        trace: the storages. Empty ones take no block.
        settings: the allocator's options. Default: torch's defaults.
        cap_bytes: memory of the GPU for the allocator. Default: unlimited.
        gpu_bytes: capacity of the GPU, which matters a little with expandable segments. Default: unknown.
        allowed_bytes: torch's limit for the process (`AllocatorSettings.memory_fraction`). Default: no limit.
        device: replaces `cap_bytes` and `gpu_bytes`.
        releases: indexes of events before which all cached memory is released, as by `torch.cuda.empty_cache()`.
        order: how free blocks of equal size are ordered; it differs between versions of torch.
    """
    allocator = CachingAllocator(
        settings, device or DeviceMemory(cap_bytes, total_bytes=gpu_bytes), allowed_bytes=allowed_bytes, order=order
    )
    malloc, free = allocator.malloc, allocator.free  # looked up once for all events
    sizes, events, streams = trace.sizes_bytes, trace.events, trace.stream_of
    blocks: dict[int, Block] = {}
    peak_requested = 0
    allocated: dict[Phase, int] = {}
    reserved: dict[Phase, int] = {}
    failed_at: int | None = None
    spans = list(trace.spans())
    end = spans[-1][1] if spans else 0
    if end < len(events):  # events after the last mark belong to the last phase
        spans.append((end, len(events), trace.phase_at(end)))
    for start, end, phase in spans:
        allocator.reset_peaks()
        index = start
        try:
            for index in range(start, end):
                number = events[index]
                if releases and index in releases:
                    allocator.release_cached()
                if number < 0:
                    block = blocks.pop(-number, None)
                    if block is not None:
                        free(block)
                elif sizes[number - 1]:
                    blocks[number] = malloc(sizes[number - 1], streams[number - 1] if streams else 0)
        except OutOfDeviceMemory:
            failed_at = index
        peak_requested = max(peak_requested, allocator.peak_requested)
        allocated[phase] = max(allocated.get(phase, 0), allocator.peak_allocated)
        reserved[phase] = max(reserved.get(phase, 0), allocator.peak_reserved)
        if failed_at is not None:
            break
    return Replay(
        peak_allocated_bytes=max(allocated.values(), default=0),
        peak_requested_bytes=peak_requested,
        peak_reserved_bytes=max(reserved.values(), default=0),
        allocated_by_phase={phase: allocated[phase] for phase in PHASES if phase in allocated},
        reserved_by_phase={phase: reserved[phase] for phase in PHASES if phase in reserved},
        retries=allocator.retries,
        failed_at=failed_at,
    )
