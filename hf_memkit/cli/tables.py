"""The tables that several verbs print."""

from __future__ import annotations

import re

from rich.markup import escape
from rich.table import Table

from hf_memkit.ledger import PLACES, Ledger
from hf_memkit.units import format_size

__all__ = ["ledger_table", "plain_table"]

_SOURCE_FOLDER = re.compile(r"deepspeed [0-9.]+: \S*/(?=\S+\.py)")
"""What a source starts with, too long for a column; `--json` has all of it."""


def plain_table(*columns: str, title: str | None = None) -> Table:
    """A table without lines; the column "size" is set to the right."""
    table = Table(box=None, title=title, title_justify="left", header_style="bold", pad_edge=False)
    for column in columns:
        size = column == "size"
        table.add_column(column, justify="right" if size else "left", overflow="fold", no_wrap=size)
    return table


def ledger_table(ledger: Ledger) -> Table:
    """Every row, and for each place the sum: what is always held, and the phase that adds most to it."""
    columns = ("place", "category", "term", "size", "held", "source")
    table = plain_table(*columns, title="Bytes by formula (computed, not measured)")
    for place in PLACES:
        rows = [row for row in ledger.rows if row.place == place]
        for row in rows:
            table.add_row(
                place, row.category, escape(row.term), format_size(row.size_bytes),
                row.phase or "always", escape(_SOURCE_FOLDER.sub("", row.source)),
            )  # fmt: skip
        if rows:
            phase = ledger.peak_phase(place)
            what = f"[bold]always + {phase}[/bold]" if phase else "[bold]sum[/bold]"
            table.add_row(place, "", what, f"[bold]{format_size(ledger.total_bytes(place))}[/bold]", "", "")
    return table
