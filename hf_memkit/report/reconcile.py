"""Predicted beside measured, term by term, and the term that is furthest off.

In: the `prediction` of a `run` record (docs/design.md, "A prediction"), and what the run's records say. Records may be
of any origin: what is no number is left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from hf_memkit.report.sanitize import number
from hf_memkit.terms import CATEGORIES, PHASES

__all__ = ["ACCEPTED_SHARE", "Compared", "compared", "furthest_off"]

Compared = tuple[str, str, float | None]
"""(what, predicted GiB or a range `low–high`, measured GiB or None)."""

ACCEPTED_SHARE: Final = 0.02
"""Of the predicted peak: a category that is no further off than this is taken for right."""


def compared(
    prediction: Mapping[str, Any],
    peak_gib: float | None,
    reserved_gib: float | None,
    phases: Mapping[str, float],
    categories: Mapping[str, float],
) -> Iterator[Compared]:
    """A row for everything that was predicted: the peaks, then phases, then categories.

    Args:
        prediction: by its JSON names; empty if there is none.
        peak_gib, reserved_gib: measured highest; None: not measured.
        phases, categories: measured GiB by name.
    """
    rows: list[tuple[str, Any, float | None]] = [
        ("peak allocated", prediction.get("peak_allocated_gib"), peak_gib),
        ("peak reserved", prediction.get("peak_reserved_gib"), reserved_gib),
    ]
    of_phases, of_categories = _mapping(prediction.get("phases")), _mapping(prediction.get("categories"))
    for phase in PHASES:
        value = of_phases.get(phase)
        rows.append((phase, value.get("peak_allocated_gib") if isinstance(value, dict) else value, phases.get(phase)))
    rows += [(category, of_categories.get(f"{category}_gib"), categories.get(category)) for category in CATEGORIES]
    for what, predicted, measured in rows:
        ends = predicted if isinstance(predicted, list) else [predicted]
        values = [v for end in ends if (v := number({"v": end}, "v")) is not None]
        if values:
            yield what, "–".join(f"{value:.2f}" for value in values[:2]), measured


def furthest_off(rows: Sequence[Compared]) -> str | None:
    """A sentence that names the category furthest off; None where no category was both predicted and measured."""
    peak = next((float(predicted) for what, predicted, _ in rows if what == "peak allocated"), 0.0)
    both = [
        (what, float(predicted), measured)
        for what, predicted, measured in rows
        if what in CATEGORIES and measured is not None and "–" not in predicted
    ]
    if not both or peak <= 0:
        return None
    what, predicted, measured = max(both, key=lambda row: abs(row[2] - row[1]))
    off = measured - predicted
    if abs(off) <= ACCEPTED_SHARE * peak:
        return f"Every category is within {100 * ACCEPTED_SHARE:.0f} % of the predicted peak."
    return f"Furthest off: {what}, predicted {predicted:.2f} GiB, measured {measured:.2f} GiB ({off:+.2f} GiB)."


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
