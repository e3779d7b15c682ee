"""The figures of a run that every view shows. In: `Run`. Out: `Summary`, so that text, page and JSON say the same.

Several ranks: the figures are those of the rank with the highest peak, but for what is said of each.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

from hf_memkit.record_types import OomRecord, StepRecord
from hf_memkit.report.load import RankRun, Run
from hf_memkit.report.reconcile import compared
from hf_memkit.report.sanitize import number, whole
from hf_memkit.terms import CATEGORIES, PHASES

__all__ = ["NEAR", "Peak", "Summary", "summarise", "summarise_ranks"]

NEAR: Final = 0.9
"""Of the card. Above it an ordinary change (a batch a tenth longer, a library's workspace) does not fit."""

_PLACES: Final = ("device", "host", "pinned", "disk")


@dataclass(frozen=True, slots=True)
class Peak:
    """The highest allocated bytes: how much, what training was doing, at which step, on which rank."""

    gib: float
    phase: str | None
    step: int | None
    rank: int


@dataclass(frozen=True, slots=True)
class Summary:
    """What a run needed. None and empty: the records do not have it.

    Attributes:
        rank: the rank that the figures are of.
        capacity_gib: what the allocator may take: the card, or the share of it that somebody has capped it at.
        capped: that share, where it is not the whole card.
        peak: the highest allocated.
        percent: `peak` of `capacity_gib`.
        reserved_gib: the highest reserved.
        others_gib: the most that the card held and this allocator did not: contexts, libraries, other processes.
        headroom_gib: `capacity_gib` less `reserved_gib` and `others_gib`.
        categories: GiB by category, adding up to the peak of `categories_step`, when `categories_reserved_gib` were
            reserved.
        phases: the highest allocated in each phase.
        held: GiB by place and category that live between steps, at the last step that was looked at.
        host: `rss_gib` (highest), `available_gib` (lowest), `total_gib`, `pinned_gib`, `disk_swap_gib` (highest).
        steps: how many were recorded.
        step_time_ms: their median.
        retries: how often the allocator had to give its cache back to go on.
        predicted: rows of (what, predicted, measured), GiB; a range is the text `low–high`.
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
    retries: int
    predicted: tuple[tuple[str, str, float | None], ...]

    @property
    def near(self) -> bool:
        """Whether the peak, or what is reserved for it, comes near the card."""
        highest = max(self.peak.gib if self.peak else 0.0, (self.reserved_gib or 0.0) + (self.others_gib or 0.0))
        return self.capacity_gib is not None and highest > NEAR * self.capacity_gib

    def to_json(self) -> dict[str, Any]:
        predicted = [{"what": what, "predicted_gib": p, "measured_gib": m} for what, p, m in self.predicted]
        return {**asdict(self), "predicted": predicted}


def summarise(run: Run) -> Summary:
    """The figures of the rank with the highest peak."""
    return max((_of_rank(rank) for rank in run.ranks), key=lambda s: s.peak.gib if s.peak else -1.0)


def summarise_ranks(run: Run) -> list[Summary]:
    """The figures of each rank."""
    return [_of_rank(rank) for rank in run.ranks]


def _of_rank(rank: RankRun) -> Summary:
    hardware = rank.run.get("hardware", {})
    records: list[Mapping[str, Any]] = [rank.run, *rank.steps, *rank.evaluations, *rank.saves, *rank.ooms]
    whole_card = _highest(records, "capacity_gib") or number(hardware, "capacity_gib")
    cap = number(hardware, "allocator_cap_fraction")
    capped = cap if cap is not None and 0 < cap < 1 else None
    capacity = whole_card * (capped or 1.0) if whole_card else None
    peak = _peak(rank)
    reserved = _highest(records, "peak_reserved_gib")
    others = _others(rank.steps)
    # A cap leaves the rest of the card to the others.
    headroom = None
    if capacity is not None and reserved is not None:
        headroom = capacity - reserved - (0.0 if capped else others or 0.0)
    looked_at = _looked_at(rank)
    categories = _by_category(looked_at.get("categories", {}))
    times = [t for record in rank.steps if (t := number(record, "step_time_ms")) is not None]
    phases = _phases(rank)
    return Summary(
        rank=rank.rank,
        capacity_gib=capacity,
        capped=capped,
        peak=peak,
        percent=100 * peak.gib / capacity if peak is not None and capacity else None,
        reserved_gib=reserved,
        others_gib=others,
        headroom_gib=headroom,
        categories=categories,
        categories_step=whole(looked_at, "step"),
        categories_reserved_gib=_highest([looked_at], "peak_reserved_gib"),
        phases=phases,
        held=_held(rank),
        host=_host(records, hardware),
        steps=sum(whole(record, "steps") or 1 for record in rank.steps),
        step_time_ms=statistics.median(times) if times else None,
        retries=_retries(rank),
        predicted=tuple(
            compared(rank.run.get("prediction") or {}, peak.gib if peak else None, reserved, phases, categories)
        ),
    )


def _highest(records: Iterable[Mapping[str, Any]], name: str) -> float | None:
    return max((value for record in records if (value := number(record, name)) is not None), default=None)


def _peak(rank: RankRun) -> Peak | None:
    """Over load, steps, evaluations, saves and the moment of an OOM; of equal ones the first."""
    kinds = [("load", [rank.run]), (None, rank.steps), ("evaluate", rank.evaluations), ("save", rank.saves)]
    found: list[Peak] = []
    for phase, records in kinds:
        for record in records:
            value = number(record, "peak_allocated_gib")
            if value is not None:
                step = whole(record, "step") if record is not rank.run else None
                found.append(Peak(value, phase or _highest_phase(record), step, rank.rank))
    for oom in rank.ooms:
        values = [v for name in ("peak_allocated_gib", "allocated_gib") if (v := number(oom, name)) is not None]
        if values:
            phase = oom.get("phase")
            found.append(Peak(max(values), phase if phase in PHASES else None, whole(oom, "step"), rank.rank))
    return max(found, key=lambda peak: peak.gib, default=None)


def _highest_phase(step: Mapping[str, Any]) -> str | None:
    phases = step.get("phases", {})
    known = {phase: number(phases.get(phase), "peak_allocated_gib") for phase in PHASES}
    values = {phase: value for phase, value in known.items() if value is not None}
    return max(values, key=lambda phase: values[phase], default=None)


def _phases(rank: RankRun) -> dict[str, float]:
    found: dict[str, float] = {}
    groups = [("load", [rank.run]), ("evaluate", rank.evaluations), ("save", rank.saves)]
    for name, records in groups:
        value = _highest(records, "peak_allocated_gib")
        if value is not None:
            found[name] = value
    for oom in rank.ooms:
        value = _highest([oom], "allocated_gib")
        if value is not None and oom.get("phase") in PHASES:
            found[oom["phase"]] = max(found.get(oom["phase"], 0.0), value)
    for step in rank.steps:
        for phase in PHASES:
            value = number(step.get("phases", {}).get(phase), "peak_allocated_gib")
            if value is not None:
                found[phase] = max(found.get(phase, 0.0), value)
    return {phase: found[phase] for phase in PHASES if phase in found}


def _looked_at(rank: RankRun) -> StepRecord | OomRecord:
    """The OOM if there was one, else the step with the highest peak; of those that have categories."""
    for oom in rank.ooms[::-1]:
        if _by_category(oom.get("categories", {})):
            return oom
    looked = [step for step in rank.steps if _by_category(step.get("categories", {}))]
    return max(looked, key=lambda step: number(step, "peak_allocated_gib") or 0.0, default=StepRecord())


def _by_category(fields: Mapping[str, Any]) -> dict[str, float]:
    found = {category: number(fields, f"{category}_gib") for category in CATEGORIES}
    return {category: value for category, value in found.items() if value is not None}


def _held(rank: RankRun) -> dict[str, dict[str, float]]:
    for record in reversed(rank.steps):
        if record.get("held"):
            places = {place: _by_category(record["held"].get(place) or {}) for place in _PLACES}
            return {place: categories for place, categories in places.items() if sum(categories.values()) > 0}
    return {}


def _host(records: Iterable[Mapping[str, Any]], hardware: Mapping[str, Any]) -> dict[str, float]:
    available = [v for record in records if (v := number(record, "host_available_gib")) is not None]
    totals = [v for name in ("ram_limit_gib", "ram_gib") if (v := number(hardware, name))]
    found = {
        "rss_gib": _highest(records, "host_rss_gib"),
        "available_gib": min(available, default=None),
        "total_gib": min(totals, default=None),
        "pinned_gib": _highest(records, "pinned_gib"),
        "disk_swap_gib": _highest(records, "disk_swap_gib"),
    }
    return {name: value for name, value in found.items() if value is not None}


def _others(steps: Iterable[Mapping[str, Any]]) -> float | None:
    found = []
    for step in steps:
        used, reserved = number(step, "device_used_gib"), number(step, "reserved_gib")
        if used is not None and reserved is not None:
            found.append(max(0.0, used - reserved))
    return max(found, default=None)


def _retries(rank: RankRun) -> int:
    """Since the training began; the counter counts since the process did."""
    counts = [count for step in rank.steps if (count := whole(step, "alloc_retries")) is not None]
    if not counts:
        return 0
    before = whole(rank.run, "alloc_retries")
    return max(0, counts[-1] - (before if before is not None else 0))
