"""The figures of a run, of the rank with the highest peak, which text, page and JSON show."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final, Literal

from hf_memkit.catalog.fit import was_tight
from hf_memkit.common.terms import CATEGORIES, PHASES
from hf_memkit.measuring.record_types import CompilationCounts, OomRecord, StepRecord
from hf_memkit.measuring.report.load import RankRun, Run

ACCEPTED_SHARE: Final = 0.02
"""A predicted category is accurate if it is off by at most this share of the predicted peak."""

_PLACES: Final = ("device", "host", "pinned", "disk")


@dataclass(frozen=True, slots=True)
class Peak:
    """The highest allocated memory, and when and where it was reached."""

    gib: float
    phase: str | None
    step: int | None
    rank: int


ComparedKind = Literal["peak", "phase", "category"]


@dataclass(frozen=True, slots=True)
class Compared:
    """A prediction and its measurement, in GiB.

    Attributes:
        what: `peak allocated`, `peak reserved`, or the name of the phase or category.
        predicted_gib: one figure, or the lowest and the highest.
        measured_gib: None if not measured.
    """

    kind: ComparedKind
    what: str
    predicted_gib: tuple[float, ...]
    measured_gib: float | None

    @property
    def predicted(self) -> str:
        """`11.00`, or `11.50–12.50`."""
        return "–".join(f"{gib:.2f}" for gib in self.predicted_gib)

    @property
    def off_gib(self) -> float | None:
        """Measured minus predicted; None for a range, or if not measured."""
        if self.measured_gib is None or len(self.predicted_gib) > 1:
            return None
        return self.measured_gib - self.predicted_gib[0]


@dataclass(frozen=True, slots=True)
class Summary:
    """The memory and time of a rank. What is None or empty was not recorded.

    Attributes:
        capacity_gib: GPU memory, or the allocator's cap if one is set.
        capped: the cap as a share of the GPU; None without a cap.
        percent: `peak` as a percentage of `capacity_gib`.
        others_gib: maximum outside this allocator: contexts, libraries, other processes.
        headroom_gib: `capacity_gib` minus `reserved_gib` and `others_gib`.
        categories: GiB by category at the peak of step `categories_step`, when `categories_reserved_gib` were
            reserved.
        held: GiB by place and category held between steps, at the last step recorded in detail.
        host: `rss_gib` (highest), `available_gib` (lowest), `total_gib`, `pinned_gib`, `disk_swap_gib` (highest).
        step_time_ms: median of the steps in which torch compiled nothing.
        predicted_step_time_ms: low, middle and high, or one figure.
        compilation: the last figures of torch.compile; None if nothing was compiled.
        compiled_steps: the steps in which torch compiled a graph.
    """

    rank: int
    capacity_gib: float | None
    capped: float | None
    peak: Peak | None
    percent: float | None
    reserved_gib: float | None
    others_gib: float | None
    headroom_gib: float | None
    categories: dict[str, float]
    categories_step: int | None
    categories_reserved_gib: float | None
    phases: dict[str, float]
    held: dict[str, dict[str, float]]
    host: dict[str, float]
    steps: int
    step_time_ms: float | None
    predicted_step_time_ms: tuple[float, ...]
    retries: int
    predicted: tuple[Compared, ...]
    compilation: CompilationCounts | None
    compiled_steps: tuple[int, ...]

    @property
    def tight(self) -> bool:
        """Whether the GPU was so full that the allocator frees its cache and retries."""
        if self.capacity_gib is None:
            return False
        reserved = self.capacity_gib - self.headroom_gib if self.headroom_gib is not None else 0.0
        return was_tight(max(reserved, self.peak.gib if self.peak else 0.0), self.capacity_gib, self.retries)

    def to_json(self) -> dict[str, Any]:
        predicted = [
            {"what": row.what, "predicted_gib": row.predicted, "measured_gib": row.measured_gib}
            for row in self.predicted
        ]
        return {**asdict(self), "predicted": predicted}


def summarise(run: Run) -> Summary:
    """The figures of the rank with the highest peak."""
    return max(summarise_ranks(run), key=lambda each: each.peak.gib if each.peak else -1.0)


def summarise_ranks(run: Run) -> list[Summary]:
    """The figures of each rank."""
    return [_of_rank(rank) for rank in run.ranks]


def _compared(measured: Summary, prediction: Mapping[str, Any]) -> Iterator[Compared]:
    """A row for each predicted peak, phase and category."""
    phases = prediction.get("phases", {})
    categories = prediction.get("categories", {})
    rows: list[tuple[ComparedKind, str, Any, float | None]] = [
        ("peak", "peak allocated", prediction.get("peak_allocated_gib"), measured.peak.gib if measured.peak else None),
        ("peak", "peak reserved", prediction.get("peak_reserved_gib"), measured.reserved_gib),
    ]
    for phase in PHASES:
        peak = phases.get(phase, {}).get("peak_allocated_gib")
        rows.append(("phase", phase, peak, measured.phases.get(phase)))
    for name in CATEGORIES:
        rows.append(("category", name, categories.get(f"{name}_gib"), measured.categories.get(name)))

    for kind, what, predicted, measured_gib in rows:
        ends = predicted if isinstance(predicted, list) else [predicted]
        if ends and ends[0] is not None:
            yield Compared(kind, what, tuple(ends[:2]), measured_gib)


def furthest_off(rows: Sequence[Compared]) -> str | None:
    """A sentence that names the least accurate category; None if no category was both predicted and measured."""
    peak = next((row.predicted_gib[0] for row in rows if row.what == "peak allocated"), 0.0)
    off = {row: row.off_gib for row in rows if row.kind == "category" and row.off_gib is not None}
    if not off or peak <= 0:
        return None
    furthest = max(off, key=lambda row: abs(off[row]))
    if abs(off[furthest]) <= ACCEPTED_SHARE * peak:
        return f"Every category is within {100 * ACCEPTED_SHARE:.0f} % of the predicted peak."
    figures = f"predicted {furthest.predicted} GiB, measured {furthest.measured_gib:.2f} GiB"
    return f"Furthest off: {furthest.what}, {figures} ({off[furthest]:+.2f} GiB)."


def _of_rank(rank: RankRun) -> Summary:
    hardware = rank.run.get("hardware", {})
    records: list[Mapping[str, Any]] = [rank.run, *rank.steps, *rank.evaluations, *rank.saves, *rank.ooms]
    whole_gpu = _highest(records, "capacity_gib") or hardware.get("capacity_gib")
    cap = hardware.get("allocator_cap_fraction")
    capped = cap if cap is not None and 0 < cap < 1 else None
    capacity = whole_gpu * (capped or 1.0) if whole_gpu else None

    peak = _peak(rank)
    reserved = _highest(records, "peak_reserved_gib")
    outside = [step for step in rank.steps if "device_used_gib" in step and "reserved_gib" in step]
    others = max((max(0.0, step["device_used_gib"] - step["reserved_gib"]) for step in outside), default=None)
    headroom = None
    if capacity is not None and reserved is not None:  # a cap leaves the rest of the GPU to the others
        headroom = capacity - reserved - (0.0 if capped else others or 0.0)

    at_peak = _highest_with_categories(rank)
    compiled_steps = tuple(step["step"] for step in rank.steps if step.get("compiled_graphs"))
    typical = [step for step in rank.steps if step["step"] not in compiled_steps]
    times = [step["step_time_ms"] for step in typical if "step_time_ms" in step]
    retries = [step["alloc_retries"] for step in rank.steps if "alloc_retries" in step]
    predicted_ms = rank.run.get("prediction", {}).get("step_time_ms") or []

    summary = Summary(
        rank=rank.rank,
        capacity_gib=capacity,
        capped=capped,
        peak=peak,
        percent=100 * peak.gib / capacity if peak is not None and capacity else None,
        reserved_gib=reserved,
        others_gib=others,
        headroom_gib=headroom,
        categories=_by_category(at_peak.get("categories", {})),
        categories_step=at_peak.get("step"),
        categories_reserved_gib=_highest([at_peak], "peak_reserved_gib"),
        phases=_phases(rank),
        held=_held(rank),
        host=_host(records, hardware),
        steps=sum(record.get("steps") or 1 for record in rank.steps),
        step_time_ms=statistics.median(times) if times else None,
        predicted_step_time_ms=tuple(predicted_ms if isinstance(predicted_ms, list) else [predicted_ms]),
        # The counter starts with the process, which may have trained before.
        retries=max(0, retries[-1] - rank.run.get("alloc_retries", 0)) if retries else 0,
        predicted=(),
        compilation=_last_compilation(rank),
        compiled_steps=compiled_steps,
    )
    return replace(summary, predicted=tuple(_compared(summary, rank.run.get("prediction") or {})))


def _last_compilation(rank: RankRun) -> CompilationCounts | None:
    """The last figures of torch.compile since the last start. They grow from record to record."""
    end: list[Mapping[str, Any]] = [rank.end] if rank.end is not None else []
    records: list[Mapping[str, Any]] = [*rank.steps, *rank.evaluations, *rank.saves, *rank.ooms, *end]
    start = rank.run.get("start_step", 0)
    known = [record["compilation"] for record in records if "compilation" in record and record.get("step", 0) >= start]
    return max(known, key=lambda each: (each.get("graphs", 0), each.get("given_up", 0)), default=None)


def _highest(records: Iterable[Mapping[str, Any]], name: str) -> float | None:
    return max((record[name] for record in records if name in record), default=None)


def _peak(rank: RankRun) -> Peak | None:
    """The highest peak of load, steps, evaluations, saves and out-of-memory errors; the first of equal ones."""
    known: list[Peak] = []
    for phase, records in _by_phase(rank).items():
        for record in records:
            if "peak_allocated_gib" in record:
                peaks = _phases_of(record)
                highest = phase or max(peaks, key=lambda name: peaks[name], default=None)
                known.append(Peak(record["peak_allocated_gib"], highest, record.get("step"), rank.rank))
    for oom in rank.ooms:
        gib = max(oom.get("peak_allocated_gib", -1.0), oom.get("allocated_gib", -1.0))
        if gib >= 0:
            phase = oom.get("phase")
            known.append(Peak(gib, phase if phase in PHASES else None, oom.get("step"), rank.rank))
    return max(known, key=lambda peak: peak.gib, default=None)


def _phases(rank: RankRun) -> dict[str, float]:
    """The highest peak of each phase, in GiB."""
    peaks = [_phases_of(step) for step in rank.steps]
    for phase, records in _by_phase(rank).items():
        if phase is not None:
            peaks += [{phase: record["peak_allocated_gib"]} for record in records if "peak_allocated_gib" in record]
    peaks += [{oom["phase"]: oom["allocated_gib"]} for oom in rank.ooms if "phase" in oom and "allocated_gib" in oom]
    known = {phase: [each[phase] for each in peaks if phase in each] for phase in PHASES}
    return {phase: max(values) for phase, values in known.items() if values}


def _by_phase(rank: RankRun) -> dict[str | None, Sequence[Mapping[str, Any]]]:
    """The records with peaks; None: steps, which have several phases."""
    return {"load": [rank.run], None: rank.steps, "evaluate": rank.evaluations, "save": rank.saves}


def _phases_of(record: Mapping[str, Any]) -> dict[str, float]:
    """The peaks of a record by phase, in GiB."""
    peaks = record.get("phases", {})
    known = {name: peaks[name].get("peak_allocated_gib") for name in PHASES if name in peaks}
    return {name: gib for name, gib in known.items() if gib is not None}


def _highest_with_categories(rank: RankRun) -> StepRecord | OomRecord:
    """The last out-of-memory error with categories, else the step with categories that has the highest peak."""
    for oom in rank.ooms[::-1]:
        if _by_category(oom.get("categories", {})):
            return oom
    steps = [step for step in rank.steps if _by_category(step.get("categories", {}))]
    return max(steps, key=lambda step: step.get("peak_allocated_gib", 0.0), default=StepRecord())


def _by_category(fields: Mapping[str, Any]) -> dict[str, float]:
    return {category: fields[f"{category}_gib"] for category in CATEGORIES if f"{category}_gib" in fields}


def _held(rank: RankRun) -> dict[str, dict[str, float]]:
    for record in reversed(rank.steps):
        if record.get("held"):
            places = {place: _by_category(record["held"].get(place) or {}) for place in _PLACES}
            return {place: categories for place, categories in places.items() if sum(categories.values()) > 0}
    return {}


def _host(records: Iterable[Mapping[str, Any]], hardware: Mapping[str, Any]) -> dict[str, float]:
    available = [record["host_available_gib"] for record in records if "host_available_gib" in record]
    totals = filter(None, (hardware.get("ram_limit_gib"), hardware.get("ram_gib")))
    figures = {
        "rss_gib": _highest(records, "host_rss_gib"),
        "available_gib": min(available, default=None),
        "total_gib": min(totals, default=None),
        "pinned_gib": _highest(records, "pinned_gib"),
        "disk_swap_gib": _highest(records, "disk_swap_gib"),
    }
    return {name: value for name, value in figures.items() if value is not None}
