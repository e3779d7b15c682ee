"""A prediction in a few lines of text or HTML, for `--short`, `print(prediction)` and notebooks."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Final

from hf_memkit.units import format_size

if TYPE_CHECKING:
    from hf_memkit.prediction.prediction import Prediction

__all__ = ["as_html", "headline", "lines", "peak", "size_text"]

_SMALLEST_PART: Final = 0.001
"""Share of the peak below which a category is not listed."""


def headline(prediction: Prediction) -> str:
    """`"FITS: needs …"`, or that no GPU is known."""
    if prediction.verdict is None:
        return "NO VERDICT: no GPU is known"
    how = ", estimated by formula" if prediction.confidence.level == "formula" else ""
    return f"{prediction.verdict.upper()}{how}: {prediction.why}"


def peak(prediction: Prediction) -> str:
    """Where the peak is: phase, and operation and module where a trace shows them."""
    where = f"in {prediction.peak_phase}"
    if prediction.peak_operation:
        where += f", at {prediction.peak_operation}"
    if prediction.peak_module:
        where += f" of {prediction.peak_module}"
    return f"Peak allocated on the GPU: {size_text(prediction.peak_allocated_bytes)}, {where}"


def lines(prediction: Prediction) -> list[str]:
    """The peak, its categories, the phases and the confidence, a sentence each without its full stop."""
    phases = ", ".join(f"{name} {size_text(allocated)}" for name, (allocated, _) in prediction.phases.items())
    return [
        peak(prediction),
        f"Made of: {', '.join(f'{name} {size_text(held)}' for name, held in _parts(prediction))}",
        f"By phase: {phases}",
        f"Confidence: {prediction.confidence.level}, {prediction.confidence.measured}",
    ]


def as_html(prediction: Prediction) -> str:
    """The headline and the categories of the peak as a table, for a notebook."""
    rows = "".join(
        f"<tr><td>{name}</td><td style='text-align:right'>{size_text(held)}</td>"
        f"<td style='text-align:right'>{100 * held / prediction.peak_allocated_bytes:.0f} %</td></tr>"
        for name, held in _parts(prediction)
    )
    first, *_, confidence = lines(prediction)
    return (
        f"<p><b>{escape(headline(prediction))}.</b></p>"
        + "".join(f"<p>Warning: {escape(warning)}.</p>" for warning in prediction.warnings)
        + f"<p>{escape(first)}.</p>"
        f"<table>{rows}</table><p>{escape(confidence)}.</p>"
    )


def size_text(size_bytes: int | None) -> str:
    """`"1.53 GiB"`, or that it was not modelled."""
    if size_bytes is None:
        return "not modelled"
    return format_size(size_bytes) if size_bytes else "0"


def _parts(prediction: Prediction) -> list[tuple[str, int]]:
    """Categories of the peak, the largest first."""
    enough = _SMALLEST_PART * prediction.peak_allocated_bytes
    held = sorted(prediction.categories.items(), key=lambda item: -item[1])
    return [(name, size_bytes) for name, size_bytes in held if size_bytes > enough]
