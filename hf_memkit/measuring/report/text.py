"""A run in one screen of text, and the same as plain data. In: `Run`. Out: lines, a Rich renderable (text from the
records as `Text`, never as markup), or a dict."""

from __future__ import annotations

import io
import shlex
from collections.abc import Mapping
from typing import Any, Final

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from hf_memkit.common.units import GIB, format_size
from hf_memkit.measuring.report import wording
from hf_memkit.measuring.report.advice import Advice, advise, finding_sentence
from hf_memkit.measuring.report.load import Run
from hf_memkit.measuring.report.palette import CATEGORY_COLOURS, PHASE_COLOURS
from hf_memkit.measuring.report.sanitize import text
from hf_memkit.measuring.report.summary import Summary, furthest_off, summarise, summarise_ranks
from hf_memkit.measuring.report.target import Target, rests_on, target_of

PAGE: Final = "memory-report.html"
"""Name of the page in the run's folder, unless another is asked for."""

_BAR: Final = 14
"""Characters of the longest bar; two columns of bars fit side by side in 80."""
_ABREAST: Final = 76
_RANKS_SHOWN: Final = 8


def text_report(run: Run, width: int = 80, *, modules: bool = False) -> str:
    """The run as plain text without colour; only the line that names the page may be longer than `width`."""
    out = io.StringIO()
    console = Console(file=out, width=width, color_system=None, force_terminal=False, legacy_windows=False)
    console.print(view(run, width, modules=modules), crop=False)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def report_json(run: Run) -> dict[str, Any]:
    """The run as plain data: names and units are those of the records."""
    summary = summarise(run)
    ranks = [
        {
            **one.to_json(),
            "ending": rank.ending.to_json(),
            "file": str(rank.path),
            "ooms": list(rank.ooms),
            "earlier": [ending.to_json() for _, ending in rank.earlier],
        }
        for rank, one in zip(run.ranks, summarise_ranks(run), strict=True)
    ]
    return {
        "folder": str(run.folder),
        "ending": {"rank": run.ended_by, **run.ending.to_json()},
        "verdict": wording.verdict(run, summary),
        "run": run.first.run,
        "summary": summary.to_json(),
        **advise(run, summary).to_json(),
        "ranks": ranks,
        "modules": list(run.first.modules),
        "notes": list(run.notes),
    }


def view(run: Run, width: int, *, modules: bool = False) -> Group:
    """The run for a Rich console of `width` characters."""
    summary = summarise(run)
    advice = advise(run, summary)
    parts: list[RenderableType] = [
        Text(
            wording.verdict(run, summary), style="bold green" if wording.state(run, summary) == "good" else "bold red"
        ),
        Text(wording.title(run, summary)),
        Text(wording.course(run, summary)),
    ]
    parts += [Text(line) for line in (wording.reserved(summary), wording.unknowable(run, summary)) if line]
    target = target_of(run)
    if target is not None:
        parts.append(Text(rests_on(target)))
    parts += [Text(""), *_bars(summary, target, width)]
    if len(run.ranks) > 1:
        parts += [_ranks(run), Text("")]
    if line := wording.host(summary):
        parts.append(Text(line))
    parts += [Text(line) for line in _predicted(summary)]
    parts += _next(run, summary, advice)
    parts += [Text(f"Note: {text(note, 300)}", style="dim") for note in run.notes]
    page = run.folder / PAGE
    folder = shlex.quote(text(run.folder))
    where = f"Page: {text(page)}" if page.is_file() else f"As a page: memkit report {folder} --html {folder}"
    parts.append(Text(where, no_wrap=True, overflow="ignore"))  # whole, to be copied
    if modules:
        parts += [Text(""), _modules(run)]
    return Group(*parts)


def _bars(summary: Summary, target: Target | None, width: int) -> list[RenderableType]:
    tables = []
    if target is not None and summary.peak is None:
        tables.append(_bar_table("Target by category, predicted", target.categories, CATEGORY_COLOURS))
        tables.append(_bar_table("Target by phase, predicted", target.phases, PHASE_COLOURS))
    elif summary.categories:
        at = f" of step {summary.categories_step}" if summary.categories_step is not None else ""
        tables.append(_bar_table(f"By category, peak{at}", summary.categories, CATEGORY_COLOURS))
    elif summary.held:
        tables.append(_bar_table("Held between steps", _by_place(summary.held), CATEGORY_COLOURS))
    if summary.phases:
        tables.append(_bar_table("By phase, highest", summary.phases, PHASE_COLOURS))
    if not tables:
        return []
    if len(tables) == 1 or width < _ABREAST:
        return [part for table in tables for part in (table, Text(""))]
    abreast = Table.grid(padding=(0, 4, 0, 0))
    abreast.add_row(*tables)
    held = _held_elsewhere(summary) if target is None else None
    return [abreast, Text(""), *([Text(held)] if held else [])]


def _bar_table(heading: str, values: Mapping[str, float], colours: Mapping[Any, str]) -> Table:
    table = Table(box=None, show_header=False, padding=(0, 1, 0, 0), pad_edge=False, title=Text(heading))
    table.title_justify, table.title_style = "left", "bold"
    table.add_column()
    table.add_column(justify="right")
    table.add_column(no_wrap=True)
    highest = max(values.values(), default=0.0)
    for name, value in values.items():
        length = round(_BAR * value / highest) if highest > 0 else 0
        colour = colours.get(name.split(",")[0], "white")
        # A sliver is shown for what is there, however small.
        bar = "█" * length if length else "▏" if value > 0 else ""
        table.add_row(name, format_size(value * GIB), Text(bar, style=colour))
    return table


def _by_place(held: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    return {
        f"{category}, {place}" if len(held) > 1 else category: value
        for place, categories in held.items()
        for category, value in categories.items()
        if value > 0
    }


def _held_elsewhere(summary: Summary) -> str | None:
    """What an offload holds in RAM or on disk, which the GPU's peak does not show."""
    away = {place: sum(found.values()) for place, found in summary.held.items() if place != "device"}
    if not any(away.values()):
        return None
    sizes = ", ".join(f"{place} {format_size(gib * GIB)}" for place, gib in away.items())
    return f"Held between steps outside the GPU: {sizes}."


def _table() -> Table:
    return Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")


def _ranks(run: Run) -> Table:
    table = _table()
    for name in ("rank", "peak GiB", "reserved GiB", "host GiB", "ended"):
        table.add_column(name, justify="left" if name == "ended" else "right", no_wrap=True)
    summaries = summarise_ranks(run)
    pairs = sorted(zip(run.ranks, summaries, strict=True), key=lambda pair: -(pair[1].peak.gib if pair[1].peak else 0))
    for rank, one in pairs[:_RANKS_SHOWN]:
        table.add_row(str(rank.rank), *wording.highest(one), rank.ending.kind)
    if len(pairs) > _RANKS_SHOWN:
        table.add_row("…", "", "", "", f"{len(pairs) - _RANKS_SHOWN} more with lower peaks: --json lists them")
    return table


def _predicted(summary: Summary) -> list[str]:
    named = {what: (predicted, measured) for what, predicted, measured in summary.predicted}
    lines = []
    for what in ("peak allocated", "peak reserved"):
        predicted, measured = named.get(what, (None, None))
        if predicted is not None:
            shown = f"measured {measured:.2f}" if measured is not None else "not measured"
            lines.append(f"{what.capitalize()}: predicted {predicted} GiB, {shown}.")
    off = furthest_off(summary.predicted)
    return [*lines, off] if off else lines


def _next(run: Run, summary: Summary, advice: Advice) -> list[RenderableType]:
    lines = [finding_sentence(run, rank, finding) for rank, finding in advice.findings]
    lines += [change.sentence() for change in advice.changes]
    if not lines:
        return [Text(wording.nothing_to_do(run, summary))]
    return [Text("What to do:", style="bold"), *(Text(f"• {line}") for line in lines)]


def _modules(run: Run) -> RenderableType:
    rows = wording.module_rows(run)
    if not rows:
        return Text("No table by module recorded.")
    table = _table()
    for name in wording.MODULE_COLUMNS:
        table.add_column(
            name, justify="right" if name in ("parameters", "trained", "size") else "left", overflow="fold"
        )
    for name, kind, *others in rows:
        table.add_row(Text(name), Text(kind), *others)
    return table
