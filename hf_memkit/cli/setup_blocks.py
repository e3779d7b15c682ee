"""Blocks for a setup's settings and ledger, which several verbs show."""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import groupby
from operator import itemgetter
from typing import Any

from hf_memkit.common.answer.answer import Cell, Changes, Item, Table
from hf_memkit.common.units import format_size
from hf_memkit.setup.ledger import PLACES, Ledger
from hf_memkit.setup.setup import Setting


def settings_block(settings: Iterable[Setting]) -> Changes:
    """Each setting with its reason below; neighbours with the same reason are shown together."""
    rows: list[tuple[str, Any, str]] = []
    for each in settings:
        if each.key == "deepspeed.sizes":  # the computed values of the JSON
            sizes = ((size["key"].removeprefix("zero_optimization."), size) for size in each.value)
            rows += [(f"deepspeed: {key}", size["value"], size["reason"]) for key, size in sizes]
        else:
            rows.append((each.key, each.value, each.reason))
    items = []
    for reason, same in groupby(rows, key=itemgetter(2)):
        *others, last = (f"{key} = {short_value(value)}" for key, value, _ in same)
        items += [*(Item("", setting) for setting in others), Item(reason, last)]
    return Changes(items, heading="Settings")


def short_value(value: Any) -> str:
    """A value on one line; a long mapping as the number of its keys (`--json` has all of it)."""
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 60 or not isinstance(value, dict) else f"{{{len(value)} keys, see --json}}"


def ledger_block(ledger: Ledger) -> Table:
    """All rows, and for each place the sum of what is always held and of the phase that adds most."""
    rows: list[tuple[str | Cell, ...]] = []
    for place in PLACES:
        of_place = [row for row in ledger.rows if row.place == place]
        rows += [
            (place, row.category, row.term, format_size(row.size_bytes), row.phase or "always") for row in of_place
        ]
        if of_place:
            phase = ledger.peak_phase(place)
            total = Cell(format_size(ledger.total_bytes(place)), strong=True)
            rows.append((place, "", Cell(f"always + {phase}" if phase else "sum", strong=True), total, ""))
    caption = "Bytes by formula, one row a term; sources: --json"
    return Table(("place", "category", "term", ">size", "held"), rows, caption)
