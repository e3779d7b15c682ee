"""Of the rows of results/published.json: how far predictions are from what was measured, and what another tool says.

The protocol is xMem's (arXiv 2510.21048): relative error; how often a job would have run out of memory, had its cap
been the estimate; the memory that the cap would have saved.
"""

from __future__ import annotations

import functools
import random
import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from hf_memkit.hardware import described_machine
from hf_memkit.units import GIB

ALLOCATED: Final = ("max_allocated", "active_bytes")
RESERVED: Final = ("max_reserved", "nvml_less_context")
"""What a row's figure is to be compared with (`published.py` says what each is)."""

__all__ = ["Errors", "Protocol", "allocated_error", "errors", "halves", "protocol", "reserved_error", "total_error"]

Row = Mapping[str, Any]

CALIBRATION_SEED: Final = 17
"""Splits the models into those that constants may be fitted on and those that judge; fixed before anything was."""


@dataclass(frozen=True, slots=True)
class Errors:
    """Relative errors of `count` rows, without their signs."""

    count: int
    median: float
    mean: float
    worst: float


@dataclass(frozen=True, slots=True)
class Protocol:
    """One way to estimate, on rows that measured allocated memory.

    Attributes:
        name: of the tool.
        errors: of the estimate against the measured peak allocated.
        too_low: rows that would have run out of memory with the estimate as their cap.
        saved_gib: mean of what the cap leaves of the GPU to others, a job that runs out saving nothing.
    """

    name: str
    errors: Errors
    too_low: int
    saved_gib: float


def allocated_error(row: Row, which: str) -> float | None:
    """Predicted peak allocated beside the measured one, as a share; None: one of them is not there."""
    answer = row.get(which, {})
    if row["measured"] not in ALLOCATED or row.get("gib") is None or "peak_allocated_gib" not in answer:
        return None
    return float(answer["peak_allocated_gib"] / row["gib"] - 1)


def reserved_error(row: Row, which: str) -> float | None:
    """How far the measured reserved memory lies outside the predicted range, as a share of it: 0 within, above 0 where
    the prediction is too high; None: one of them is not there."""
    answer = row.get(which, {})
    if row["measured"] not in RESERVED or row.get("gib") is None or "peak_reserved_gib" not in answer:
        return None
    low, high = answer["peak_reserved_gib"]
    nearest = min(max(row["gib"], low), high)
    return float(nearest / row["gib"] - 1)


def errors(found: Iterable[float | None]) -> Errors | None:
    """The figures of those that are there; None where none is."""
    sizes = [abs(each) for each in found if each is not None]
    if not sizes:
        return None
    return Errors(len(sizes), statistics.median(sizes), statistics.fmean(sizes), max(sizes))


def protocol(rows: Iterable[Row]) -> list[Protocol]:
    """memkit and the other tools, each on the rows that it answers."""
    measured = [row for row in rows if row["measured"] == "max_allocated" and row.get("gib") is not None]
    ways: dict[str, Callable[[Row], float | None]] = {
        "memkit, peak allocated": lambda row: row.get("then", {}).get("peak_allocated_gib"),
        "memkit, upper end of reserved": lambda row: row.get("then", {}).get("peak_reserved_gib", [None, None])[1],
    }
    for peer in sorted({name for row in measured for name in row.get("peers", {})}):
        ways[peer] = lambda row, peer=peer: row.get("peers", {}).get(peer, {}).get("answer_gib")  # type: ignore[misc]
    found = []
    for name, way in ways.items():
        answered = [(row, estimate) for row in measured if (estimate := way(row)) is not None]
        of_it = errors(estimate / row["gib"] - 1 for row, estimate in answered)
        if of_it is None:
            continue
        saved = [
            max(0.0, _capacity_gib(row["gpu"]) - estimate)
            if estimate >= row["gib"] else 0.0
            for row, estimate in answered
        ]  # fmt: skip
        too_low = sum(estimate < row["gib"] for row, estimate in answered)
        found.append(Protocol(name, of_it, too_low, statistics.fmean(saved)))
    return found


def total_error(row: Row, which: str) -> float | None:
    """As `reserved_error`, of what nvidia-smi showed at most and the predicted range with the context beside it."""
    answer, seen = row.get(which, {}), row.get("also", {}).get("nvidia_smi_peak_gib")
    if seen is None or "peak_reserved_gib" not in answer:
        return None
    low, high = (each + answer["outside_allocator_gib"] for each in answer["peak_reserved_gib"])
    return float(min(max(seen, low), high) / seen - 1)


def halves(rows: Iterable[Row]) -> tuple[list[Row], list[Row]]:
    """(rows that constants may be fitted on, rows that judge them): a model's rows stay together."""
    rows = list(rows)
    names = sorted({row["model"] for row in rows})
    random.Random(CALIBRATION_SEED).shuffle(names)
    fitting = set(names[: (len(names) + 1) // 2])
    return [row for row in rows if row["model"] in fitting], [row for row in rows if row["model"] not in fitting]


@functools.cache
def _capacity_gib(gpu: str) -> float:
    found = described_machine(gpu.removeprefix("NVIDIA "), None, None, None).gpu
    assert found is not None
    return found.capacity_bytes / GIB
