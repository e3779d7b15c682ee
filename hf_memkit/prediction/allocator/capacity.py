"""How small a GPU may be for a trace, and within what bounds the reserved bytes of a real run will lie."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Final

from hf_memkit.catalog.library_versions import FreeOrder
from hf_memkit.common.terms import CATEGORIES
from hf_memkit.common.units import MIB
from hf_memkit.prediction.allocator.blocks import DeviceMemory
from hf_memkit.prediction.allocator.from_the_middle import Started
from hf_memkit.prediction.allocator.replay import Replay, replay
from hf_memkit.prediction.allocator.settings import AllocatorSettings
from hf_memkit.prediction.trace.trace import ROUND_BYTES, Trace

CAP_STEP: Final = 2 * MIB
"""Caps are multiples of this, the least that the allocator asks of the device at a time."""

_WALK: Final = 24
"""Replays before bisection: mostly 3 to 10 are needed, with few sizes of many small blocks more."""
_NEAR: Final = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12)
_SPREAD: Final = 6
_EXTRAS_IN: Final = 50  # one operation in so many has an extra
_STAYING: Final = 0.2  # the share of extras that stay
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
    """The least memory for the allocator, in bytes, from which on the trace completes, to within `CAP_STEP`; slowly at
    that cap: a run waits for the device whenever the allocator gives back.

    A cap of what it reserves without one changes nothing. Below, the allocator gives back what it has cached and tries
    again, and more memory does not always help: with another cap it takes and splits other blocks. So the answer is
    found from above: a replay tells down to which cap the same requests would have been granted and refused
    (`CapRange`), the next one is of the cap below that, and so on until one fails.

    Where that takes more than `_WALK` replays (`max_split_size_mb` makes many small differences), or
    `settings.memory_fraction` is below 1, bisection finds a cap that completes with the next below failing; then some
    larger ones are tried (`_above`), and where one fails, the search goes on above that.

    `gpu_bytes` is what the GPU has in all, as for `replay`; `without_cap` is that replay, if there is one already.
    """
    settings = settings or AllocatorSettings()
    free = without_cap or replay(trace, settings, gpu_bytes=gpu_bytes)
    least, top = free.peak_requested_bytes // CAP_STEP, -(-free.peak_reserved_bytes // CAP_STEP)
    if settings.memory_fraction < 1:

        def holds(steps: int) -> bool:
            return replay(trace, settings, allowed_bytes=steps * CAP_STEP, gpu_bytes=gpu_bytes).completed

        while not holds(top):  # garbage collection changes what happens below the limit
            least, top = top + 1, top + 1 + top // 50
        return _bisected(holds, least, top) * CAP_STEP

    started = Started(trace, settings, least * CAP_STEP, gpu_bytes=gpu_bytes)
    for _ in range(_WALK):
        if top <= least:
            return top * CAP_STEP
        outcome = started.outcome((top - 1) * CAP_STEP)
        if not outcome.completes:
            return top * CAP_STEP
        top = max(least, -(-outcome.from_bytes // CAP_STEP))
    return _bisected(lambda steps: started.outcome(steps * CAP_STEP).completes, least, top) * CAP_STEP


def _bisected(holds: Callable[[int], bool], least: int, top: int) -> int:
    """A number between `least` and `top`, which holds, that holds with the one below it not, and with all above it
    that are tried holding."""
    low, high, tried = least - 1, top, {top: True}

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
        failing = [number for number in _above(high, top) if not tries(number)]
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
    """`(low, high)`: between what will `torch.cuda.max_memory_reserved()` lie?

    low: the smallest cap that completes (`smallest_cap_bytes`, if it is known already).
    high: the most that any of several replays holds where memory has no end: of the trace as it is (`without_cap`, if
    it is known already), and of `replays` traces that differ from it as a real run does. Reserved bytes hang on small
    things: half a percent less of requested bytes has been seen to move them by 8 % (a mask that was not made, GPT-2,
    batch 4 × 512). What differs:

    * the order in which one operation makes its results and temporaries, which a kernel for the GPU decides;
    * what a trace does not see: a few small tensors that stay (scalars, random states, counters), and scratch memory
      of kernels, from 512 bytes to 2 MiB, gone when the operation is done;
    * when the workspaces of libraries are made: at their first use, or before everything else;
    * which of two free blocks of equal size serves: versions of torch differ (`FreeOrder`), and in the older ones
      the addresses decide, which come from the driver.

    The seeds are fixed. It is a range of replays, not a bound; one may hold less than the cap that was found.
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
    """Another trace of the same job, with the differences that `reserved_interval` lists. Every storage keeps its
    number, size, category and what made it."""
    source = random.Random(seed)
    early = _workspaces(trace) if seed % 2 else set()
    result = trace.without_events()
    result.events.extend(sorted(early))
    begins = {0: len(result.events)}  # where a group of the old events begins in the new ones
    for start, end in _groups(trace):
        group = [event for event in trace.events[start:end] if event not in early]
        source.shuffle(group)
        result.events.extend(group)
        if trace.events[start] > 0 and source.randrange(_EXTRAS_IN) == 0:
            # What the trace did not see: a small storage that stays, or scratch memory that is freed at once.
            stays = source.random() < _STAYING
            size_bytes = ROUND_BYTES if stays else int(ROUND_BYTES * 2 ** source.uniform(0, _SCRATCH_DOUBLINGS))
            number = result.add(size_bytes, CATEGORIES.index("other"))
            result.events.extend([number] if stays else [number, -number])
        begins[end] = len(result.events)
    result.marks = [(begins[min(end, len(trace.events))], phase) for end, phase in trace.marks]
    return result


def _above(steps: int, top: int) -> list[int]:
    """Caps to try above one that completes."""
    spread = [steps + (top - steps) * part // (_SPREAD + 1) for part in range(1, _SPREAD + 1)]
    return sorted({number for number in (*(steps + near for near in _NEAR), *spread) if steps < number < top})


def _groups(trace: Trace) -> Iterator[tuple[int, int]]:
    """`(start, end)` of each row of allocations by one operation of one module, within one phase; frees one by one."""
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


def _workspaces(trace: Trace) -> set[int]:
    """Storages of the category `buffers` that are never freed."""
    freed = {-event for event in trace.events if event < 0}
    return {
        event
        for event in trace.events
        if event > 0 and trace.category_of[event - 1] == _BUFFERS and event not in freed
    }
