"""Fragmentation: the allocator has reserved what its tensors do not need, in pieces that do not fit.

A cache as large as the highest peak so far is in order: memory that was needed once is kept. So reserved memory is
compared with the highest allocated peak so far, not with what is allocated at the moment. What is over that, the gap,
grows in the first steps and whenever sizes change, and stays; it is told where it costs something: where cudaMalloc
had to be tried again (the cache was emptied first, which waits for the GPU), or where it fills the GPU, although the
tensors' peak does not. If the tensors themselves fill it, or others hold the rest of it, it is not fragmentation.

Loading, an evaluation or a save may have needed more than any step, and leave their cache. The phases tell that apart:
what was reserved before a step's first forward and not yet at the end of the step before is held to have been needed.
So where the phases are known, neither growth over many steps nor several retries are asked for once a GPU is full to
the brim and a large part of it lies idle: the steps' own requests did that, and the next larger one finds no place.
"""

from __future__ import annotations

from itertools import pairwise
from statistics import median
from typing import Final

from hf_memkit.report.other_processes import available_gib
from hf_memkit.report.series import Column, Finding, Steps, pairs

_WARM_UP: Final = 5
"""First steps of a process left out: the gap comes about in them."""

_MIN_STEPS: Final = 20

_GAP: Final = 0.1
"""The gap must be a tenth of what is reserved; the allocator rounds large requests up to 2 MiB and splits segments of
20 MiB, which makes some percent of slack in any job (torch: c10/core/AllocatorConfig.h). With less, the tensors fill
the GPU, and retries say that the job is too large, no more."""

_GROWN: Final = 0.05
"""The gap must have grown since the first steps by this share of what is reserved; else it is constant slack."""

_AT_ONCE: Final = 0.5
"""… and not half of that at once: an evaluation or a save, whose peak is not among the steps', leaves its cache."""

_RETRIES: Final = 3
_RETRY_STEPS: Final = 2
"""One retry may come of one large request, an evaluation or a save; from three in two steps on it is the rule."""

_FULL: Final = 0.9
"""Reserved memory is near the GPU from here: context and libraries take the rest."""

_BRIM: Final = 0.95
_IDLE: Final = 0.15
"""Filled to the brim, with 15 % of the GPU in it that no step has ever needed: a batch larger by as much would
fit, and the next request that finds no whole piece ends in a retry. Both are asked for, because a gap costs nothing
while there is room (half of what is reserved may be gap in a healthy job whose sizes change), and a full GPU without
a gap is a job that fits well. Where there was a retry in this process, the brim was reached: then near is enough."""

_ENDS: Final = 5
"""The gap at the beginning and the end is the median over a fifth of the steps."""

_BEGUN: Final = 0.1
"""The gap began to rise where it has passed a tenth of its growth for good."""


def find_fragmentation(steps: Steps) -> Finding | None:
    """Fragmentation in the last process that wrote enough records, or None."""
    for process in reversed(steps.processes()):
        kept, (reserved, allocated) = pairs(process, _reserved(steps), steps.column("peak_allocated_gib"))
        warm_up = sum(i in process[:_WARM_UP] for i in kept)
        if len(kept) - warm_up >= _MIN_STEPS:
            return _judge(steps, process, kept, reserved, allocated, warm_up)
    return None


def _judge(
    steps: Steps, process: range, kept: list[int], reserved: list[float], allocated: list[float], warm_up: int
) -> Finding | None:
    usable = available_gib(steps, process)
    gap = _gap(steps, kept, reserved, allocated, in_doubt=False)
    part = max(3, (len(gap) - warm_up) // _ENDS)
    first, last = median(gap[warm_up : warm_up + part]), median(gap[-part:])
    held = median(reserved[-part:])
    if last < _GAP * held:
        return None
    retries, retry_steps = _retries(steps, kept[warm_up:])
    retried = retries >= _RETRIES and len(retry_steps) >= _RETRY_STEPS
    gains = [b - a for a, b in pairwise(gap[warm_up:])]
    grown = last - first >= _GROWN * held and max(gains) <= _AT_ONCE * (last - first)
    full = usable is not None and max(reserved[-part:]) >= _FULL * usable
    signs = []
    if (full and (grown or retried)) or (usable is None and retried and grown):
        signs += [warm_up + _begun(gap[warm_up:], first, last)] if grown else []
        signs += [warm_up + retry_steps[0]] if retried else []
    if usable is not None:
        idle = _gap(steps, kept, reserved, allocated, in_doubt=True)
        ever = max((value for i in kept if (value := steps.column("alloc_retries")[i]) is not None), default=0.0)
        brim = (_FULL if ever else _BRIM) * usable
        if median(idle[-part:]) >= _IDLE * usable and max(reserved[-part:]) >= brim:
            gapped = [k for k, gap in enumerate(idle) if gap >= _IDLE * usable]
            signs.append(next((k for k in gapped if reserved[k] >= brim), gapped[0]))
    if not signs:
        return None
    return _finding(steps, kept[min(signs)], first, last, held, max(allocated), retries, usable)


def _gap(
    steps: Steps, kept: list[int], reserved: list[float], allocated: list[float], *, in_doubt: bool
) -> list[float]:
    """Reserved memory over the highest peak so far, less what was reserved between the steps and is still there.

    What was there before the first step counts as needed. Where several micro-batches or steps share a record, or the
    phases are not known, `in_doubt` says whether what may have been reserved between the steps is held to have been.
    """
    start, end = steps.before_step_gib(), steps.column("reserved_gib")
    micro, merged = steps.column("micro_batches"), steps.column("steps")
    found: list[float] = []
    needed = before = between = 0.0
    for i, most, peak in zip(kept, reserved, allocated, strict=True):
        height = start[i] if in_doubt or (micro[i] in (None, 1) and merged[i] in (None, 1)) else 0.0
        if height is None:
            height = most if in_doubt else 0.0
        needed = max(needed, peak if found else max(peak, height))
        if found:
            between += max(0.0, height - before)
        found.append(most - needed - between)
        now = end[i]
        before, last = (most if now is None else now), before
        between = max(0.0, between - max(0.0, last - before))  # a retry gives back what lies idle
    return found


def _reserved(steps: Steps) -> Column:
    """The peak of what was reserved; where it is absent, what was reserved at the end of the step."""
    peak, end = steps.column("peak_reserved_gib"), steps.column("reserved_gib")
    return [b if a is None else a for a, b in zip(peak, end, strict=True)]


def _retries(steps: Steps, kept: list[int]) -> tuple[int, list[int]]:
    """How many retries came after the first of these steps, and the positions in `kept` of the steps with some."""
    found, seen = [], None
    total = 0.0
    for position, i in enumerate(kept):
        count = steps.column("alloc_retries")[i]
        if count is None:
            continue
        if seen is not None and count > seen:
            total += count - seen
            found.append(position)
        seen = count
    return int(total), found


def _begun(gap: list[float], first: float, last: float) -> int:
    """The first position from which on the gap stays over a tenth of its growth."""
    bar = first + _BEGUN * (last - first)
    at = len(gap) - 1
    while at > 0 and max(gap[at - 1], gap[max(0, at - 2)]) > bar:  # one value below it does not count
        at -= 1
    return at


def _finding(
    steps: Steps, at: int, first: float, last: float, held: float, peak: float, retries: int, usable: float | None
) -> Finding:
    figures = {
        "gap_before_gib": first,
        "gap_gib": last,
        "reserved_gib": held,
        "peak_allocated_gib": peak,
        "alloc_retries": retries,
        **({"usable_gib": usable} if usable is not None else {}),
    }
    of_gpu = f" of {usable:.2f} GiB available" if usable is not None else ""
    times = "once" if retries == 1 else f"{retries} times"
    again = f", and cudaMalloc was tried again {times} after the cache was freed" if retries else ""
    grew = f"grew from {first:.2f} GiB to {last:.2f} GiB" if last > 1.1 * first else f"is {last:.2f} GiB"
    why = (
        f"PyTorch reserves {held:.2f} GiB{of_gpu}, but no step allocated more than {peak:.2f} GiB: the unused memory "
        f"in between {grew}{again}"
    )
    return Finding("fragmentation", steps.numbers[at], why, _fix(steps), figures)


def _fix(steps: Steps) -> str:
    settings = str(steps.hardware().get("allocator_settings") or "")
    if "expandable_segments:True" in settings:
        return (
            "expandable_segments is already on: make tensor sizes vary less (pad_to_multiple_of, packing), "
            "or free the cache with torch_empty_cache_steps, which costs time"
        )
    return (
        "set PYTORCH_ALLOC_CONF=expandable_segments:True before the process starts; if that is not enough, make "
        "tensor sizes vary less (pad_to_multiple_of, packing)"
    )
