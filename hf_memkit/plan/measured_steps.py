"""What a few steps on this machine's GPU have shown of a setup, beside what was predicted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any, Final

from hf_memkit.common.units import GIB
from hf_memkit.measuring.report.load import Run
from hf_memkit.plan.judgement import Judged
from hf_memkit.plan.short_run import WORST_STEPS

_NONE: Final = "–"


@dataclass(frozen=True, slots=True)
class Verified:
    """
    Attributes:
        judged: the setup, with its prediction.
        failed: where and why it failed; empty: it did not.
        out_of_memory: whether that was for want of GPU memory.
        last_lines: of what the process wrote, where it failed.
        peak_allocated_gib, peak_reserved_gib, outside_allocator_gib: the highest of all GPUs; None: not measured (on a
            CPU; without NVML).
        allocator_retries: how often the allocator freed its cache to go on; None as above.
        step_time_s: median of the steps with batches of the script's own loader; None: there was none.
        evaluated, saved: whether that is done; None: not asked for, or the notes say why not.
        worst: shape of the batch in the steps before those; empty: not known.
        gpus: that trained together.
        notes: what a reader should know.
    """

    judged: Judged
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
        return f"{self.judged.candidate.name}: {'ran here' if self.passed else 'failed here'}"

    def rows(self) -> Iterator[tuple[str, str, str]]:
        """(what, measured, predicted), in words; what was neither measured nor predicted is left out."""
        prediction, time = self.judged.prediction, self.judged.step_time
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
        for name, found, expected in sizes:
            if found is not None or expected is not None:
                yield name, _NONE if found is None else f"{found:.2f} GiB", _between(expected, " GiB")
        if self.step_time_s is not None or time is not None:
            expected = None if time is None or not self.judged.is_priced else (time.seconds[0], time.seconds[2])
            likely = "" if expected is None or time is None else f"{time.seconds[1]:.3g} s, "
            step = _NONE if self.step_time_s is None else f"{self.step_time_s:.3g} s"
            yield "a step", step, likely + _between(expected, " s", digits=".3g")
        if self.allocator_retries is not None:
            yield "allocator retries", str(self.allocator_retries), "0"
        for name, done in (("evaluation", self.evaluated), ("save", self.saved)):
            if done is not None:
                yield name, "done" if done else "not reached", ""

    def to_json(self) -> dict[str, Any]:
        time = self.judged.step_time
        prediction = self.judged.prediction
        return {
            "name": self.judged.candidate.name,
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
    """The measured fields of a `Verified`, of the records of all ranks and of what `short_run.py` wrote."""
    times = result.get("step_times_s", [])[WORST_STEPS:]
    found: dict[str, Any] = {
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
            found[name] = max((line[key] for line in lines if line.get(key) is not None), default=None)
    return found


def _between(expected: tuple[float, ...] | None, unit: str, digits: str = ".2f") -> str:
    if expected is None:
        return _NONE
    low, high = (format(each, digits) for each in expected)
    return f"{low}{unit}" if low == high else f"{low} to {high}{unit}"
