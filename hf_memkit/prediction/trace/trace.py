"""What one training process made and freed on its device, in order: the bridge from the traced Trainer to everything
that is computed from it, the replay of the caching allocator and live bytes by category, operation and module.

A trace is plain data, lists of numbers and tables of names, which passes between processes as JSON (`wire.py`).
Storages are numbered from 1 in the order in which they were made.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from hf_memkit.common.terms import CATEGORIES, PHASES, Category, Phase
from hf_memkit.prediction.trace.work import Work, spans

ROUND_BYTES: Final = 512
"""Every allocation is a multiple of this (torch 2.13: c10/core/AllocatorConfig.h, kMinBlockSize)."""


_NUMBER: Final = re.compile(r"\.\d+(?=\.|$)")
"""Of a layer, in the name of a module."""


def rounded(size_bytes: int) -> int:
    """What an allocation of `size_bytes` occupies, as the caching allocator counts it without roundings of its own; an
    empty one occupies nothing."""
    return -(-size_bytes // ROUND_BYTES) * ROUND_BYTES


@dataclass(frozen=True, slots=True)
class TracePeak:
    """The moment of most live bytes.

    Attributes:
        size_bytes: live bytes, each storage rounded to 512 bytes.
        phase: the phase it fell into.
        operation, module: what made the storage of that event, such as `aten._log_softmax.default`, and the module
            whose forward (or whose forward's backward) was running; empty outside.
        categories, modules: the live bytes by category, and by the module that made them and category; layers of one
            kind are one (`model.layers.*.mlp`).
    """

    size_bytes: int
    phase: Phase
    operation: str
    module: str
    categories: dict[Category, int]
    modules: Mapping[tuple[str, Category], int]


@dataclass(slots=True)
class Trace:
    """Storages made and freed, in order.

    Attributes:
        events: `n`: storage n is made; `-n`: it is freed.
        sizes_bytes: of storage n at `[n - 1]`, as asked for.
        category_of, operation_of, module_of: of storage n at `[n - 1]`; indexes into `CATEGORIES`, `operations`,
            `modules`.
        operations, modules: names.
        marks: `(event index, phase)`: the events before that index and after the mark before it fell into `phase`.
        work: what was computed; None: that was not recorded. Parts and copies of a trace have none.
    """

    events: list[int] = field(default_factory=list)
    sizes_bytes: list[int] = field(default_factory=list)
    category_of: list[int] = field(default_factory=list)
    operation_of: list[int] = field(default_factory=list)
    module_of: list[int] = field(default_factory=list)
    operations: list[str] = field(default_factory=list)
    modules: list[str] = field(default_factory=list)
    marks: list[tuple[int, Phase]] = field(default_factory=list)
    work: Work | None = None

    def add(self, size_bytes: int, category: int, operation: int = 0, module: int = 0) -> int:
        """The number of another storage; the caller says in `events` when it is made."""
        self.sizes_bytes.append(size_bytes)
        self.category_of.append(category)
        self.operation_of.append(operation)
        self.module_of.append(module)
        return len(self.sizes_bytes)

    def without_events(self) -> Trace:
        """Another trace with the same storages, which it neither makes nor frees."""
        names = ("sizes_bytes", "category_of", "operation_of", "module_of", "operations", "modules")
        own: dict[str, Any] = {name: list(getattr(self, name)) for name in names}
        return Trace(**own)

    def only(self, *parts: tuple[int, int]) -> Trace:
        """Another trace: the events of these parts alone, each `(first, one past the last)`. What a part frees and
        none has made is left out; storages that no part makes have no bytes."""
        found, alive, made = self.without_events(), set[int](), set[int]()
        for begin, end in parts:
            for start, stop, phase in self.spans():
                if stop < begin or start > end or (start < stop and (stop == begin or start == end)):
                    continue
                for event in self.events[max(start, begin) : min(stop, end)]:
                    if event > 0:
                        alive.add(event)
                        made.add(event)
                    elif -event in alive:
                        alive.remove(-event)
                    else:
                        continue
                    found.events.append(event)
                found.marks.append((len(found.events), phase))
        found.sizes_bytes = [size if number in made else 0 for number, size in enumerate(self.sizes_bytes, 1)]
        return found

    def spans(self) -> Iterator[tuple[int, int, Phase]]:
        """`(first event, one past the last, phase)` of every stretch, in order. One in which nothing is made or
        freed is there too: what is held then is its peak."""
        return spans(self.marks)

    def phase_at(self, event: int) -> Phase:
        """The phase of an event; the last phase for what came after the last mark."""
        for _, end, phase in self.spans():
            if event < end:
                return phase
        return self.marks[-1][1] if self.marks else "load"

    def peak(self) -> TracePeak:
        """The moment of most live bytes, and what they were."""
        live = most = 0
        where = -1
        for index, event in enumerate(self.events):
            size = rounded(self.sizes_bytes[abs(event) - 1])
            live += size if event > 0 else -size
            if live > most:
                most, where = live, index
        return self.at(where)

    def at(self, event: int) -> TracePeak:
        """What is live right after `event` (an index into `events`)."""
        alive: set[int] = set()
        for number in self.events[: event + 1]:
            alive.add(number) if number > 0 else alive.discard(-number)
        categories: dict[Category, int] = dict.fromkeys(CATEGORIES, 0)
        modules: Counter[tuple[str, Category]] = Counter()
        for number in alive:
            size = rounded(self.sizes_bytes[number - 1])
            category = CATEGORIES[self.category_of[number - 1]]
            categories[category] += size
            modules[_NUMBER.sub(".*", self.modules[self.module_of[number - 1]]), category] += size
        last = self.events[event] if 0 <= event < len(self.events) else 0
        return TracePeak(
            size_bytes=sum(categories.values()),
            phase=self.phase_at(event),
            operation=self.operations[self.operation_of[last - 1]] if last > 0 else "",
            module=self.modules[self.module_of[last - 1]] if last > 0 else "",
            categories=categories,
            modules=modules,
        )

    def peaks_by_phase(self) -> dict[Phase, int]:
        """Most live bytes in each phase that occurred, in the order of `PHASES`."""
        found: dict[Phase, int] = {}
        live = 0
        for start, end, phase in self.spans():
            most = found.get(phase, 0)
            for event in self.events[start:end]:
                size = rounded(self.sizes_bytes[abs(event) - 1])
                live += size if event > 0 else -size
                most = max(most, live)
            found[phase] = max(most, live)
        return {phase: found[phase] for phase in PHASES if phase in found}
