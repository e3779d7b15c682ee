"""A leak: what is held at the end of a step, when gradients are gone, rises and does not level off.

On a device the floor is `allocated_gib`. Taken off it first: what the records name (weights, optimizer states …:
layers that are unfrozen or experts that are routed to for the first time are no leak), what follows the size of the
inputs step by step (the last batch is still alive there), and what is added only when an input is longer than all
before (tables of positions, static buffers). In the host's memory the floor is `host_rss_gib`, which creeps and jumps
for honest reasons: there the bars are higher, and the memory that the machine has left must fall as it rises, because
pages of a memory-mapped dataset count as resident and yet are free to be taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import fmean, median
from typing import Final

from hf_memkit.report.series import Column, Finding, Steps, pairs, running_max, typical_spread
from hf_memkit.report.trend import MIN_VALUES, Trend, find_trend

_WARM_UP: Final = 5
"""First steps of a process left out: optimizers make their states in step 1, caches come in the next."""

_LEAST_GIB: Final = 16 / 1024
_LEAST_SHARE: Final = 0.002
"""A device's floor must rise by 16 MiB (eight of the allocator's 2 MiB blocks) and by 0.2 % of itself."""

_HOST_WARM_UP: Final = 10
_HOST_LEAST_GIB: Final = 64 / 1024
_HOST_LEAST_SHARE: Final = 0.05
"""RSS must rise by 64 MiB (one arena of glibc's malloc) and by 5 %; a data loader and malloc warm up longer."""

_HOST_AGREES: Final = 0.5
"""What is left must fall by at least half of what RSS rises by."""

_FOLLOWS: Final = 0.8
"""Correlation of the changes from step to step from which the floor is held to follow the inputs."""

_FEW_RECORDS: Final = 0.3
"""Where more steps than these bring a longer input than ever, nothing can be told from their coincidence."""

_MOSTLY: Final = 0.5
"""The longest inputs so far explain a rise of which they brought half."""


def find_leaks(steps: Steps) -> list[Finding]:
    """A leak on the device and one in the host's memory, if they are there."""
    floor = steps.column("allocated_gib")
    found = []
    rise = _in_processes(steps, _less_named(floor, steps.named()), _WARM_UP, _LEAST_GIB, _LEAST_SHARE, stairs=True)
    if rise is not None:
        found.append(_device_finding(steps, rise))
    rss = steps.column("host_rss_gib")
    # What malloc keeps grows by fits and starts: no staircase.
    rise = _in_processes(steps, rss, _HOST_WARM_UP, _HOST_LEAST_GIB, _HOST_LEAST_SHARE, stairs=False)
    if rise is not None and _host_agrees(steps, rise, on_device=any(value is not None for value in floor)):
        found.append(_host_finding(steps, rise))
    return found


def _in_processes(
    steps: Steps, floor: Column, warm_up: int, least: float, share: float, *, stairs: bool
) -> Trend | None:
    """The rise of the last process, or of the first of several that had it one after the other.

    A process without one ends the search: what rose before it has been fixed.
    """
    found = None
    for process in reversed(steps.processes()):
        kept, (values,) = pairs(process[warm_up:], floor)
        if len(kept) < MIN_VALUES:
            continue
        adjusted = _less_inputs(steps, kept, values)
        rise = find_trend(
            [steps.numbers[i] for i in kept], adjusted, max(least, share * median(values)), stairs=stairs
        )
        if rise is None:
            break
        # No telling when in the warm-up a rise began that its first value already has: it is there from the start.
        begun = rise.first_step > steps.numbers[kept[0]]
        found = rise if begun else replace(rise, first_step=steps.numbers[process[0]])
    return found


def _less_named(floor: Column, named: Column) -> Column:
    known = [value for value in named if value is not None]
    if not known:
        return floor
    base = known[0]
    return [a if a is None or b is None else a - (b - base) for a, b in zip(floor, named, strict=True)]


def _less_inputs(steps: Steps, kept: Sequence[int], floor: Sequence[float]) -> list[float]:
    """`floor` without what follows the inputs' size."""
    result = list(floor)
    for name in ("tokens", "longest_sequence", "samples"):
        sizes = [value for i in kept if (value := steps.column(name)[i]) is not None]
        if len(sizes) != len(kept):
            continue
        slope = _shared_slope(sizes, result)
        result = [value - slope * size for value, size in zip(result, sizes, strict=True)]
        # Of a size that reaches a new height in few steps: what came in just those.
        highest = running_max(sizes)
        records = {i for i in range(1, len(highest)) if highest[i] > highest[i - 1]}
        if len(records) <= _FEW_RECORDS * len(highest):
            result = _without(result, records)
    return result


def _shared_slope(sizes: Sequence[float], floor: Sequence[float]) -> float:
    """Change of the floor per change of size between neighbouring steps, if they go together; else 0.

    Differences, because a leak is nearly constant in them, while in the levels it would pass for whatever else rises.
    """
    a = [y - x for x, y in pairwise(sizes)]
    b = [y - x for x, y in pairwise(floor)]
    mean_a, mean_b = fmean(a), fmean(b)
    shared = sum((x - mean_a) * (y - mean_b) for x, y in zip(a, b, strict=True))
    spread_a = sum((x - mean_a) ** 2 for x in a)
    spread_b = sum((y - mean_b) ** 2 for y in b)
    follows = shared > 0 and shared * shared >= _FOLLOWS**2 * spread_a * spread_b
    return shared / spread_a if follows else 0.0


def _without(floor: list[float], records: set[int]) -> list[float]:
    """`floor` without what it gained at those positions, if that is most of its gain."""
    gained = sum(max(0.0, floor[i] - floor[i - 1]) for i in records)
    if gained < _MOSTLY * (floor[-1] - floor[0]):
        return floor
    result, taken = [floor[0]], 0.0
    for i in range(1, len(floor)):
        if i in records:
            taken += max(0.0, floor[i] - floor[i - 1])
        result.append(floor[i] - taken)
    return result


def _host_agrees(steps: Steps, rise: Trend, *, on_device: bool) -> bool:
    """Whether the memory that is left fell as RSS rose; without a GPU an unknown is taken for a yes."""
    after = (i for i, step in enumerate(steps.numbers) if step >= rise.first_step)
    _, (rss, left) = pairs(after, steps.column("host_rss_gib"), steps.column("host_available_gib"))
    if len(rss) < MIN_VALUES:
        return not on_device
    both = [a + b for a, b in zip(rss, left, strict=True)]  # constant while only this process takes memory
    quarter = len(both) // 4  # the two ends are compared
    drift = median(both[-quarter:]) - median(both[:quarter])
    grown = rise.end - rise.start
    if abs(drift) <= (1 - _HOST_AGREES) * grown:
        return True
    return not on_device and max(typical_spread(both[-quarter:]), typical_spread(both[:quarter])) > grown


def _device_finding(steps: Steps, rise: Trend) -> Finding:
    figures = _figures(steps, rise)
    why = (
        f"memory still allocated after each step grows by {_pace(rise)} a step and does not level off: "
        f"{_from_to(rise)} by step {steps.numbers[-1]}"
    )
    usable = steps.usable_gib()
    peaks = [value for value in steps.column("peak_allocated_gib")[-MIN_VALUES:] if value is not None]
    if usable is not None and (room := usable - max([rise.end, *peaks])) > 0:
        full = steps.numbers[-1] + int(room / rise.per_step)
        figures["projected_full_step"] = full
        why += f"; at this pace the GPU is full near step {full} (projection)"
    fix = (
        "find what each step keeps: a loss or output added to a list or a running sum without .item() or "
        ".detach() keeps its whole graph; so do outputs or hidden states stored by a callback, a metric or your "
        "compute_loss. If it grows only at evaluations, set eval_accumulation_steps or prediction_loss_only"
    )
    return Finding("leak", rise.first_step, why, fix, figures)


def _host_finding(steps: Steps, rise: Trend) -> Finding:
    figures = {f"host_{name}": value for name, value in _figures(steps, rise).items()}
    why = (
        f"host memory (RSS of this process) grows by {_pace(rise)} a step and does not level off: "
        f"{_from_to(rise)} by step {steps.numbers[-1]}"
    )
    left = [value for value in steps.column("host_available_gib")[-MIN_VALUES:] if value is not None]
    if left:
        full = steps.numbers[-1] + int(median(left) / rise.per_step)
        figures["projected_host_full_step"] = full
        why += f"; at this pace the machine's RAM is full near step {full} (projection)"
    fix = (
        "find what each step keeps on the host: tensors moved to the CPU and stored, losses or outputs added to a "
        "list without .item(), a dataset or collator that caches what it reads, stored evaluation outputs"
    )
    return Finding("leak", rise.first_step, why, fix, figures)


def _figures(steps: Steps, rise: Trend) -> dict[str, float]:
    return {
        "start_gib": rise.start,
        "end_gib": rise.end,
        "rise_gib": rise.end - rise.start,
        "rise_mib_per_step": rise.per_step * 1024,
        "last_step": steps.numbers[-1],
    }


def _pace(rise: Trend) -> str:
    return f"{rise.per_step * 1024:.3g} MiB"


def _from_to(rise: Trend) -> str:
    return f"from {rise.start:.2f} GiB to {rise.end:.2f} GiB"
