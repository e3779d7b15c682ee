"""Which steps are watched closely, and how many steps one record stands for. In: step numbers and seconds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, cast

from hf_memkit.record_types import MEAN_OF_STEPS, StepRecord

__all__ = ["SINGLE_STEPS", "StepWindow", "WatchSchedule", "window_size"]

SINGLE_STEPS: Final = 5000
"""So many steps of a training have a record each."""

_FIRST = 3
_EVERY = 10
_SHARE = 0.001
_WINDOWS_A_WATCH = 4


def window_size(index: int) -> int:
    """How many steps the record stands for that step `index` (from 0) of a training goes into.

    1 for the first 5 000, 2 for the next 5 000, 4 for the next 10 000 and so on: each doubling of a run's length adds
    2 500 records.
    """
    size = 1
    while index >= SINGLE_STEPS * size:
        size *= 2
    return size


class WatchSchedule:
    """The first three steps, then every tenth; later, where records stand for many steps, one in four records.

    A step is skipped while the last one watched has cost more than a thousandth of the time that went by since.
    """

    def __init__(self) -> None:
        self._cost_s = 0.0
        self._last_s = 0.0

    def is_due(self, index: int, now_s: float) -> bool:
        """Whether step `index` (from 0) is to be watched."""
        if index < _FIRST:
            return True
        size = window_size(index)
        every = _EVERY if size == 1 else max(_EVERY, _WINDOWS_A_WATCH * size)
        return index % every == 0 and self.is_affordable(now_s)

    def is_affordable(self, now_s: float) -> bool:
        return self._cost_s <= _SHARE * (now_s - self._last_s)

    def watched(self, cost_s: float, now_s: float) -> None:
        """A step was watched, and that took `cost_s` seconds of it."""
        self._cost_s, self._last_s = cost_s, now_s


class StepWindow:
    """Steps that go into one record: peaks and the longest sequence are maxima, times and sizes means, counters the
    last ones. A step that was watched closely has its own record, because its categories add up to its own peak.
    """

    def __init__(self) -> None:
        self._pending: StepRecord | None = None
        self._steps = 0

    def add(self, index: int, fields: StepRecord) -> list[StepRecord]:
        """Step `index` (from 0) of this training, whose `fields` it keeps; returns what is to be written now."""
        size = window_size(index)
        if size == 1:
            fields["steps"] = 1
            return [fields]
        if "held" in fields or "categories" in fields:
            return [*self.flush(), {**fields, "steps": 1}]
        self._pending = fields if self._pending is None else _merged(self._pending, fields)
        self._steps += 1
        return self.flush() if self._steps >= size else []

    def flush(self) -> list[StepRecord]:
        """What has not been written yet."""
        pending, count = self._pending, self._steps
        self._pending, self._steps = None, 0
        if pending is None:
            return []
        sums: Mapping[str, Any] = pending
        means = {name: round(sums[name] / count, 3) for name in MEAN_OF_STEPS if name in sums}
        return [cast(StepRecord, {**sums, **means, "steps": count})]


def _merged(before: Mapping[str, Any], now: Mapping[str, Any]) -> StepRecord:
    """Two steps as one; means are sums until the window is full."""
    merged = {**before, **now}
    for name in MEAN_OF_STEPS:
        if name in before and name in now:
            merged[name] = before[name] + now[name]
    for name in before.keys() & now.keys():
        if name.startswith("peak_") or name == "longest_sequence":
            merged[name] = max(before[name], now[name])
    if "phases" in before and "phases" in now:
        merged["phases"] = {
            phase: _higher(before["phases"].get(phase, {}), now["phases"].get(phase, {}))
            for phase in {**before["phases"], **now["phases"]}
        }
    return cast(StepRecord, merged)


def _higher(first: Mapping[str, float], second: Mapping[str, float]) -> dict[str, float]:
    names = {**first, **second}
    return {name: max(first.get(name, value), second.get(name, value)) for name, value in names.items()}
