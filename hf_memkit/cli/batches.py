"""What the worst batch of real data needs beside a usual one, as scripts and recipes show it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from hf_memkit.common.units import GIB, format_gib

if TYPE_CHECKING:
    from hf_memkit.prediction.from_script import BatchNeeds
    from hf_memkit.prediction.prediction import Prediction


def of_batches(prediction: Prediction, batches: BatchNeeds | None) -> Iterator[str]:
    """What the worst batch needs beside a usual one, and what would make it smaller."""
    if batches is None:
        return
    yield f"{batches.sentence(prediction)}."
    if prediction.verdict == "does not fit":
        for change, needs in batches.smaller.items():
            yield f"With {change} the worst needs {format_gib(needs.total_bytes[1])}: {needs.verdict}."
        if batches.shapes.grouping:
            yield "Grouping by length would not help: the longest rows would still meet in one batch."


def batches_json(batches: BatchNeeds | None) -> dict[str, Any] | None:
    if batches is None:
        return None

    def needs(prediction: Prediction) -> dict[str, Any]:
        return {"total_gib": prediction.total_bytes[1] / GIB, "verdict": prediction.verdict}

    return {
        "worst": batches.shapes.worst,
        "usual": {"batch": batches.shapes.typical, **needs(batches.typical)},
        "high": batches.shapes.high,
        "smaller": {change: needs(prediction) for change, prediction in batches.smaller.items()},
    }
