"""Highest values by phase. In: readers, and the end of each phase. Out: peaks of each phase, and of several."""

from __future__ import annotations

from collections.abc import Iterable

from hf_memkit.memory.readers import ReaderGroup
from hf_memkit.terms import Phase

__all__ = ["STEP_PHASES", "PeakWindow", "raise_to"]

STEP_PHASES: tuple[Phase, ...] = ("data", "forward", "backward", "optimizer")
"""The phases that belong to an optimizer step; load, evaluate and save lie between steps."""


class PeakWindow:
    """The peaks of the phases since the last `clear`.

    With `reset`, every sample resets the device's peak counter, so that each phase has its own peak. Without, the
    counter is only read, and a peak is the highest value since whoever reset it last, mostly since the process began.
    """

    def __init__(self, readers: ReaderGroup, *, reset: bool) -> None:
        self.phases: dict[Phase, dict[str, float]] = {}
        self._readers = readers
        self._reset = reset

    def sample(self, ended: Phase) -> None:
        """The phase that ends now."""
        if not self._reset:
            return
        peak = self._readers.peak()
        self._readers.reset_peak()
        if peak:
            raise_to(self.phases.setdefault(ended, {}), peak)

    def clear(self) -> None:
        self.phases.clear()

    def fields(self, phases: Iterable[Phase]) -> dict[str, object]:
        """The peaks over these phases as flat numbers, and those of each under `phases`."""
        if not self._reset:
            return dict(self._readers.peak())
        chosen = {phase: dict(self.phases[phase]) for phase in phases if phase in self.phases}
        highest: dict[str, float] = {}
        for peak in chosen.values():
            raise_to(highest, peak)
        return {**highest, "phases": chosen} if chosen else {}

    def highest_phase(self, phases: Iterable[Phase]) -> Phase | None:
        """The phase whose allocated peak is the highest; None where phases are not told apart."""
        known = [phase for phase in phases if phase in self.phases]
        return max(known, key=lambda phase: self.phases[phase].get("peak_allocated_gib", 0.0), default=None)


def raise_to(highest: dict[str, float], numbers: dict[str, float]) -> None:
    """Takes from `numbers` what is higher than in `highest`, or not there yet."""
    for name, value in numbers.items():
        highest[name] = max(value, highest.get(name, value))
