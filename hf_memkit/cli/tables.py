"""The tables that several verbs print, for terminals of 80 columns and more."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from itertools import groupby
from operator import itemgetter
from typing import Any, Final

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from hf_memkit.common.units import format_size
from hf_memkit.setup.ledger import PLACES, Ledger
from hf_memkit.setup.setup import Setting

_WIDE: Final = 120
"""Columns of a terminal from which on a ledger shows its sources."""

_SOURCE_FOLDER = re.compile(r"deepspeed [0-9.]+: \S*/(?=\S+\.py)")
"""What a source starts with, too long for a column; `--json` has all of it."""


def plain_table(*columns: str, title: str | None = None) -> Table:
    """A table without lines; the column "size" is set to the right."""
    table = Table(box=None, title=title, title_justify="left", header_style="bold", pad_edge=False)
    for column in columns:
        size = column == "size"
        table.add_column(column, justify="right" if size else "left", overflow="fold", no_wrap=size)
    return table


def settings_list(settings: Iterable[Setting]) -> Group:
    """Each setting on a line, and its reason below; those in a row that have one reason stand above it together."""
    rows: list[tuple[str, Any, str]] = []
    for each in settings:
        if each.key == "deepspeed.sizes":  # what was computed in the JSON
            sizes = ((size["key"].removeprefix("zero_optimization."), size) for size in each.value)
            rows += [(f"deepspeed: {key}", size["value"], size["reason"]) for key, size in sizes]
        else:
            rows.append((each.key, each.value, each.reason))
    lines: list[RenderableType] = []
    for reason, same in groupby(rows, key=itemgetter(2)):
        lines += [Text(f"{key} = {short_value(value)}") for key, value, _ in same]
        lines.append(Padding(Text(reason, style="dim"), (0, 0, 0, 4)))
    return Group(*lines)


def short_value(value: Any) -> str:
    """A value on one line; a long mapping as the number of its keys (`--json` has all of it)."""
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 60 or not isinstance(value, dict) else f"{{{len(value)} keys, see --json}}"


def ledger_table(ledger: Ledger, width: int) -> Table:
    """Every row, and for each place the sum: what is always held, and the phase that adds most to it. A terminal of
    fewer than 120 columns (`width`) has no room for the sources."""
    sources = width >= _WIDE
    columns = ("place", "category", "term", "size", "held", *(["source"] if sources else []))
    where = "" if sources else "; sources: --json"
    table = plain_table(*columns, title=f"Bytes by formula, one row a term{where}")
    for place in PLACES:
        rows = [row for row in ledger.rows if row.place == place]
        for row in rows:
            source = [escape(_SOURCE_FOLDER.sub("", row.source))] if sources else []
            term, size = escape(row.term), format_size(row.size_bytes)
            table.add_row(place, row.category, term, size, row.phase or "always", *source)
        if rows:
            phase = ledger.peak_phase(place)
            what = f"[bold]always + {phase}[/bold]" if phase else "[bold]sum[/bold]"
            table.add_row(place, "", what, f"[bold]{format_size(ledger.total_bytes(place))}[/bold]")
    return table
