"""Storages that one training process made and freed on its device, in order.

The allocator's replay and live bytes by category, operation and module are computed from a trace. It is plain data,
lists of numbers and tables of names, sent between processes as JSON (`wire.py`). Storages are numbered from 1 in the
order of their allocation.
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

ABSENT_GRADIENT: Final = "(zeros for an absent gradient)"
"""Ends the operation of zeros that compiled code gets as the gradient of an output that the loss does not use."""

ZEROS: Final = "zeros for the gradient of unused outputs"
_KINDS: Final[Mapping[str, str]] = {
    "forward": "activations and loss saved for backward",
    "backward": "recomputed activations and gradients of activations",
}
"""Activations and loss that a phase has made, in words."""

_LAYER_NUMBER: Final = re.compile(r"\.\d+(?=\.|$)")


def rounded(size_bytes: int) -> int:
    """Bytes that an allocation occupies in the caching allocator with its default rounding; 0 for an empty one."""
    return -(-size_bytes // ROUND_BYTES) * ROUND_BYTES


@dataclass(frozen=True, slots=True)
class TracePeak:
    """The moment with the most live bytes, each storage rounded to 512 bytes.

    Attributes:
        operation, module: origin of that event's storage, such as `aten._log_softmax.default`, and the module whose
            forward or backward was running; empty outside.
        categories, modules: live bytes by category, and by (module, category) of their origin; layers of one kind
            count as one module (`model.layers.*.mlp`).
        activations: live bytes of activations and loss that forward and backward have made, by kind (in words).
    """

    size_bytes: int
    phase: Phase
    operation: str
    module: str
    categories: dict[Category, int]
    modules: Mapping[tuple[str, Category], int]
    activations: Counter[str]


@dataclass(slots=True)
class Trace:
    """Allocations and frees in order.

    Attributes:
        stream_of: the CUDA stream that storage n was allocated on at `[n - 1]`, 0 for the default one; empty if all
            are on the default one.
        category_of, operation_of, module_of: of storage n at `[n - 1]`; indexes into `CATEGORIES`, `operations`,
            `modules`.
        marks: `(event index, phase)`: the events from the previous mark up to this index belong to `phase`.
    """

    events: list[int] = field(default_factory=list)  # `n`: storage n is allocated; `-n`: it is freed
    sizes_bytes: list[int] = field(default_factory=list)  # requested size of storage n at `[n - 1]`
    category_of: list[int] = field(default_factory=list)
    operation_of: list[int] = field(default_factory=list)
    module_of: list[int] = field(default_factory=list)
    operations: list[str] = field(default_factory=list)  # names
    modules: list[str] = field(default_factory=list)  # names
    marks: list[tuple[int, Phase]] = field(default_factory=list)
    stream_of: list[int] = field(default_factory=list)
    work: Work | None = None  # computed operations; None if not recorded. Parts and copies of a trace have none.

    def add(self, size_bytes: int, category: int, operation: int = 0, module: int = 0, stream: int = 0) -> int:
        """Adds a storage and returns its number; the caller adds its allocation to `events`."""
        if stream and not self.stream_of:
            self.stream_of = [0] * len(self.sizes_bytes)
        if self.stream_of or stream:
            self.stream_of.append(stream)
        self.sizes_bytes.append(size_bytes)
        self.category_of.append(category)
        self.operation_of.append(operation)
        self.module_of.append(module)
        return len(self.sizes_bytes)

    def stream(self, number: int) -> int:
        """The CUDA stream that storage `number` was allocated on."""
        return self.stream_of[number - 1] if self.stream_of else 0

    def without_events(self) -> Trace:
        """A copy with the same storages and no events."""
        names = ("sizes_bytes", "category_of", "operation_of", "module_of", "operations", "modules", "stream_of")
        fields: dict[str, Any] = {name: list(getattr(self, name)) for name in names}
        return Trace(**fields)

    def only(self, *parts: tuple[int, int]) -> Trace:
        """A copy with the events of these parts only, each `(first, one past the last)`. Frees of storages that no
        part allocates are removed, and those storages get size 0."""
        result, alive, made = self.without_events(), set[int](), set[int]()
        for begin, end in parts:
            for start, stop, phase in self.spans():
                if stop < begin or start > end or (start < stop and (stop == begin or start == end)):
                    continue
                for event in self.events[max(start, begin) : min(stop, end)]:
                    if event > 0 or -event in alive:
                        result.events.append(event)
                        if event > 0:
                            alive.add(event)
                            made.add(event)
                        else:
                            alive.remove(-event)
                result.marks.append((len(result.events), phase))
        result.sizes_bytes = [size if number in made else 0 for number, size in enumerate(self.sizes_bytes, 1)]
        return result

    def spans(self) -> Iterator[tuple[int, int, Phase]]:
        """`(first event, one past the last, phase)` of spans in order, also empty ones: their peak is held memory."""
        return spans(self.marks)

    def phase_at(self, event: int) -> Phase:
        """The phase of an event; the last phase for what came after the last mark."""
        for _, end, phase in self.spans():
            if event < end:
                return phase
        return self.marks[-1][1] if self.marks else "load"

    def peak(self) -> TracePeak:
        """The moment with the most live bytes."""
        live = maximum = 0
        peak_at = -1
        for index, event in enumerate(self.events):
            size = rounded(self.sizes_bytes[abs(event) - 1])
            live += size if event > 0 else -size
            if live > maximum:
                maximum, peak_at = live, index
        return self.at(peak_at)

    def at(self, event: int) -> TracePeak:
        """The live bytes right after `event` (an index into `events`)."""
        alive: set[int] = set()
        for number in self.events[: event + 1]:
            alive.add(number) if number > 0 else alive.discard(-number)
        categories: dict[Category, int] = dict.fromkeys(CATEGORIES, 0)
        modules: Counter[tuple[str, Category]] = Counter()
        for number in alive:
            size = rounded(self.sizes_bytes[number - 1])
            category = CATEGORIES[self.category_of[number - 1]]
            categories[category] += size
            modules[_LAYER_NUMBER.sub(".*", self.modules[self.module_of[number - 1]]), category] += size
        last = self.events[event] if 0 <= event < len(self.events) else 0
        return TracePeak(
            size_bytes=sum(categories.values()),
            phase=self.phase_at(event),
            operation=self.operations[self.operation_of[last - 1]] if last > 0 else "",
            module=self.modules[self.module_of[last - 1]] if last > 0 else "",
            categories=categories,
            modules=modules,
            activations=self._activations(event, alive),
        )

    def _activations(self, event: int, alive: set[int]) -> Counter[str]:
        """`TracePeak.activations` of the storages that are `alive` after `event`."""
        sizes: Counter[str] = Counter()
        for start, end, phase in self.spans():
            for number in alive.intersection(self.events[start : min(end, event + 1)]):
                if phase in _KINDS and CATEGORIES[self.category_of[number - 1]] in ("activations", "loss"):
                    zeros = self.operations[self.operation_of[number - 1]].endswith(ABSENT_GRADIENT)
                    sizes[ZEROS if zeros else _KINDS[phase]] += rounded(self.sizes_bytes[number - 1])
        return sizes

    def peaks_by_phase(self) -> dict[Phase, int]:
        """Maximum of live bytes in each phase that occurred, in the order of `PHASES`."""
        peaks: dict[Phase, int] = {}
        live = 0
        for start, end, phase in self.spans():
            maximum = peaks.get(phase, 0)
            for event in self.events[start:end]:
                size = rounded(self.sizes_bytes[abs(event) - 1])
                live += size if event > 0 else -size
                maximum = max(maximum, live)
            peaks[phase] = max(maximum, live)
        return {phase: peaks[phase] for phase in PHASES if phase in peaks}
