"""Highest values by phase. In: readers, and the end of each phase. Out: peaks of each phase, and of several."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from hf_memkit.memory.readers import Mark, ReaderGroup
from hf_memkit.terms import Phase
from hf_memkit.units import GIB

__all__ = ["STEP_PHASES", "PeakWindow"]

STEP_PHASES: tuple[Phase, ...] = ("data", "forward", "backward", "optimizer")
"""The phases that belong to an optimizer step; load, evaluate and save lie between steps."""


class PeakWindow:
    """The peaks of the phases since the last `clear`.

    With `reset`, every sample resets the device's peak counter, so that each phase has its own peak. Without, the
    counter is only read, and a peak is the highest value since whoever reset it last, mostly since the process began.
    """

    def __init__(self, readers: ReaderGroup, *, reset: bool) -> None:
        self._readers = readers
        self._reset = reset
        self._peaks: dict[Phase, tuple[int, int | None]] = {}

    def sample(self, phase: Phase) -> Mark:
        """What lies between the last sample and now belongs to `phase`; returns the allocator as it is."""
        mark = self._readers.mark()
        if not self._reset:
            return Mark(mark.allocated, None, None)
        self._readers.reset_peak()
        allocated, reserved = mark.peak_allocated, mark.peak_reserved
        if allocated is not None:
            before = self._peaks.get(phase)
            if before is not None:
                allocated = max(allocated, before[0])
                reserved = before[1] if reserved is None or before[1] is None else max(reserved, before[1])
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
        return {
            **_gib(allocated, reserved),
            "phases": {phase: _gib(*peaks) for phase, peaks in chosen.items()},
        }


def _gib(allocated: int, reserved: int | None) -> dict[str, float]:
    found = {"peak_allocated_gib": round(allocated / GIB, 10)}
    if reserved is not None:
        found["peak_reserved_gib"] = round(reserved / GIB, 10)
    return found
