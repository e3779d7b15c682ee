"""What a dashboard shows. In: step records. Out: the highest numbers since they were last asked for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["LogNumbers"]

_PEAKS = ("peak_allocated_gib", "peak_reserved_gib", "fragmentation_gib")
_EVERYTHING = (
    "allocated_gib", "reserved_gib", "alloc_retries", "allocator_ooms", "device_used_gib", "outside_allocator_gib",
    "other_processes_gib", "host_rss_gib", "pinned_gib", "disk_swap_gib",
)  # fmt: skip


class LogNumbers:
    """Gathers steps between two logs. Names are those of records, those of phases and categories with `_` between."""

    def __init__(self) -> None:
        self._highest: dict[str, float] = {}
        self._categories: dict[str, float] = {}
        self._latest: dict[str, float] = {}
        self._others_gib = 0.0
        self._taken = True

    def step(self, fields: Mapping[str, Any]) -> None:
        """The fields of a step's record."""
        if self._taken:
            self._taken = False
            self._highest, self._categories = {}, {}
        highest = self._highest
        for name in (*_PEAKS, *_EVERYTHING):
            value = fields.get(name)
            if value is not None and value > highest.get(name, -1.0):
                highest[name] = value
        for phase, peaks in fields.get("phases", {}).items():
            for name, value in peaks.items():
                key = f"{phase}_{name}"
                if value > highest.get(key, -1.0):
                    highest[key] = value
        self._categories = fields.get("categories", self._categories)
        self._latest = {"capacity_gib": fields["capacity_gib"]} if "capacity_gib" in fields else {}
        if "device_used_gib" in fields and "reserved_gib" in fields:
            self._others_gib = max(0.0, fields["device_used_gib"] - fields["reserved_gib"])

    def take(self, *, everything: bool = False) -> dict[str, float]:
        """The highest values of the steps since the last `take`; if there was none, the same as then.

        `headroom_gib` is the card's capacity less the reserved peak and what is used on the card beside this
        allocator, where NVML has told that at any time. Without an allocator there is `host_rss_gib` alone.
        """
        self._taken = True
        highest = self._highest
        numbers = {name: highest[name] for name in _PEAKS if name in highest}
        reserved, capacity = highest.get("peak_reserved_gib"), self._latest.get("capacity_gib")
        if reserved is not None and capacity:
            numbers["peak_reserved_percent"] = round(100 * reserved / capacity, 2)
            numbers["headroom_gib"] = round(capacity - reserved - self._others_gib, 10)
        if everything:
            return {**highest, **numbers, **self._categories}
        if not numbers and "host_rss_gib" in highest:
            return {"host_rss_gib": highest["host_rss_gib"]}
        return numbers
