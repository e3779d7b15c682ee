"""The table by module. In: rows of a `modules` record. Out: rows of text, the same for terminal and page."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from hf_memkit.report.sanitize import number, text, whole
from hf_memkit.units import GIB, format_size

__all__ = ["ModuleRow", "places", "shown_rows"]


@dataclass(frozen=True, slots=True)
class ModuleRow:
    """One module, or equal ones together, which the name says (`h.0…47`). `places`: GiB by place."""

    name: str
    kind: str
    parameters: str
    trained: str
    size: str
    places: dict[str, float]


def shown_rows(rows: Iterable[Mapping[str, Any]]) -> list[ModuleRow]:
    """The rows, and the sum of all below them. A record has the figures of one of `repeats` equal modules, a row here
    those of all of them, so that the rows add up."""
    found = []
    totals = [0, 0, 0.0]
    for row in rows:
        repeats = max(1, whole(row, "repeats") or 1)
        parameters = repeats * (whole(row, "parameters") or 0)
        trained = repeats * (whole(row, "trainable_parameters") or 0)
        size = repeats * (number(row, "bytes") or 0.0)
        by_place = row.get("places", {})
        held = {text(place, 20): repeats * (number(by_place, place) or 0.0) / GIB for place in by_place}
        for i, value in enumerate((parameters, trained, size)):
            totals[i] += value
        found.append(
            ModuleRow(
                name=text(row.get("name") or "(the model itself)", 120),
                kind=text(row.get("class", ""), 60),
                parameters=f"{parameters:,}",
                trained=_trained(parameters, trained),
                size=format_size(size),
                places=held,
            )
        )
    if found:
        parameters, trained = int(totals[0]), int(totals[1])
        total = ModuleRow("all", "", f"{parameters:,}", _trained(parameters, trained), format_size(totals[2]), {})
        found.append(total)
    return found


def places(row: ModuleRow) -> str:
    """`device`, or where it is spread `device 0.100, host 0.200`."""
    if len(row.places) < 2:
        return ", ".join(row.places)
    return ", ".join(f"{place} {format_size(gib * GIB)}" for place, gib in row.places.items())


def _trained(parameters: int, trained: int) -> str:
    return "all" if trained == parameters and parameters else f"{trained:,}" if trained else "no" if parameters else ""
