"""Step records as columns of numbers. In: records as they were read. Out: numbers or None, in order of steps."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, pairwise
from statistics import median
from typing import Any, Final

__all__ = ["Column", "Steps", "pairs", "ranks", "running_max", "typical_spread"]

Column = list[float | None]

# Counts since the process began: where one falls, another process went on with the training.
_PROCESS_COUNTS: Final = ("alloc_retries", "allocator_ooms")


class Steps:
    """The `step` records of one rank.

    Records without a whole-numbered step are left out; of several for one step, as after a resume, the last counts.

    Args:
        records: `step` records in any order.
        run: the last `run` record, if there is one: its `start_step` tells where a resume began, its `hardware` the
            card's capacity.
    """

    def __init__(self, records: Iterable[Mapping[str, Any]], run: Mapping[str, Any] | None = None) -> None:
        last: dict[int, Mapping[str, Any]] = {}
        for record in records:
            if isinstance(record, Mapping) and isinstance(step := record.get("step"), int):
                last[step] = record
        self.numbers: list[int] = sorted(last)
        self.records = [last[step] for step in self.numbers]
        self.run: Mapping[str, Any] = run if isinstance(run, Mapping) else {}
        self._columns: dict[str, Column] = {}

    def __len__(self) -> int:
        return len(self.numbers)

    def column(self, name: str) -> Column:
        """The field `name` of each record; None where it is absent or no finite number."""
        if name not in self._columns:
            self._columns[name] = [_number(record.get(name)) for record in self.records]
        return self._columns[name]

    def named(self) -> Column:
        """GiB on the device that are known to be weights, gradients, optimizer states or buffers: `held`, which only
        some records have, carried on until the next. All None where no record has it."""
        found = [_named(record.get("held")) for record in self.records]
        current = next((value for value in found if value is not None), None)
        carried: Column = []
        for value in found:
            current = current if value is None else value
            carried.append(current)
        return carried

    def capacity_gib(self) -> float | None:
        """The card's capacity."""
        capacities = [value for value in self.column("capacity_gib") if value is not None]
        capacity = capacities[-1] if capacities else _number(self.hardware().get("capacity_gib"))
        return capacity if capacity is not None and capacity > 0 else None

    def usable_gib(self) -> float | None:
        """What PyTorch's allocator may take: the card's capacity, or its share where one was set."""
        capacity = self.capacity_gib()
        share = _number(self.hardware().get("allocator_cap_fraction"))
        return capacity * share if capacity is not None and share is not None and 0 < share < 1 else capacity

    def before_step_gib(self) -> Column:
        """The most that was reserved until the first forward of each step, from the phases.

        With several micro-batches or steps in a record it is until the last forward: the same or more.
        """
        return [_before_step(record.get("phases")) for record in self.records]

    def hardware(self) -> Mapping[str, Any]:
        """`hardware` of the `run` record, or nothing."""
        hardware = self.run.get("hardware")
        return hardware if isinstance(hardware, Mapping) else {}

    def processes(self) -> list[range]:
        """Ranges of records that one process wrote, in order: at a resume counters and warm-up start again."""
        starts = {0}
        resumed = self.run.get("start_step")
        if isinstance(resumed, int):
            starts |= {i for i, (a, b) in enumerate(pairwise(self.numbers), 1) if a <= resumed < b}
        for name in _PROCESS_COUNTS:
            before = 0.0
            for i, value in enumerate(self.column(name)):
                if value is not None:
                    if value < before:
                        starts.add(i)
                    before = value
        bounds = [*sorted(starts), len(self)]
        return [range(a, b) for a, b in pairwise(bounds) if b > a]


def _number(value: Any) -> float | None:
    if type(value) is not float and type(value) is not int:
        return None
    return value if math.isfinite(value) else None


def _before_step(phases: Any) -> float | None:
    data = phases.get("data") if isinstance(phases, Mapping) else None
    return _number(data.get("peak_reserved_gib")) if isinstance(data, Mapping) else None


def _named(held: Any) -> float | None:
    device = held.get("device") if isinstance(held, Mapping) else None
    if not isinstance(device, Mapping):
        return None
    names = ("weights_gib", "gradients_gib", "optimizer_gib", "buffers_gib")
    values = [value for name in names if (value := _number(device.get(name))) is not None]
    return sum(values) if values else None


def pairs(indices: Iterable[int], *columns: Column) -> tuple[list[int], list[list[float]]]:
    """Those of `indices` at which every column has a number, and the columns there."""
    kept = list(indices)
    for column in columns:
        kept = [i for i in kept if column[i] is not None]
    return kept, [[value for i in kept if (value := column[i]) is not None] for column in columns]


def running_max(values: Iterable[float]) -> list[float]:
    """The highest value so far, at each."""
    return list(accumulate(values, max))


def ranks(values: Sequence[float]) -> list[float]:
    """Ranks from 0; equal values share the mean of theirs."""
    order = sorted(range(len(values)), key=values.__getitem__)
    found = [0.0] * len(values)
    i = 0
    while i < len(order):
        j = i
        while j + 1 < len(order) and values[order[j + 1]] == values[order[i]]:
            j += 1
        for k in range(i, j + 1):
            found[order[k]] = (i + j) / 2
        i = j + 1
    return found


def typical_spread(values: Sequence[float]) -> float:
    """A standard deviation that outliers do not move: 1.4826 × the median distance from the median."""
    middle = median(values)
    return 1.4826 * median([abs(value - middle) for value in values])
