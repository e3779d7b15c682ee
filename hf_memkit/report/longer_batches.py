"""Longer batches: the peak rose because the inputs did, while the floor stayed.

What an input costs is the peak over the floor. Inputs of changing length are no news: a new highest cost counts only
if it could not be expected of the inputs so far, or comes close to the GPU. Were their order chance, the m highest
costs of all would come in the last of the steps with a chance that can be counted; a change is held to be proven below
a stated chance. One longer input, or a few among many, cannot be proven so: they are told only where they fill the
GPU and stand apart from all other steps, earlier and later. Either way it is the input's doing only if the steps over
the old height are those with the largest inputs.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from hf_memkit.report.other_processes import available_gib
from hf_memkit.report.series import Column, Finding, Steps, pairs, ranks, running_max

_MIN_BEFORE: Final = 10
_MIN_STEPS: Final = 20
"""Fewer steps say nothing about what was usual."""

_NEW_HEIGHT: Final = 0.05
"""A cost is a new height if it is 5 % over the highest before; so there are few to look at, in runs of any length."""

_CHANCE: Final = 1e-4
"""Chance that heights in chance order come so late; at each of some tens of heights."""

_AS_SURE: Final = 0.7
"""Of several new heights the change began at the first whose log chance is 0.7 of the surest: earlier ones are those
of inputs that were short by chance, later ones lie within the change."""

_TELLS_APART: Final = 0.9
"""Of pairs of a step over the old height and one below it, the share in which the former has the longer input."""

_LONGER: Final = 1.02
"""The longest input of those is longer than the longest before by this factor."""

_NEAR: Final = 0.9
"""Near the GPU, of what PyTorch can have of it: pieces that do not fit together take the rest."""

_NEAR_GROWTH: Final = 0.08
"""… and the new cost is this share of the GPU above the old: less is the spread of any job that fills its GPU."""

_FEW: Final = 0.1
"""Steps that stand apart are at most a tenth of all; more are a part of the data."""

_LARGE: Final = 0.2
_MATTERS: Final = 0.25
"""Away from the GPU a proven change is worth saying if the peak rose by a fifth and fills a quarter of the GPU."""


@dataclass(frozen=True)
class _Inputs:
    """Steps with a peak and a size: positions in the records, peaks, peaks over the floor, sizes and what they are."""

    kept: list[int]
    peaks: list[float]
    costs: list[float]
    sizes: list[float]
    name: str


def find_longer_batches(steps: Steps, ooms: Sequence[Mapping[str, Any]] = ()) -> Finding | None:
    """The first longer batch that set a new peak, if that matters; or the one that ended the run (an `oom` record)."""
    usable = available_gib(steps, range(len(steps)))
    for inputs in _inputs(steps):
        if (found := _over_steps(steps, inputs, usable) or _apart(steps, inputs, usable)) is not None:
            return found
    return _at_the_end(steps, ooms)


def _inputs(steps: Steps) -> Iterator[_Inputs]:
    """The steps with each size that changes."""
    peak = steps.column("peak_allocated_gib")
    floor: Column = steps.column("allocated_gib")
    if all(value is None for value in floor):
        floor = [0.0] * len(steps)
    for name, sizes in _sizes(steps).items():
        kept, (peaks, floors, known) = pairs(range(len(steps)), peak, floor, sizes)
        if len(kept) >= _MIN_STEPS and max(known) >= _LONGER * min(known):
            yield _Inputs(kept, peaks, [a - b for a, b in zip(peaks, floors, strict=True)], known, name)


def _sizes(steps: Steps) -> dict[str, Column]:
    """What can make a batch larger; of an accumulated step the padded size of one forward counts too."""
    names = ("tokens", "longest_sequence", "samples")
    sizes = {name: steps.column(name) for name in names}
    parts = zip(*(steps.column(name) for name in ("longest_sequence", "samples", "micro_batches")), strict=True)
    sizes["padded tokens"] = [
        None if length is None or samples is None or not micro else length * samples / micro
        for length, samples, micro in parts
    ]
    return sizes


def _over_steps(steps: Steps, inputs: _Inputs, usable: float | None) -> Finding | None:
    """The new height at which a proven change began, if it matters."""
    highest, highest_peak = running_max(inputs.costs), running_max(inputs.peaks)
    proven = [(chance, i) for chance, i in _new_heights(inputs.costs, highest) if chance <= math.log(_CHANCE)]
    surest = min(proven, default=(0.0, 0))[0]
    for i in [i for chance, i in proven if chance <= _AS_SURE * surest][:1]:
        growth = highest[-1] - highest[i - 1]  # of the cost: a floor that rises lifts the peaks too
        final, before = highest_peak[-1], highest_peak[i - 1]
        filled = usable is not None and final >= _NEAR * usable and growth >= _NEAR_GROWTH * usable
        large = growth >= _LARGE * before and (usable is None or final >= _MATTERS * usable)
        if (filled or large) and _explained(inputs, i, highest[i - 1] * (1 + _NEW_HEIGHT)):
            return _finding(steps, inputs, i, before, usable)
    return None


def _apart(steps: Steps, inputs: _Inputs, usable: float | None) -> Finding | None:
    """The first of a few steps that stand apart from all others and fill the GPU."""
    if usable is None or max(inputs.peaks) < _NEAR * usable:
        return None
    ordered = sorted(inputs.costs, reverse=True)
    for count in range(int(_FEW * len(ordered)), 0, -1):
        height = ordered[count]
        if ordered[count - 1] - height < _NEAR_GROWTH * usable:
            continue
        apart = [i for i, cost in enumerate(inputs.costs) if cost > height]
        # What came among the first steps was known from the beginning.
        fills = max(inputs.peaks[i] for i in apart) >= _NEAR * usable
        if fills and apart[0] >= _MIN_BEFORE and _explained(inputs, apart[0], height):
            return _finding(steps, inputs, apart[0], max(inputs.peaks[: apart[0]]), usable)
    return None


def _new_heights(costs: Sequence[float], highest: Sequence[float]) -> list[tuple[float, int]]:
    """The positions of new heights, each with the log chance of what comes after it."""
    ordered, total = sorted(costs), len(costs)
    found = []
    last = highest[_MIN_BEFORE - 1]
    for i in range(_MIN_BEFORE, total):
        if costs[i] > last * (1 + _NEW_HEIGHT):
            over = total - bisect_right(ordered, highest[i - 1] * (1 + _NEW_HEIGHT))
            found.append((_log_chance(total, i, over), i))
            last = costs[i]
    return found


def _log_chance(total: int, before: int, over: int) -> float:
    """Logarithm of the chance that the `over` highest of `total` values in chance order all come after the first
    `before`: Π (total − before − k) / (total − k) over k < over."""
    after = total - before
    return (
        math.lgamma(after + 1) - math.lgamma(after - over + 1) - math.lgamma(total + 1) + math.lgamma(total - over + 1)
    )


def _explained(inputs: _Inputs, first: int, height: float) -> bool:
    """Whether the steps over `height` are those with the longest inputs."""
    over = [cost > height for cost in inputs.costs]
    longest_before = max(inputs.sizes[:first])
    longest = max(size for size, is_over in zip(inputs.sizes, over, strict=True) if is_over)
    if longest < _LONGER * longest_before:
        return False
    found = ranks(inputs.sizes)
    count = sum(over)
    places = sum(rank for rank, is_over in zip(found, over, strict=True) if is_over)
    # Mann and Whitney's U over the number of pairs.
    return (places - count * (count - 1) / 2) / (count * (len(over) - count)) >= _TELLS_APART


def _at_the_end(steps: Steps, ooms: Sequence[Mapping[str, Any]]) -> Finding | None:
    """The out-of-memory error of a forward with a longer input than all before."""
    oom = Steps(ooms)
    peaks = [value for value in steps.column("peak_allocated_gib") if value is not None]
    usual = [value for value in steps.column("longest_sequence") if value is not None]
    if not len(oom) or oom.numbers[-1] < steps.numbers[-1] or len(usual) < _MIN_BEFORE or not peaks:
        return None
    length, asked, held = (oom.column(name)[-1] for name in ("longest_sequence", "requested_gib", "allocated_gib"))
    before = max(peaks)
    if length is None or asked is None or held is None:
        return None
    if length < (1 + _NEW_HEIGHT) * max(usual) or held + asked <= before:
        return None
    figures = {
        "longest_sequence_before": max(usual), "longest_sequence": length,
        "peak_before_gib": before, "needed_at_least_gib": held + asked,
    }  # fmt: skip
    why = (
        f"the batch of the out-of-memory error has a sequence of {length:,.0f} tokens; the longest before was "
        f"{max(usual):,.0f}. It needed at least {held + asked:.2f} GiB; the highest peak before was {before:.2f} GiB"
    )
    return Finding("longer batches", oom.numbers[-1], why, _FIX, figures)


def _finding(steps: Steps, inputs: _Inputs, first: int, before: float, usable: float | None) -> Finding:
    step = steps.numbers[inputs.kept[first]]
    size_before, size = max(inputs.sizes[:first]), max(inputs.sizes[first:])
    at = max(range(first, len(inputs.peaks)), key=inputs.peaks.__getitem__)
    final = inputs.peaks[at]
    figures = {
        "peak_before_gib": before,
        "peak_gib": final,
        "peak_step": steps.numbers[inputs.kept[at]],
        "size_before": size_before,
        "size": size,
        **({"usable_gib": usable} if usable is not None else {}),
    }
    of_gpu = f" of {usable:.2f} GiB available" if usable is not None else ""
    why = (
        f"larger inputs raised the peak from {before:.2f} GiB to {final:.2f} GiB{of_gpu}; "
        f"{inputs.name.replace('_', ' ')}: up to {size:,.0f}, before {size_before:,.0f}"
    )
    return Finding("longer batches", step, why, _FIX, figures)


_FIX: Final = (
    "cut or split the longest examples (max_length, packing), or lower per_device_train_batch_size and raise "
    "gradient_accumulation_steps. train_sampling_strategy='group_by_length' puts the longest batch first: a job that "
    "does not fit then fails in its first step"
)
