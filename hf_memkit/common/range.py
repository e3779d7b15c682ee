"""A quantity of which bounds are known, such as the seconds of a step."""

from __future__ import annotations

from typing import NamedTuple


class Range(NamedTuple):
    """Low, middle (the likely value), high; for seconds: fastest, likely, slowest."""

    low: float
    middle: float
    high: float

    def __add__(self, other: Range) -> Range:  # type: ignore[override]
        return Range(self.low + other.low, self.middle + other.middle, self.high + other.high)

    def __sub__(self, other: Range) -> Range:
        return Range(self.low - other.low, self.middle - other.middle, self.high - other.high)

    def times(self, factor: float) -> Range:
        return Range(self.low * factor, self.middle * factor, self.high * factor)

    def minimum(self, other: Range) -> Range:
        return Range(min(self.low, other.low), min(self.middle, other.middle), min(self.high, other.high))

    def nonnegative(self) -> Range:
        return Range(max(0.0, self.low), max(0.0, self.middle), max(0.0, self.high))


ZERO = Range(0.0, 0.0, 0.0)
