"""Fragmentation: the allocator has reserved what its tensors do not need, in pieces that do not fit.

A cache as large as the highest peak so far is in order: memory that was needed once is kept. So reserved memory is
compared with the highest allocated peak so far, not with what is allocated at the moment. What is over that, the gap,
grows in the first steps and whenever sizes change, and stays; it is told where it costs something: where cudaMalloc
had to be tried again (the cache was emptied first, which waits for the GPU), or where it fills the card, although the
tensors' peak does not. If the tensors themselves fill it, or others hold the rest of it, it is not fragmentation.
"""

from __future__ import annotations

from itertools import pairwise
from statistics import median
from typing import Final

from hf_memkit.report.finding import Finding
from hf_memkit.report.neighbours import outside_pytorch
from hf_memkit.report.series import Column, Steps, pairs, running_max

__all__ = ["find_fragmentation"]

_WARM_UP: Final = 5
"""First steps of a process left out: the gap comes about in them."""

_MIN_STEPS: Final = 20

_GAP: Final = 0.1
"""The gap must be a tenth of what is reserved; the allocator rounds large requests up to 2 MiB and splits segments of
20 MiB, which makes some percent of slack in any job (torch: c10/core/AllocatorConfig.h). With less, the tensors fill
the card, and retries say that the job is too large, no more."""

_GROWN: Final = 0.05
"""The gap must have grown since the first steps by this share of what is reserved; else it is constant slack."""

_AT_ONCE: Final = 0.5
"""… and not half of that at once: an evaluation or a save, whose peak is not among the steps', leaves its cache."""

_RETRIES: Final = 3
_RETRY_STEPS: Final = 2
"""One retry may come of one large request, an evaluation or a save; from three in two steps on it is the rule."""

_FULL: Final = 0.9
"""Reserved memory is near the card from here: context and libraries take the rest."""

_ENDS: Final = 5
"""The gap at the beginning and the end is the median over a fifth of the steps."""

_BEGUN: Final = 0.1
"""The gap began to rise where it has passed a tenth of its growth for good."""


def find_fragmentation(steps: Steps) -> Finding | None:
    """Fragmentation in the last process that wrote enough records, or None."""
    for process in reversed(steps.processes()):
        kept, (reserved, allocated) = pairs(process[_WARM_UP:], _reserved(steps), steps.column("peak_allocated_gib"))
        if len(kept) >= _MIN_STEPS:
            return _judge(steps, process, kept, reserved, allocated)
    return None


def _judge(
    steps: Steps, process: range, kept: list[int], reserved: list[float], allocated: list[float]
) -> Finding | None:
    before = [value for i in process[:_WARM_UP] if (value := steps.column("peak_allocated_gib")[i]) is not None]
    highest = running_max([max(before, default=0.0), *allocated])[1:]
    gap = [a - b for a, b in zip(reserved, highest, strict=True)]
    part = max(3, len(gap) // _ENDS)
    first, last = median(gap[:part]), median(gap[-part:])
    held = median(reserved[-part:])
    if last < _GAP * held:
        return None
    usable = steps.usable_gib()
    if usable is not None:
        usable -= outside_pytorch(steps, process)
    retries, retry_steps = _retries(steps, kept)
    retried = retries >= _RETRIES and len(retry_steps) >= _RETRY_STEPS
    gains = [b - a for a, b in pairwise(gap)]
    grown = last - first >= _GROWN * held and max(gains) <= _AT_ONCE * (last - first)
    full = usable is not None and max(reserved[-part:]) >= _FULL * usable
    if not (full and (grown or retried)) and not (usable is None and retried and grown):
        return None
    begun = _begun(gap, first, last) if grown else len(gap)
    at = min(begun, retry_steps[0] if retried else len(gap))
    return _finding(steps, kept[at], first, last, held, highest[-1], retries, usable)


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
    of_card = f" of the {usable:.2f} GiB that can be had" if usable is not None else ""
    again = f", and cudaMalloc had to be tried again {retries} times after emptying the cache" if retries else ""
    why = (
        f"PyTorch holds {held:.2f} GiB{of_card}, but its tensors never needed more than {peak:.2f} GiB: what lies "
        f"between in pieces went from {first:.2f} GiB to {last:.2f} GiB{again}"
    )
    return Finding("fragmentation", steps.numbers[at], why, _fix(steps), figures)


def _fix(steps: Steps) -> str:
    hardware = steps.run.get("hardware")
    settings = str(hardware.get("allocator_settings") or "") if isinstance(hardware, dict) else ""
    if "expandable_segments:True" in settings:
        return (
            "expandable_segments is on already: make the sizes change less (pad_to_multiple_of, packing), "
            "or give the cache back with torch_empty_cache_steps, which costs time"
        )
    return (
        "set PYTORCH_ALLOC_CONF=expandable_segments:True before the process starts; if that is not enough, make the "
        "sizes change less (pad_to_multiple_of, packing)"
    )
