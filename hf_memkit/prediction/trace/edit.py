"""Adds storages to a trace or removes them, for memory that the traced process cannot know."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from hf_memkit.common.terms import CATEGORIES, Category, Phase
from hf_memkit.prediction.trace.trace import Trace


@dataclass(frozen=True, slots=True)
class ExtraAllocation:
    """Memory to add to a trace."""

    size_bytes: int
    category: Category
    term: str  # name, in place of a storage's operation
    phases: tuple[Phase, ...] = ()  # phases in whose spans it is held; empty: always, from the end of loading on
    since: Phase | None = None  # phase from which on it is held, after memory that is held during that phase only


def edited(trace: Trace, added: Iterable[ExtraAllocation], keep: Callable[[Category], bool] = lambda _: True) -> Trace:
    """A copy of `trace` with only the categories to `keep`, and with `added`. What is always held is added when
    loading ends, or at the start if nothing is loaded."""
    extras = [extra for extra in added if extra.size_bytes]
    result = Trace(operations=list(trace.operations), modules=list(trace.modules) or [""])
    kept = [keep(CATEGORIES[number]) for number in trace.category_of]
    numbers: dict[int, int] = {}
    term_ids: dict[str, int] = {}

    def copy_storage(*storage: int) -> int:
        result.events.append(result.add(*storage))
        return result.events[-1]

    def allocate(extra: ExtraAllocation) -> int:
        if extra.term not in term_ids:
            term_ids[extra.term] = len(result.operations)
            result.operations.append(extra.term)
        return copy_storage(extra.size_bytes, CATEGORIES.index(extra.category), term_ids[extra.term], 0)

    always = [extra for extra in extras if not extra.phases and extra.since is None]
    later = [extra for extra in extras if extra.since is not None]
    for start, end, phase in trace.spans():
        if phase != "load":
            for extra in always:
                allocate(extra)
            always = []
        in_span = [allocate(extra) for extra in extras if phase in extra.phases]
        for extra in later:
            if extra.since == phase:
                allocate(extra)
        later = [extra for extra in later if extra.since != phase]
        for event in trace.events[start:end]:
            if not kept[abs(event) - 1]:
                continue
            if event > 0:
                index = event - 1
                numbers[event] = copy_storage(
                    trace.sizes_bytes[index], trace.category_of[index], trace.operation_of[index],
                    trace.module_of[index], trace.stream(event),
                )  # fmt: skip
            elif -event in numbers:
                result.events.append(-numbers[-event])
        result.events.extend(-number for number in in_span)
        if phase == "load":
            for extra in always:
                allocate(extra)
            always = []
        result.marks.append((len(result.events), phase))
    return result
