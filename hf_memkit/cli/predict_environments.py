"""The answer of `memkit predict SCRIPT --compare-with OTHER`: memory in both environments, and what differs."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

from hf_memkit.catalog.environments import Environment, find_environment
from hf_memkit.cli.predict_answer import details, opening
from hf_memkit.common.answer.answer import Answer, AnswerBlock, Lines, Table, View
from hf_memkit.common.units import format_gib, format_size
from hf_memkit.prediction.comparison import compare, compare_versions

if TYPE_CHECKING:
    from hf_memkit.prediction.comparison import Comparison
    from hf_memkit.prediction.prediction import Prediction


_ROWS: Final = 12
_SHORT_ROWS: Final = 3
"""Rows of a table; `--json` has all."""

_FIRST: Final = ("torch", "transformers", "accelerate", "trl", "peft", "bitsandbytes", "liger-kernel", "deepspeed")
"""Libraries with most influence on memory; they come first."""


def as_json(here: Prediction, there: Prediction | None, other: Environment) -> dict[str, Any]:
    """The keys of the comparison. `there`: the prediction with the libraries of `other`; None if it failed."""
    libraries = {name: {"here": pair[0], "there": pair[1]} for name, pair in _versions(other).items()}
    differences = compare(here, there).to_json() if there is not None else {}
    return {
        "compared_with": {
            "python": other.python,
            "prediction": there.to_json() if there is not None else None,
            "differences": {"libraries": libraries, **differences},
        }
    }


def comparison_answer(here: Prediction, there: Prediction, other: Environment, title: str) -> Answer:
    """Both totals and verdicts, versions that differ, then categories, phases and modules that differ."""
    comparison = compare(here, there)
    total_here, total_there = comparison.total_bytes
    more = f"{format_size(abs(total_there - total_here))} {'more' if total_there > total_here else 'less'} there"
    verdict = f"Needs {format_gib(total_here)} here and {format_gib(total_there)} with {other.python}"
    return Answer(
        title=f"Comparison: {title.partition(';')[0]}",
        verdict=f"{verdict}: {more if total_there != total_here else 'equal'}.",
        blocks=tuple(_blocks(here, there, other, comparison, title)),
    )


def _blocks(
    here: Prediction, there: Prediction, other: Environment, comparison: Comparison, title: str
) -> Iterator[AnswerBlock]:
    verdicts = [f"{place} {opening(each, '', ()).headline}" for place, each in (("Here", here), ("There", there))]
    yield Lines(verdicts, short_limit=232)
    yield Lines([f"Warning: {each}." for each in here.warnings], "warning")
    yield Lines([title])

    versions = _versions(other)
    names = [*(name for name in _FIRST if name in versions), *(name for name in versions if name not in _FIRST)]
    if not versions:
        yield Lines(["All libraries have the same versions."])
    else:
        libraries = [(name, *(each or "none" for each in versions[name])) for name in names]
        yield Table(("library", "here", "there"), libraries, rows_shown=_ROWS, short_rows=_SHORT_ROWS)

    modules = {f"{module or 'outside modules'}: {kind}": pair for (module, kind), pair in comparison.modules.items()}
    if not (comparison.phases or comparison.categories or modules):
        yield Lines(["All phases, categories and modules need the same memory in both environments."])
    else:
        yield Lines([_peaks(here, there)])
    tables: list[tuple[str, Mapping[Any, tuple[int, int]]]] = [
        ("category", comparison.categories),
        ("phase", comparison.phases),
        ("module", modules),
    ]
    for what, pairs in tables:
        rows = []
        for name, (size_here, size_there) in pairs.items():
            sizes = [format_size(size) if size else "0" for size in (size_here, size_there)]
            sign = "+" if size_there > size_here else "-"
            rows.append((str(name), *sizes, sign + format_size(abs(size_there - size_here))))
        columns = (what, ">here", ">there", ">difference")
        yield Table(columns, rows, rows_shown=_ROWS, short_rows=_SHORT_ROWS)
    yield Lines(["Omit --short to see more; --json prints everything."], views=View.SHORT)
    yield next(each for each in details(here) if each.name == "basis")


def _peaks(here: Prediction, there: Prediction) -> str:
    def place(each: Prediction) -> str:
        module = f" of {each.peak_module}" if each.peak_module else ""
        return f"in {each.peak_phase}, at {each.peak_operation}{module}"

    if place(here) == place(there):
        return f"Both peaks are {place(here)}."
    return f"The peak here is {place(here)}; there {place(there)}."


def _versions(other: Environment) -> Mapping[str, tuple[str | None, str | None]]:
    return compare_versions(find_environment(sys.executable).libraries, other.libraries)
