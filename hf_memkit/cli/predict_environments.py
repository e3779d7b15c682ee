"""What `memkit predict SCRIPT --compare-with OTHER` prints: what the job needs here and there, and what differs."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from rich.console import Console, Group
from rich.text import Text

from hf_memkit.catalog.environments import Environment, find_environment
from hf_memkit.cli.predict_render import answer, basis, warnings
from hf_memkit.cli.tables import plain_table
from hf_memkit.common.units import format_gib, format_size
from hf_memkit.prediction.comparison import compare, compare_versions

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from hf_memkit.prediction.comparison import Comparison
    from hf_memkit.prediction.prediction import Prediction


_ROWS: Final = {False: 12, True: 3}
"""Of a table, without and with `--short`; `--json` has all."""

_FIRST: Final = ("torch", "transformers", "accelerate", "trl", "peft", "bitsandbytes", "liger-kernel", "deepspeed")
"""Libraries that decide most; they stand first."""


def as_json(here: Prediction, there: Prediction | None, other: Environment) -> dict[str, Any]:
    """What stands beside the prediction; `there`: with the libraries of `other`, None if it could not be made."""
    libraries = {name: {"here": pair[0], "there": pair[1]} for name, pair in _versions(other).items()}
    differences = compare(here, there).to_json() if there is not None else {}
    return {
        "compared_with": {
            "python": other.python,
            "prediction": there.to_json() if there is not None else None,
            "differences": {"libraries": libraries, **differences},
        }
    }


def show(here: Prediction, there: Prediction, other: Environment, title: str, *, short: bool) -> None:
    """Prints both totals and verdicts, versions that differ, then categories, phases and modules that differ."""
    Console(highlight=False).print(_page(here, there, other, title, short=short), crop=False)


def _page(here: Prediction, there: Prediction, other: Environment, title: str, *, short: bool) -> Group:
    rows, found = _ROWS[short], compare(here, there)
    lines: list[RenderableType] = [Text(_totals(found, other.python), style="bold")]
    for place, each in (("Here", here), ("There", there)):
        verdict, *_ = answer(each, short=short)
        lines.append(Text.assemble(f"{place} ", verdict))
    lines += warnings(here.warnings, short=short)
    lines += [Text(""), Text(title), Text(""), *_libraries(_versions(other), rows)]
    if not (found.phases or found.categories or found.modules):
        lines.append(Text("No difference: phases, categories and modules need the same there and here."))
    else:
        lines.append(Text(_peaks(here, there)))
        modules = {f"{module or 'outside modules'}: {kind}": pair for (module, kind), pair in found.modules.items()}
        for what, pairs in (("category", found.categories), ("phase", found.phases), ("module", modules)):
            if pairs:
                lines += [Text(""), _differences(what, pairs, rows)]
    if short:
        return Group(*lines, Text("Omit --short to see more; --json prints everything."))
    return Group(*lines, Text(""), *basis(here))


def _totals(found: Comparison, python: str) -> str:
    here, there = found.total_bytes
    more = f"{format_size(abs(there - here))} {'more' if there > here else 'less'} there" if there != here else "equal"
    return f"Needs {format_gib(here)} here and {format_gib(there)} with {python}: {more}."


def _peaks(here: Prediction, there: Prediction) -> str:
    def place(each: Prediction) -> str:
        module = f" of {each.peak_module}" if each.peak_module else ""
        return f"in {each.peak_phase}, at {each.peak_operation}{module}"

    if place(here) == place(there):
        return f"Both peaks are {place(here)}."
    return f"The peak here is {place(here)}; there {place(there)}."


def _versions(other: Environment) -> Mapping[str, tuple[str | None, str | None]]:
    return compare_versions(find_environment(sys.executable).libraries, other.libraries)


def _libraries(versions: Mapping[str, tuple[str | None, str | None]], rows: int) -> list[RenderableType]:
    if not versions:
        return [Text("All libraries have the same versions."), Text("")]
    names = [*(name for name in _FIRST if name in versions), *(name for name in versions if name not in _FIRST)]
    table = plain_table("library", "here", "there")
    table.padding = (0, 2, 0, 0)
    for name in names[:rows]:
        here, there = versions[name]
        table.add_row(name, here or "none", there or "none")
    return [table, *_more(len(names) - rows), Text("")]


def _differences(what: str, pairs: Mapping[Any, tuple[int, int]], rows: int) -> Table:
    table = plain_table(what, "here", "there", "difference")
    table.padding = (0, 2, 0, 0)
    for column in table.columns[1:]:
        column.justify = "right"
        column.no_wrap = True
    for name, (here, there) in list(pairs.items())[:rows]:
        sign = "+" if there > here else "-"
        sizes = [format_size(size) if size else "0" for size in (here, there)]
        table.add_row(Text(str(name)), *sizes, sign + format_size(abs(there - here)))
    for left in _more(len(pairs) - rows):
        table.add_row(left)
    return table


def _more(count: int) -> list[Text]:
    return [Text(f"and {count} more", "dim")] if count > 0 else []
