"""Measurements of a few steps of a setup on this machine's GPU, next to its prediction."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any, Final

from hf_memkit.common.units import GIB
from hf_memkit.measuring.report.load import Run
from hf_memkit.plan.judgement import Judgement
from hf_memkit.plan.short_run import WORST_STEPS

_NONE: Final = "–"


@dataclass(frozen=True, slots=True)
class Verified:
    """A setup that ran for a few steps.

    Attributes:
        judgement: of the setup, with its prediction.
        failed: where and why it failed; empty if it passed.
        out_of_memory: whether it failed because the GPU ran out of memory.
        last_lines: last lines of output of a failed run.
        peak_allocated_gib, peak_reserved_gib, outside_allocator_gib: maximum over all GPUs; None if not measured (on a
            CPU, without NVML).
        allocator_retries: number of times the allocator freed its cache to serve a request; None as above.
        step_time_s: median of the steps with batches of the script's own loader; None if there were none.
        evaluated, saved: whether the run reached it; None if the script does not do it, or the notes say why not.
        worst: shape of the worst batch, in the first steps; empty if unknown.
        gpus: number of GPUs that trained together.
        notes: remarks for the user.
    """

    judgement: Judgement
    failed: str = ""
    out_of_memory: bool = False
    last_lines: tuple[str, ...] = ()
    peak_allocated_gib: float | None = None
    peak_reserved_gib: float | None = None
    outside_allocator_gib: float | None = None
    allocator_retries: int | None = None
    step_time_s: float | None = None
    evaluated: bool | None = None
    saved: bool | None = None
    worst: str = ""
    gpus: int = 1
    notes: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        return not self.failed

    @property
    def title(self) -> str:
        """`"4 × 2, checkpointing: ran here"`."""
        return f"{self.judgement.candidate.name}: {'ran here' if self.passed else 'failed here'}"

    def rows(self) -> Iterator[tuple[str, str, str]]:
        """(label, measured, predicted) as text; without rows that are neither measured nor predicted."""
        prediction, time = self.judgement.prediction, self.judgement.step_time
        peak = reserved = outside = None
        if prediction is not None:
            low, high = prediction.peak_reserved_bytes
            peak = (prediction.peak_allocated_bytes / GIB,) * 2
            reserved = (low / GIB, high / GIB)
            outside = (prediction.outside_allocator_bytes / GIB,) * 2
        sizes = (
            ("peak allocated", self.peak_allocated_gib, peak),
            ("peak reserved", self.peak_reserved_gib, reserved),
            ("outside the allocator", self.outside_allocator_gib, outside),
        )
        for name, gib, expected in sizes:
            if gib is not None or expected is not None:
                yield name, _NONE if gib is None else f"{gib:.2f} GiB", _between(expected, " GiB")
        if self.step_time_s is not None or time is not None:
            expected = None if time is None or not self.judgement.is_priced else (time.seconds[0], time.seconds[2])
            likely = "" if expected is None or time is None else f"{time.seconds[1]:.3g} s, "
            step = _NONE if self.step_time_s is None else f"{self.step_time_s:.3g} s"
            yield "a step", step, likely + _between(expected, " s", digits=".3g")
        if self.allocator_retries is not None:
            yield "allocator retries", str(self.allocator_retries), "0"
        for name, done in (("evaluation", self.evaluated), ("save", self.saved)):
            if done is not None:
                yield name, "done" if done else "not reached", ""

    def to_json(self) -> dict[str, Any]:
        time = self.judgement.step_time
        prediction = self.judgement.prediction
        return {
            "name": self.judgement.candidate.name,
            "passed": self.passed,
            "failed": self.failed,
            "out_of_memory": self.out_of_memory,
            "last_lines": list(self.last_lines),
            "peak_allocated_gib": self.peak_allocated_gib,
            "peak_reserved_gib": self.peak_reserved_gib,
            "outside_allocator_gib": self.outside_allocator_gib,
            "alloc_retries": self.allocator_retries,
            "step_time_s": self.step_time_s,
            "evaluated": self.evaluated,
            "saved": self.saved,
            "worst_batch": self.worst,
            "gpus": self.gpus,
            "predicted": {
                "peak_allocated_gib": prediction.peak_allocated_bytes / GIB if prediction else None,
                "peak_reserved_gib": [size / GIB for size in prediction.peak_reserved_bytes] if prediction else None,
                "outside_allocator_gib": prediction.outside_allocator_bytes / GIB if prediction else None,
                "step_time_s": list(time.seconds) if time else None,
            },
            "notes": list(self.notes),
        }


def measured(records: Run | None, result: Mapping[str, Any]) -> dict[str, Any]:
    """The measured fields of a `Verified`, from the records of all ranks and the result file of `short_run.py`."""
    times = result.get("step_times_s", [])[WORST_STEPS:]
    fields: dict[str, Any] = {
        "step_time_s": median(times) if times else None,
        "evaluated": result.get("evaluated"),
        "saved": result.get("saved"),
        "worst": result.get("worst", ""),
    }
    if records is not None:
        lines: list[Mapping[str, Any]] = [
            line
            for rank in records.ranks
            for line in (rank.run, *rank.steps, *rank.evaluations, *rank.saves, *rank.ooms, rank.end or {})
        ]
        for name, key in {
            "peak_allocated_gib": "peak_allocated_gib",
            "peak_reserved_gib": "peak_reserved_gib",
            "outside_allocator_gib": "outside_allocator_gib",
            "allocator_retries": "alloc_retries",
        }.items():
            fields[name] = max((line[key] for line in lines if line.get(key) is not None), default=None)
    return fields


def _between(expected: tuple[float, ...] | None, unit: str, digits: str = ".2f") -> str:
    if expected is None:
        return _NONE
    low, high = (format(each, digits) for each in expected)
    return f"{low}{unit}" if low == high else f"{low} to {high}{unit}"
