"""Predicted beside measured: how far a prediction was off, and what all cases of an evidence file come to."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


def errors(
    prediction: Mapping[str, Any], found: Mapping[str, Any], step_s: Sequence[float] | None = None
) -> dict[str, float]:
    """Predicted over measured, less one: `peak_allocated`; `peak_reserved`, which is nought between both ends of the
    predicted range, otherwise from the nearer one; `total`, of the higher end with what lies outside the allocator;
    `allocated_PHASE`; and `step_time`, of the middle of `step_s`. What was not measured is absent."""
    result: dict[str, float] = {}
    if step_s is not None and (measured := found.get("step_time_ms")):
        result["step_time"] = 1000 * step_s[1] / measured - 1
    if measured := found.get("peak_allocated_gib"):
        result["peak_allocated"] = prediction["peak_allocated_gib"] / measured - 1
    low, high = prediction["peak_reserved_gib"]
    if measured := found.get("peak_reserved_gib"):
        result["peak_reserved"] = min(max(measured, low), high) / measured - 1
    if measured := found.get("device_used_gib"):
        result["total"] = (high + prediction["outside_allocator_gib"]) / measured - 1
    for phase, peaks in prediction["phases"].items():
        if measured := found.get("phases", {}).get(phase):
            result[f"allocated_{phase}"] = peaks["peak_allocated_gib"] / measured - 1
    return result


@dataclass(frozen=True, slots=True)
class Summary:
    """How far predictions were off.

    Attributes:
        cases: trainings that were compared.
        median_error, worst_error: of `peak_allocated`, as shares without their sign; None where nothing was compared.
        worst_case: the case with the worst.
        median_reserved_error, worst_reserved_error: the same of `peak_reserved`.
        median_step_error, worst_step_error: the same of the time of a step, as predicted before it was measured.
        median_step_error_since: that of the step as it is priced since.
        wrongly_fits: cases whose prediction said `fits`, and which ran out of memory or failed.
        edges, edges_right: cases that were trained in the predicted smallest cap and in less, and those of them that
            completed in the one and ran out of memory in the other.
        histories, histories_exact: recorded histories, and those that the model of the allocator followed to the end.
    """

    cases: int
    median_error: float | None
    worst_error: float | None
    worst_case: str | None
    median_reserved_error: float | None
    worst_reserved_error: float | None
    median_step_error: float | None
    worst_step_error: float | None
    median_step_error_since: float | None
    wrongly_fits: tuple[str, ...]
    edges: int
    edges_right: int
    histories: int
    histories_exact: int


def summary(rows: Sequence[Mapping[str, Any]]) -> Summary:
    """Of the `cases` of an evidence file."""
    trained = [row for row in rows if row.get("kind") in ("script", "train") and "prediction" in row]
    compared = [row for row in trained if "peak_allocated" in row["errors"]]
    off = [abs(row["errors"]["peak_allocated"]) for row in compared]
    reserved = [abs(row["errors"]["peak_reserved"]) for row in trained if "peak_reserved" in row["errors"]]
    steps = [abs(row["errors"]["step_time"]) for row in trained if "step_time" in row["errors"]]
    since = [abs(error) for row in trained if (error := step_error_since(row)) is not None]
    edges = [row for row in rows if row.get("kind") == "edge" and "runs" in row]
    histories = [row["history_replay"] for row in rows if "exact" in row.get("history_replay", {})]
    worst = max(off, default=None)
    return Summary(
        cases=len(off),
        median_error=statistics.median(off) if off else None,
        worst_error=worst,
        worst_case=compared[off.index(worst)]["case"] if worst is not None else None,
        median_reserved_error=statistics.median(reserved) if reserved else None,
        worst_reserved_error=max(reserved, default=None),
        median_step_error=statistics.median(steps) if steps else None,
        worst_step_error=max(steps, default=None),
        median_step_error_since=statistics.median(since) if since else None,
        wrongly_fits=tuple(
            row["case"]
            for row in trained
            if row["prediction"]["verdict"] == "fits" and row["status"] in ("does not fit", "failed")
        ),
        edges=len(edges),
        edges_right=sum(row["as_predicted"] for row in edges),
        histories=len(histories),
        histories_exact=sum(history["exact"] for history in histories),
    )


def step_error_since(row: Mapping[str, Any]) -> float | None:
    """Error of the step as `priced_since_s` has it; None: not measured, or not priced since."""
    if row.get("priced_since_s") is None or "step_time_ms" not in row:
        return None
    return float(1000 * row["priced_since_s"][1] / row["step_time_ms"] - 1)
