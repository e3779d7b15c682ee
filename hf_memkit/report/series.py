"""What the diagnosis works with: step records as columns of numbers, and what it finds in them.

In: records as they were read. Out: numbers or None, in order of steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate, pairwise
from statistics import median
from typing import Any, Final, Literal, get_args

from hf_memkit.report.sanitize import number

Kind = Literal["leak", "longer batches", "fragmentation", "another process"]
"""Memory problems over the steps of a training."""

KINDS: Final[tuple[Kind, ...]] = get_args(Kind)


@dataclass(frozen=True, slots=True)
class Finding:
    """A memory problem: where it began, and what to do.

    Attributes:
        kind: see `Kind`.
        first_step: optimizer step at which it began.
        why: the evidence, with figures.
        fix: what to set, or what to look for in the code.
        figures: by name, with the unit in the name (`_gib`, `_mib_per_step`); steps and counts have none. Names with
            `projected_` are projections, the others measured.
    """

    kind: Kind
    first_step: int
    why: str
    fix: str
    figures: dict[str, float]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


Column = list[float | None]

# Counts since the process began: where one falls, another process went on with the training.
_PROCESS_COUNTS: Final = ("alloc_retries", "allocator_ooms")


class Steps:
    """The `step` records of one rank.

    Records without a whole-numbered step are left out; of several for one step, as after a resume, the last counts.

    Args:
        records: `step` records in any order.
        run: the last `run` record, if there is one: its `start_step` tells where a resume began, its `hardware` the
            GPU's capacity.
    """

    def __init__(self, records: Iterable[Mapping[str, Any]], run: Mapping[str, Any] | None = None) -> None:
        last: dict[int, Mapping[str, Any]] = {}
        for record in records:
            if isinstance(record, Mapping) and isinstance(step := record.get("step"), int):
                last[step] = record
        self.numbers: list[int] = sorted(last)
        self.records = [last[step] for step in self.numbers]
        self.run: Mapping[str, Any] = run or {}
        self._columns: dict[str, Column] = {}

    def __len__(self) -> int:
        return len(self.numbers)

    def column(self, name: str) -> Column:
        """The field `name` of each record; None where it is absent or no finite number."""
        if name not in self._columns:
            self._columns[name] = [number(record, name) for record in self.records]
        return self._columns[name]

    def named(self) -> Column:
        """GiB on the device that are known to be weights, gradients, optimizer states or buffers: `held`, which only
        some records have, carried on until the next. All None where no record has it."""
        found = [_named(_inside(record, "held", "device")) for record in self.records]
        current = next((value for value in found if value is not None), None)
        carried: Column = []
        for value in found:
            current = current if value is None else value
            carried.append(current)
        return carried

    def capacity_gib(self) -> float | None:
        """The GPU's capacity."""
        capacities = [value for value in self.column("capacity_gib") if value is not None]
        capacity = capacities[-1] if capacities else number(self.hardware(), "capacity_gib")
        return capacity if capacity is not None and capacity > 0 else None

    def usable_gib(self) -> float | None:
        """What PyTorch's allocator may take: the GPU's capacity, or its share where one was set."""
        capacity = self.capacity_gib()
        share = number(self.hardware(), "allocator_cap_fraction")
        return capacity * share if capacity is not None and share is not None and 0 < share < 1 else capacity

    def before_step_gib(self) -> Column:
        """The most that was reserved until the first forward of each step, from the phases.

        With several micro-batches or steps in a record it is until the last forward: the same or more.
        """
        return [number(_inside(record, "phases", "data"), "peak_reserved_gib") for record in self.records]

    def hardware(self) -> Mapping[str, Any]:
        """`hardware` of the `run` record, or nothing."""
        return _inside(self.run, "hardware")

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


def _inside(record: Mapping[str, Any], *names: str) -> Mapping[str, Any]:
    """What the record has under these names, one in the other; empty if that is no mapping."""
    for name in names:
        found = record.get(name)
        record = found if isinstance(found, Mapping) else {}
    return record


def _named(device: Mapping[str, Any]) -> float | None:
    names = ("weights_gib", "gradients_gib", "optimizer_gib", "buffers_gib")
    values = [value for name in names if (value := number(device, name)) is not None]
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
