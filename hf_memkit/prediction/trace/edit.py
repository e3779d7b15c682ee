"""Another trace, with storages added or left out: what the traced process cannot know of, or knows otherwise."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from hf_memkit.common.terms import CATEGORIES, Category, Phase
from hf_memkit.prediction.trace.trace import Trace


@dataclass(frozen=True, slots=True)
class ExtraAllocation:
    """Memory that is held from the end of loading on, from a later phase on, or in each stretch of some phases.
    `term`: its name, which stands where a traced storage has its operation; `phases`: those in which it is held; none:
    always; `since`: the phase that makes it, after what is held in that phase only, to stay."""

    size_bytes: int
    category: Category
    term: str
    phases: tuple[Phase, ...] = ()
    since: Phase | None = None


def edited(trace: Trace, added: Iterable[ExtraAllocation], keep: Callable[[Category], bool] = lambda _: True) -> Trace:
    """`trace` with the storages of the categories to `keep` only, and with what is `added`: what is always held is
    there when loading ends, or from the start where nothing is loaded."""
    held = [each for each in added if each.size_bytes]
    result = Trace(operations=list(trace.operations), modules=list(trace.modules) or [""])
    kept = [keep(CATEGORIES[number]) for number in trace.category_of]
    numbers: dict[int, int] = {}
    term_ids: dict[str, int] = {}

    def made(*storage: int) -> int:
        result.events.append(result.add(*storage))
        return result.events[-1]

    def make(each: ExtraAllocation) -> int:
        if each.term not in term_ids:
            term_ids[each.term] = len(result.operations)
            result.operations.append(each.term)
        return made(each.size_bytes, CATEGORIES.index(each.category), term_ids[each.term], 0)

    always = [each for each in held if not each.phases and each.since is None]
    later = [each for each in held if each.since is not None]
    for start, end, phase in trace.spans():
        if phase != "load":
            for each in always:
                make(each)
            always = []
        here = [make(each) for each in held if phase in each.phases]
        for each in later:
            if each.since == phase:
                make(each)
        later = [each for each in later if each.since != phase]
        for event in trace.events[start:end]:
            if not kept[abs(event) - 1]:
                continue
            if event > 0:
                which = event - 1
                numbers[event] = made(
                    trace.sizes_bytes[which], trace.category_of[which], trace.operation_of[which],
                    trace.module_of[which],
                )  # fmt: skip
            elif -event in numbers:
                result.events.append(-numbers[-event])
        result.events.extend(-number for number in here)
        if phase == "load":
            for each in always:
                make(each)
            always = []
        result.marks.append((len(result.events), phase))
    return result
