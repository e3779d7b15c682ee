"""What a log of training gets. In: step records. Out: the highest numbers since they were last asked for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hf_memkit.record_types import StepRecord

__all__ = ["LogNumbers"]

_PEAKS = ("peak_allocated_gib", "peak_reserved_gib", "fragmentation_gib")
_FEW = (*_PEAKS, "host_rss_gib")
_EVERYTHING = (
    *_FEW, "allocated_gib", "reserved_gib", "alloc_retries", "allocator_ooms", "device_used_gib",
    "outside_allocator_gib", "other_processes_gib", "pinned_gib", "disk_swap_gib",
)  # fmt: skip


class LogNumbers:
    """Gathers steps between two logs. Names are those of records, those of phases and categories with `_` between.

    With `everything` each phase, each category and every counter.
    """

    def __init__(self, *, everything: bool = False) -> None:
        self._everything = everything
        self._names = _EVERYTHING if everything else _FEW
        self._highest: dict[str, float] = {}
        self._categories: dict[str, float] = {}
        self._capacity_gib: float | None = None
        self._others_gib = 0.0
        self._taken = True

    def step(self, record: StepRecord) -> None:
        """A step's record."""
        fields: Mapping[str, Any] = record
        if self._taken:
            self._taken = False
            self._highest, self._categories = {}, {}
        highest = self._highest
        for name in self._names:
            value = fields.get(name)
            if value is not None and value > highest.get(name, -1.0):
                highest[name] = value
        if self._everything:
            for phase, peaks in fields.get("phases", {}).items():
                for name, value in peaks.items():
                    key = f"{phase}_{name}"
                    if value > highest.get(key, -1.0):
                        highest[key] = value
            self._categories = fields.get("categories", self._categories)
        self._capacity_gib = fields.get("capacity_gib")
        if "device_used_gib" in fields and "reserved_gib" in fields:
            self._others_gib = max(0.0, fields["device_used_gib"] - fields["reserved_gib"])

    def take(self) -> dict[str, float]:
        """The highest values of the steps since the last `take`; if there was none, the same as then.

        `headroom_gib` is the card's capacity less the reserved peak and what is used on the card beside this
        allocator, where NVML has told that at any time. Without an allocator there is `host_rss_gib` alone.
        """
        self._taken = True
        highest = self._highest
        numbers = {name: highest[name] for name in _PEAKS if name in highest}
        reserved, capacity = highest.get("peak_reserved_gib"), self._capacity_gib
        if reserved is not None and capacity:
            numbers["peak_reserved_percent"] = round(100 * reserved / capacity, 2)
            numbers["headroom_gib"] = round(capacity - reserved - self._others_gib, 10)
        if self._everything:
            return {**highest, **numbers, **self._categories}
        if not numbers and "host_rss_gib" in highest:
            return {"host_rss_gib": highest["host_rss_gib"]}
        return numbers
