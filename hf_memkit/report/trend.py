"""A level that rises and does not level off. In: steps and values. Out: where the rise began, and its pace.

What a leak adds is never given back, so only the lower envelope counts: the highest level under which no later value
falls. Noise and passing peaks do not lift it. The values are cut into equal stretches of steps; each stretch has its
minimum, and the envelope goes through those. It is a steady rise if

- it rises by more than a stated amount and more than the noise,
- it keeps its pace: a straight line follows it (a jump, a cache that fills, or a curve that levels off departs from
  the line, and its last quarter falls behind), but for one pause, or it is a staircase of many regular steps that
  still goes on,
- and it either begins with the first value or after a hinge, where a level line turns into a rising one, and ends
  above all that was before. A curve that levels off has no such hinge: it is steeper before than after, at any cut.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Final

from hf_memkit.report.series import typical_spread

MIN_VALUES: Final = 20
"""Fewer values tell no pace: six stretches of three are the least that a straight line can be told from a jump in."""

_STRETCHES: Final = 12
"""Enough to see a curve level off, few enough that each has many values in long runs."""

_MIN_STRETCHES: Final = 5
"""Where steps are missing there may be fewer."""

_NOISE: Final = 5.0
"""The rise must be this many standard deviations of the values within a stretch; minima of noise differ by less."""

_STRAIGHT: Final = 0.15
"""Greatest distance from the straight line, as a share of the rise. One jump: at least 0.5; 1 − exp(−t/τ) over 3 τ
0.35, over 2 τ 0.24; square root: 0.25; a ramp that fills a cache in 80 % of the time: 0.2."""

_LAST_QUARTER: Final = 0.75
"""The last quarter of the stretches must rise by this share of what its length would give. Of 1 − exp(−t/τ) over
1 τ it is 0.66, over 2 τ 0.41; of a ramp that ended at 90 % of the time 0.67."""

_MOST: Final = 0.75
"""Share of stretches that must bring a rise; with fewer the envelope is a staircase."""

_SOME: Final = 0.02
"""A stretch rises if it brings this share of the least rise that counts."""

_JUMPS: Final = 2
_JUMP: Final = 5.0
"""Up to two stretches that rise by five times the median hold a jump on top of the rise: the rest is judged."""

_STAIRS: Final = 5
"""A staircase needs at least five steps: layers unfrozen in turn, or two evaluations, make fewer."""

_STAIR: Final = 1 / 30
_ALL_STAIRS: Final = 0.8
"""A step brings a thirtieth of the rise or more, and all steps nearly the whole of it."""

_STAIR_GAPS: Final = 2.5
_STAIR_END: Final = 1.5
"""Stairs come regularly: the longest wait is at most 2.5 × the median, and no more than 1.5 × the longest wait lies
before the first and after the last."""

_PAUSE: Final = 1 / 3
_BESIDE: Final = 2
"""One pause of up to a third of the stretches, with two gains (three stretches) or more on both sides, is cut out:
what rises before and after it in one and the same line is one leak that rested, as while the path that leaks was not
taken."""

_LEVEL: Final = 0.25
"""A line that brought more than a quarter of the rise before the hinge was not level there: it began before."""

_BEFORE: Final = 8
"""A rise that begins later has at least eight values before it: fewer are the end of the warm-up."""


@dataclass(frozen=True, slots=True)
class Trend:
    """A steady rise.

    Attributes:
        first_step: where it began.
        start: level there, in the unit of the values.
        end: level at the end.
        per_step: pace, jumps left out.
    """

    first_step: int
    start: float
    end: float
    per_step: float


def find_trend(steps: Sequence[int], values: Sequence[float], least: float, *, stairs: bool = True) -> Trend | None:
    """The steady rise that `values` end with, or None.

    The whole run is looked at first, then its last half, quarter and so on, so that a rise is found that began late
    in a long run. Linear in the number of values.

    Args:
        steps: rising step numbers, one a value.
        values: the levels.
        least: a smaller rise is not worth saying.
        stairs: whether a staircase counts; without, every stretch must bring its part.
    """
    if len(values) < MIN_VALUES:
        return None
    smooth = _median_of_three(values)
    if (whole := _judge(steps, smooth, least, stairs)) is not None:
        later = _with_hinge(steps, smooth, least, stairs)
        level = later is not None and later.start - whole.start <= _LEVEL * (whole.end - whole.start)
        return later if level else whole
    size = len(smooth)
    while size >= MIN_VALUES + _BEFORE:
        found = _with_hinge(steps[-size:], smooth[-size:], least, stairs)
        if found is not None and found.end >= max(smooth[: bisect_left(steps, found.first_step) + 1]) + least / 2:
            return found
        size //= 2
    return None


def _with_hinge(steps: Sequence[int], values: Sequence[float], least: float, stairs: bool) -> Trend | None:
    """The rise after the point where a flat line turns into a rising one, if such a point is there."""
    start = _hinge(steps, values)
    if start < _BEFORE or len(values) - start < MIN_VALUES:
        return None
    return _judge(steps[start:], values[start:], least, stairs)


def _judge(steps: Sequence[int], values: Sequence[float], least: float, stairs: bool) -> Trend | None:
    """The rise over all these values, if it is a steady one."""
    middles, lows, noise = _stretches(steps, values)
    if len(lows) < _MIN_STRETCHES:
        return None
    envelope = _lower_envelope(lows)
    gains = [b - a for a, b in pairwise(envelope)]
    least = max(least, _NOISE * noise)
    if sum(gains) < least:
        return None
    span = middles[-1] - middles[0]
    many = sum(gain > _SOME * least for gain in gains) >= _MOST * len(gains)
    without_jumps = _without_jumps(gains)
    if many and sum(without_jumps) >= least and _keeps_pace(middles, without_jumps):
        gains = without_jumps
    elif stairs and (paused := _without_pause(middles, gains, _SOME * least)) and _keeps_pace(*paused):
        span = paused[0][-1] - paused[0][0]
    elif many or not stairs or not _is_staircase(steps, values, sum(gains)):
        return None
    return Trend(steps[0], envelope[0], envelope[-1], sum(gains) / span)


def _stretches(steps: Sequence[int], values: Sequence[float]) -> tuple[list[float], list[float], float]:
    """Middle and minimum of each stretch of steps that has values, and the spread around each stretch's median."""
    count = min(_STRETCHES, len(values) // 3)
    first, span = steps[0], steps[-1] - steps[0] + 1
    bounds = [bisect_left(steps, first + span * k / count) for k in range(count + 1)]
    middles, lows, around = [], [], []
    for k, (a, b) in enumerate(pairwise(bounds)):
        if b > a:
            middles.append(first + span * (k + 0.5) / count)
            lows.append(min(values[a:b]))
            middle = median(values[a:b])
            around += [value - middle for value in values[a:b]]
    return middles, lows, typical_spread(around)


def _lower_envelope(values: Sequence[float]) -> list[float]:
    """At each value the least of it and all later ones."""
    found = list(values)
    for i in range(len(found) - 2, -1, -1):
        found[i] = min(found[i], found[i + 1])
    return found


def _without_jumps(gains: list[float]) -> list[float]:
    usual = median(gains)
    jumps = sorted((i for i, gain in enumerate(gains) if gain > _JUMP * usual), key=gains.__getitem__)[-_JUMPS:]
    return [usual if i in jumps else gain for i, gain in enumerate(gains)]


def _without_pause(
    middles: Sequence[float], gains: Sequence[float], least: float
) -> tuple[list[float], list[float]] | None:
    """The stretches' middles and gains without the one pause, those after it moved up to it; None without such one."""
    still = [i for i, gain in enumerate(gains) if gain <= least]
    if not still or still[-1] - still[0] + 1 != len(still) or len(still) > _PAUSE * len(gains):
        return None
    begin, end = still[0], still[-1] + 1
    if begin < _BESIDE or len(gains) - end < _BESIDE:
        return None
    pause = middles[end] - middles[begin]
    kept = [*middles[: begin + 1], *(middle - pause for middle in middles[end + 1 :])]
    return kept, [*gains[:begin], *gains[end:]]


def _keeps_pace(middles: Sequence[float], gains: Sequence[float]) -> bool:
    total, span = sum(gains), middles[-1] - middles[0]
    height = 0.0
    for middle, gain in zip(middles[1:], gains, strict=True):
        height += gain
        if abs(height / total - (middle - middles[0]) / span) > _STRAIGHT:
            return False
    last = max(2, len(gains) // 4)
    share = (middles[-1] - middles[-1 - last]) / span
    return sum(gains[-last:]) >= _LAST_QUARTER * share * total


def _is_staircase(steps: Sequence[int], values: Sequence[float], total: float) -> bool:
    envelope = _lower_envelope(values)
    stairs = [(steps[i], b - a) for i, (a, b) in enumerate(pairwise(envelope), 1) if b - a > _STAIR * total]
    if len(stairs) < _STAIRS:
        return False
    sizes = [size for _, size in stairs]
    gaps = [b - a for (a, _), (b, _) in pairwise(stairs)]
    return (
        sum(sizes) >= _ALL_STAIRS * total
        and max(gaps) <= _STAIR_GAPS * median(gaps)
        and max(stairs[0][0] - steps[0], steps[-1] - stairs[-1][0]) <= _STAIR_END * max(gaps)
    )


def _hinge(steps: Sequence[int], values: Sequence[float]) -> int:
    """Index where the least-squares hinge, level and then rising in a straight line, turns.

    For a hinge at c the regressor is u = max(0, x − c); the sums over x > c that it needs come from suffix sums, so
    that all hinges together are linear.
    """
    n, origin = len(values), steps[0]
    level = sum(values) / n
    count = sx = sxx = sy = sxy = 0.0
    best, best_gain = 0, 0.0
    for i in range(n - 1, -1, -1):
        x, y = float(steps[i] - origin), values[i] - level
        # The values after i, with the hinge at x.
        su, suu, suy = sx - x * count, sxx - 2 * x * sx + x * x * count, sxy - x * sy
        spread = suu - su * su / n
        if spread > 0 and suy > 0 and suy * suy / spread > best_gain:
            best, best_gain = i, suy * suy / spread
        count, sx, sxx, sy, sxy = count + 1, sx + x, sxx + x * x, sy + y, sxy + x * y
    return best


def _median_of_three(values: Sequence[float]) -> list[float]:
    """Each value as the median of it and its neighbours: a single one that stands out is gone."""
    inner = [max(min(a, b), min(max(a, b), c)) for a, b, c in zip(values, values[1:], values[2:], strict=False)]
    return [values[0], *inner, values[-1]]
