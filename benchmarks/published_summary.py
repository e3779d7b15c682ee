"""Of the rows of results/published.json: how far predictions are from what was measured, and what another tool says.

The protocol is xMem's (arXiv 2510.21048): relative error; how often a job would have run out of memory, had its cap
been the estimate; the memory that the cap would have saved.
"""

from __future__ import annotations

import functools
import math
import random
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from hf_memkit.catalog.fit import SLACK_SHARE
from hf_memkit.catalog.hardware import described_machine
from hf_memkit.common.units import GIB

ALLOCATED: Final = ("max_allocated", "active_bytes")
RESERVED: Final = ("max_reserved", "nvml_less_context")
"""What a row's figure is to be compared with (`published.py` says what each is)."""


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


@dataclass(frozen=True, slots=True)
class Calibration:
    """One half of the trainings that tell what their GPU held, beside the predicted range of reserved memory.

    Attributes:
        half: what it is for.
        models: whose trainings they are.
        below, within, above: trainings below, in and above the range.
        covered: trainings that do not exceed the upper end with a verdict's slack.
        worst_mib: by how much the worst exceeds it; below 0 where none does.
    """

    half: str
    models: tuple[str, ...]
    below: int
    within: int
    above: int
    covered: int
    worst_mib: float


_COVERED: Final = 0.95
_STEP_MIB: Final = 50


def calibrations(rows: Iterable[Row], fitted_on: str, slack_mib: float) -> tuple[Calibration, Calibration]:
    """The half that the slack beside the share is fitted on, and the half that judges it.

    Args:
        rows: of the evidence.
        fitted_on: the row that a length was fitted on, which is left out.
        slack_mib: what verdicts add beside their share.
    """
    fitting, judging = halves(_telling(rows, fitted_on))
    return _calibration("fitted on", fitting, slack_mib), _calibration("judged on", judging, slack_mib)


def fitted_slack_mib(rows: Iterable[Row], fitted_on: str) -> int:
    """The least multiple of 50 MiB with which 95 % of the fitting half's trainings are covered."""
    fitting, _ = halves(_telling(rows, fitted_on))
    excess = sorted(_excess_mib(row) for row in fitting)
    enough = excess[math.ceil(_COVERED * len(excess)) - 1]
    return _STEP_MIB * math.ceil(max(0.0, enough) / _STEP_MIB)


def _calibration(half: str, rows: list[Row], slack_mib: float) -> Calibration:
    ends = [(_held_gib(row), *_best(row)["peak_reserved_gib"]) for row in rows]
    below, above = sum(held < low for held, low, _ in ends), sum(held > high for held, _, high in ends)
    excess = [_excess_mib(row) - slack_mib for row in rows]
    return Calibration(
        half, tuple(sorted({row["model"] for row in rows})), below, len(rows) - below - above, above,
        sum(each <= 0 for each in excess), max(excess),
    )  # fmt: skip


def _telling(rows: Iterable[Row], fitted_on: str) -> list[Row]:
    """Trainings on one GPU, predicted with code that allocates as theirs did, that tell what the GPU held."""
    return [
        row
        for row in rows
        if row.get("gpus") == 1
        and row["id"] != fitted_on
        and ("peak_reserved_gib" in row.get("then", {}) or row.get("code") in ("same", "near"))
        and "peak_reserved_gib" in _best(row)
        and _held_gib(row) is not None
    ]


def _best(row: Row) -> Row:
    """The prediction with the libraries of that day where there is one."""
    then: Row = row.get("then", {})
    return then if "peak_reserved_gib" in then else row.get("today", {})


def _held_gib(row: Row) -> float | None:
    """Reserved memory as measured, or what nvidia-smi showed less the assumed context."""
    seen = row.get("also", {}).get("nvidia_smi_peak_gib")
    if seen is not None:
        return float(seen - _best(row)["outside_allocator_gib"])
    return row.get("gib") if row["measured"] in RESERVED else None


def _excess_mib(row: Row) -> float:
    """By how much the GPU held more than the range's upper end with a verdict's share of slack."""
    held, share = _held_gib(row), SLACK_SHARE["trace"]
    assert held is not None
    return float(1024 * (held - (1 + share) * _best(row)["peak_reserved_gib"][1]))


def halves(rows: Sequence[Row]) -> tuple[list[Row], list[Row]]:
    """(rows that constants may be fitted on, rows that judge them): a model's rows stay together."""
    names = sorted({row["model"] for row in rows})
    random.Random(CALIBRATION_SEED).shuffle(names)
    fitting = set(names[: (len(names) + 1) // 2])
    return [row for row in rows if row["model"] in fitting], [row for row in rows if row["model"] not in fitting]


@functools.cache
def _capacity_gib(gpu: str) -> float:
    found = described_machine(gpu.removeprefix("NVIDIA "), None, None, None).gpu
    assert found is not None
    return found.capacity_bytes / GIB
