"""Peaks by phase, steps of one record, and numbers of one log, from marks of the allocator and step records."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final, cast

from hf_memkit.common.terms import Phase
from hf_memkit.common.units import GIB
from hf_memkit.measuring.memory.readers.base import Mark, ReaderGroup
from hf_memkit.measuring.memory.records import merge_steps
from hf_memkit.measuring.record_types import MEAN_OF_STEPS, StepRecord

STEP_PHASES: tuple[Phase, ...] = ("data", "forward", "backward", "optimizer")
"""Phases of an optimizer step; load, evaluate and save lie between steps."""

SINGLE_STEPS: Final = 5000
"""Number of steps of a training with a record each."""

_PEAKS = ("peak_allocated_gib", "peak_reserved_gib", "fragmentation_gib")
_FEW = (*_PEAKS, "host_rss_gib")
_EVERYTHING = (
    *_FEW, "allocated_gib", "reserved_gib", "alloc_retries", "allocator_ooms", "device_used_gib",
    "outside_allocator_gib", "other_processes_gib", "pinned_gib", "disk_swap_gib",
)  # fmt: skip


def update_maxima(highest: dict[str, float], numbers: Mapping[str, float]) -> None:
    """Raise the values of `highest` to those of `numbers`."""
    for name, value in numbers.items():
        if value > highest.get(name, -1.0):
            highest[name] = value


class PeakWindow:
    """Peaks of the phases since the last `clear`. With `reset`, every sample resets the device's counter. Without, it
    is only read, and a peak is the highest value since the last reset elsewhere, mostly since the process began."""

    def __init__(self, readers: ReaderGroup, *, reset: bool) -> None:
        self._readers = readers
        self._reset = reset
        self._peaks: dict[Phase, tuple[int, int | None]] = {}

    def sample(self, phase: Phase) -> Mark:
        """Assign the time since the last sample to `phase`; returns the allocator's current values."""
        mark = self._readers.mark()
        if not self._reset:
            return Mark(mark.allocated, None, None)
        self._readers.reset_peak()
        allocated, reserved = mark.peak_allocated, mark.peak_reserved
        if allocated is not None:
            earlier = self._peaks.get(phase)
            if earlier is not None:
                allocated = max(allocated, earlier[0])
                reserved = earlier[1] if reserved is None or earlier[1] is None else max(reserved, earlier[1])
            self._peaks[phase] = (allocated, reserved)
        return mark

    def clear(self) -> None:
        self._peaks.clear()

    def fields(self, phases: Iterable[Phase]) -> dict[str, Any]:
        """The peaks over these phases as flat numbers, and those of each under `phases`."""
        if not self._reset:
            return dict(self._readers.peak())
        chosen = {phase: self._peaks[phase] for phase in phases if phase in self._peaks}
        if not chosen:
            return {}
        allocated = max(peak for peak, _ in chosen.values())
        reserved = max((peak for _, peak in chosen.values() if peak is not None), default=None)
        return {**_gib(allocated, reserved), "phases": {phase: _gib(*peaks) for phase, peaks in chosen.items()}}


def _gib(allocated: int, reserved: int | None) -> dict[str, float]:
    sizes = {"peak_allocated_gib": round(allocated / GIB, 10)}
    if reserved is not None:
        sizes["peak_reserved_gib"] = round(reserved / GIB, 10)
    return sizes


def window_size(index: int) -> int:
    """Number of steps in the record of step `index` (from 0): 1 for the first 5 000, 2 for the next 5 000, 4 for the
    next 10 000 and so on, so that each doubling of a run adds 2 500 records."""
    size = 1
    while index >= SINGLE_STEPS * size:
        size *= 2
    return size


class StepWindow:
    """Steps of one record. A watched step has its own, because its categories add up to its peak; so has a step that
    compiled, because its time is no typical one."""

    def __init__(self) -> None:
        self._pending: StepRecord | None = None

    def add(self, index: int, fields: StepRecord) -> list[StepRecord]:
        """Add step `index` (from 0) of this training; keeps `fields`, and returns the records to write now."""
        size = window_size(index)
        fields["steps"] = 1
        if size == 1:
            return [fields]
        if {"held", "categories", "compilation"} & fields.keys():
            return [*self.flush(), fields]
        self._pending = fields if self._pending is None else merge_steps(self._pending, fields)
        return self.flush() if self._pending["steps"] >= size else []

    def flush(self) -> list[StepRecord]:
        """The record that has not been written yet."""
        pending, self._pending = self._pending, None
        if pending is None:
            return []
        sums: Mapping[str, Any] = pending
        return [cast(StepRecord, {**sums, **{name: round(sums[name], 3) for name in MEAN_OF_STEPS if name in sums}})]


class LogNumbers:
    """Numbers of steps between two logs, named as in records; `everything` adds counters, phases and categories."""

    def __init__(self, *, everything: bool = False) -> None:
        self._everything = everything
        self._names = _EVERYTHING if everything else _FEW
        self._highest: dict[str, float] = {}
        self._categories: dict[str, float] = {}
        self._capacity_gib: float | None = None
        self._others_gib = 0.0
        self._taken = True

    def step(self, record: StepRecord) -> None:
        """Add a step's record."""
        fields: Mapping[str, Any] = record
        if self._taken:
            self._taken = False
            self._highest = {}
            self._categories = {}
        update_maxima(self._highest, {name: fields[name] for name in self._names if name in fields})
        if self._everything:
            for phase, peaks in fields.get("phases", {}).items():
                update_maxima(self._highest, {f"{phase}_{name}": value for name, value in peaks.items()})
            self._categories = fields.get("categories", self._categories)
        self._capacity_gib = fields.get("capacity_gib")
        if "device_used_gib" in fields and "reserved_gib" in fields:
            self._others_gib = max(0.0, fields["device_used_gib"] - fields["reserved_gib"])

    def take(self) -> dict[str, float]:
        """The highest values of the steps since the last `take`; without a step, the same as before. `headroom_gib`:
        capacity less the reserved peak and the memory of others, if NVML has reported it."""
        self._taken = True
        highest = self._highest
        numbers = {name: highest[name] for name in _PEAKS if name in highest}
        reserved_gib = highest.get("peak_reserved_gib")
        if reserved_gib is not None and self._capacity_gib:
            numbers["peak_reserved_percent"] = round(100 * reserved_gib / self._capacity_gib, 2)
            numbers["headroom_gib"] = round(self._capacity_gib - reserved_gib - self._others_gib, 10)
        if self._everything:
            return {**highest, **numbers, **self._categories}
        if not numbers and "host_rss_gib" in highest:
            return {"host_rss_gib": highest["host_rss_gib"]}
        return numbers
