"""The smallest GPU on which a trace completes, and the range of reserved bytes of a real run."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Final

from hf_memkit.catalog.library_versions import FreeOrder
from hf_memkit.common.terms import CATEGORIES
from hf_memkit.common.units import MIB
from hf_memkit.prediction.allocator.blocks import DeviceMemory
from hf_memkit.prediction.allocator.replay import Replay, replay
from hf_memkit.prediction.allocator.replay_prefix import ReplayPrefix
from hf_memkit.prediction.allocator.settings import AllocatorSettings
from hf_memkit.prediction.trace.trace import ROUND_BYTES, Trace

CAP_STEP: Final = 2 * MIB
"""Caps are multiples of this, the smallest amount that the allocator takes from the device at a time."""

_MAX_REPLAYS: Final = 24
"""Replays before bisection: mostly 3 to 10 are needed, more with many small blocks of few sizes."""
_NEAR_STEPS: Final = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12)
_FAR_CAPS: Final = 6
_EXTRA_EVERY: Final = 50  # one operation in 50 gets an extra storage
_STAYING_SHARE: Final = 0.2  # share of extra storages that are not freed
_SCRATCH_DOUBLINGS: Final = 12  # of 512 bytes: up to 2 MiB
_FREE_ORDERS: Final[tuple[FreeOrder, ...]] = ("segment", "address", "block")
_BUFFERS: Final = CATEGORIES.index("buffers")


def smallest_cap(
    trace: Trace,
    settings: AllocatorSettings | None = None,
    *,
    gpu_bytes: int | None = None,
    without_cap: Replay | None = None,
) -> int:
    """The smallest memory for the allocator, in bytes, with which the trace completes, to within `CAP_STEP`. A run in
    it is slow: it waits for the device whenever the allocator releases memory.

    The search goes down from the bytes reserved without a cap, because more memory does not always help: the allocator
    then splits other blocks. Each replay returns down to which cap its requests have the same answers (`CapRange`);
    the next replay uses the cap below that, until one fails. After `_MAX_REPLAYS` replays, and with a
    `settings.memory_fraction` below 1, bisection takes over.

    Args:
        gpu_bytes: capacity of the GPU; None: unknown.
        without_cap: the replay without a cap, if it exists already.
    """
    settings = settings or AllocatorSettings()
    without_cap = without_cap or replay(trace, settings, gpu_bytes=gpu_bytes)
    least = without_cap.peak_requested_bytes // CAP_STEP
    top = -(-without_cap.peak_reserved_bytes // CAP_STEP)
    if settings.memory_fraction < 1:

        def holds(steps: int) -> bool:
            return replay(trace, settings, allowed_bytes=steps * CAP_STEP, gpu_bytes=gpu_bytes).completed

        while not holds(top):  # garbage collection changes what happens below the limit
            least, top = top + 1, top + 1 + top // 50
        return _bisect(holds, least, top) * CAP_STEP

    prefix = ReplayPrefix(trace, settings, least * CAP_STEP, gpu_bytes=gpu_bytes)
    for _ in range(_MAX_REPLAYS):
        if top <= least:
            return top * CAP_STEP
        outcome = prefix.outcome((top - 1) * CAP_STEP)
        if not outcome.completes:
            return top * CAP_STEP
        top = max(least, -(-outcome.from_bytes // CAP_STEP))
    return _bisect(lambda steps: prefix.outcome(steps * CAP_STEP).completes, least, top) * CAP_STEP


def _bisect(holds: Callable[[int], bool], least: int, top: int) -> int:
    """A number in [least, top] that holds while the next lower one does not; some larger ones (`_caps_above`) hold
    too. `top` is known to hold."""
    low = least - 1
    high = top
    tried = {top: True}

    def tries(number: int) -> bool:
        if number not in tried:
            tried[number] = holds(number)
        return tried[number]

    while True:
        while high - low > 1:
            middle = (low + high) // 2
            if tries(middle):
                high = middle
            else:
                low = middle
        failing = [number for number in _caps_above(high, top) if not tries(number)]
        if not failing:
            return high
        low, high = max(failing), min(number for number, good in tried.items() if good and number > max(failing))


def reserved_interval(
    trace: Trace,
    settings: AllocatorSettings | None = None,
    *,
    gpu_bytes: int | None = None,
    replays: int = 6,
    smallest_cap_bytes: int | None = None,
    without_cap: Replay | None = None,
) -> tuple[int, int]:
    """`(low, high)`: the range in which `torch.cuda.max_memory_reserved()` will lie.

    low: the smallest cap that completes (`smallest_cap_bytes`, if known already).
    high: the maximum of the replay without a cap (`without_cap`, if known already) and of `replays` varied traces.
    Reserved bytes are sensitive: 0.5 % less requested bytes moved them by 8 % (GPT-2, batch 4 × 512). Varied are:

    * the order in which one operation makes its results and temporaries, which a GPU kernel decides;
    * memory that a trace misses: a few small tensors that stay (scalars, random states, counters), and scratch memory
      of kernels, from 512 bytes to 2 MiB, freed when the operation ends;
    * when libraries create their workspaces: at their first use, or before everything else;
    * which of two free blocks of equal size is used: versions of torch differ (`FreeOrder`), and in older ones it
      depends on addresses, which the driver chooses.

    The seeds are fixed. It is a range of replays, not a bound: a replay may reserve less than the smallest cap.
    """
    without_cap = without_cap or replay(trace, settings, gpu_bytes=gpu_bytes)
    seen = [without_cap.peak_reserved_bytes]
    for seed in range(replays):
        memory = DeviceMemory(total_bytes=gpu_bytes, order="shuffled", seed=seed)
        other = replay(perturbed(trace, seed), settings, device=memory, order=_FREE_ORDERS[seed % len(_FREE_ORDERS)])
        seen.append(other.peak_reserved_bytes)
    low = smallest_cap_bytes
    if low is None:
        low = smallest_cap(trace, settings, gpu_bytes=gpu_bytes, without_cap=without_cap)
    return min(low, *seen), max(seen)


def perturbed(trace: Trace, seed: int) -> Trace:
    """The trace, varied as `reserved_interval` lists; storages keep their number, size, category and operation."""
    source = random.Random(seed)
    early: set[int] = set()
    if seed % 2:  # workspaces: buffers that are never freed
        buffers = {number for number, category in enumerate(trace.category_of, 1) if category == _BUFFERS}
        early = buffers & set(trace.events) - {-event for event in trace.events}
    result = trace.without_events()
    result.events.extend(sorted(early))
    begins = {0: len(result.events)}  # index of an old group → its index in the new events
    for start, end in _groups(trace):
        group = [event for event in trace.events[start:end] if event not in early]
        source.shuffle(group)
        result.events.extend(group)
        if trace.events[start] > 0 and source.randrange(_EXTRA_EVERY) == 0:
            # Memory that the trace missed: a small storage that stays, or scratch memory that is freed at once.
            stays = source.random() < _STAYING_SHARE
            size_bytes = ROUND_BYTES if stays else int(ROUND_BYTES * 2 ** source.uniform(0, _SCRATCH_DOUBLINGS))
            number = result.add(size_bytes, CATEGORIES.index("other"))
            result.events.extend([number] if stays else [number, -number])
        begins[end] = len(result.events)
    result.marks = [(begins[min(end, len(trace.events))], phase) for end, phase in trace.marks]
    return result


def _caps_above(steps: int, top: int) -> list[int]:
    """Caps to test above one that completes."""
    spread = [steps + (top - steps) * part // (_FAR_CAPS + 1) for part in range(1, _FAR_CAPS + 1)]
    return sorted({number for number in (*(steps + near for near in _NEAR_STEPS), *spread) if steps < number < top})


def _groups(trace: Trace) -> Iterator[tuple[int, int]]:
    """`(start, end)` of each run of allocations by one operation of one module within a phase, or of a single free."""
    events, marks = trace.events, {end for end, _ in trace.marks}
    makers = list(zip(trace.operation_of, trace.module_of, strict=True))
    start = 0
    while start < len(events):
        end = start + 1
        if events[start] > 0:
            maker = makers[events[start] - 1]
            while end < len(events) and events[end] > 0 and end not in marks and makers[events[end] - 1] == maker:
                end += 1
        yield start, end
        start = end
