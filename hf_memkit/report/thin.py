"""Fewer records that say the same: step records merged in pairs, and points left out of a chart but for the extremes.

In: step records in order, or a series of numbers. Out: fewer step records, or the positions to draw.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

from hf_memkit.record_types import MEAN_OF_STEPS, StepRecord
from hf_memkit.report.sanitize import number, whole

__all__ = ["extremes", "halve", "merge"]

_HIGHEST: Final = frozenset({"longest_sequence", "host_rss_gib", "pinned_gib", "disk_swap_gib"})
_LOWEST: Final = frozenset({"host_available_gib"})
_OF_THE_PEAK: Final = frozenset({"categories", "held"})


def halve(steps: Sequence[StepRecord]) -> list[StepRecord]:
    """Each two neighbours as one record."""
    pairs = [merge(steps[i], steps[i + 1]) for i in range(0, len(steps) - 1, 2)]
    return pairs if len(steps) % 2 == 0 else [*pairs, steps[-1]]


def merge(first: Mapping[str, Any], second: Mapping[str, Any]) -> StepRecord:
    """One `step` record for two, as the record contract has it: peaks are maxima, times and sizes means, counters the
    last; `categories` and `held` are those of the higher peak."""
    weights = (max(1, whole(first, "steps") or 1), max(1, whole(second, "steps") or 1))
    higher, lower = (
        (first, second)
        if (number(first, "peak_allocated_gib") or 0) > (number(second, "peak_allocated_gib") or 0)
        else (second, first)
    )
    merged: dict[str, Any] = {}
    for name in {**first, **second}:
        a, b = number(first, name), number(second, name)
        if name in _OF_THE_PEAK:
            merged[name] = higher.get(name, lower.get(name))
        elif name == "phases":
            merged[name] = _highest_of_each(first.get(name, {}), second.get(name, {}))
        elif a is None or b is None:
            merged[name] = second.get(name, first.get(name))
        elif name.startswith("peak_") or name in _HIGHEST:
            merged[name] = max(a, b)
        elif name in _LOWEST:
            merged[name] = min(a, b)
        elif name in MEAN_OF_STEPS:
            merged[name] = (a * weights[0] + b * weights[1]) / sum(weights)
        else:
            merged[name] = second[name]
    return cast(StepRecord, {**merged, "steps": sum(weights)})


def extremes(series: Sequence[Sequence[float | None]], points: int) -> list[int]:
    """At most `points` positions to draw of series of one length: evenly spread parts, and of each part the position
    where each series is highest; the first and the last always."""
    length = max(map(len, series), default=0)
    if length <= points:
        return list(range(length))
    parts = max(1, (points - 2) // max(1, len(series)))
    chosen = {0, length - 1}
    for part in range(parts):
        begin, end = part * length // parts, (part + 1) * length // parts
        for values in series:
            known = [i for i in range(begin, end) if values[i] is not None]
            if known:
                chosen.add(max(known, key=lambda i: values[i] or 0.0))
    return sorted(chosen)


def _highest_of_each(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    phases: dict[str, Any] = {}
    for phase in {**first, **second}:
        sides = [side[phase] for side in (first, second) if isinstance(side.get(phase), Mapping)]
        names = {name for side in sides for name in side}
        values = {name: [v for side in sides if (v := number(side, name)) is not None] for name in names}
        phases[phase] = {name: max(found) for name, found in values.items() if found}
    return phases
