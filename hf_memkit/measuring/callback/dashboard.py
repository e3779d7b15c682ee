"""Log keys for dashboards, from the measurements since the last logging step on all ranks. Trainer's integrations put
`train/` before a key: `memory/peak_allocated_gib` is shown as `train/memory/peak_allocated_gib` (transformers 5.23:
integrations/integration_utils.py, `rewrite_logs`)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final, Literal

from hf_memkit.measuring.callback.numbers_of_ranks import RankSample

Log = Literal["few", "all", "none"]
LOG: Final[tuple[Log, ...]] = ("few", "all", "none")

_SILENT_S: Final = 10.0
"""A few rounds of the exchange between ranks."""

_COMPARED: Final = ("peak_allocated_gib", "peak_reserved_gib")
_COMPARED_WITHOUT_ALLOCATOR: Final = ("host_rss_gib",)


def add_to_log(numbers: Mapping[str, float], logs: dict[str, Any], state: Any) -> None:
    """Add `memory/…` keys to a training step's log, and to its copy for `trainer_state.json`, which Trainer has made
    before (transformers 5.23: trainer.py, `Trainer.log`)."""
    keys = {f"memory/{name}": value for name, value in numbers.items() if math.isfinite(value)}
    logs.update(keys)
    if state.log_history and state.log_history[-1].get("step") == state.global_step:
        state.log_history[-1].update(keys)


def over_ranks(numbers: Mapping[str, float], latest: Mapping[int, RankSample], *, since_step: int) -> dict[str, float]:
    """Mean, maximum and rank of the maximum of the main numbers (GiB), and the number of ranks. Only ranks count that
    published numbers since the previous logging step, `since_step`, or a few seconds ago. `numbers`: this rank's."""
    heard = {rank: sample for rank, sample in latest.items() if sample.step >= since_step or sample.age_s < _SILENT_S}
    fresh = {rank: sample.numbers for rank, sample in heard.items()}
    if not fresh:
        return {}
    statistics: dict[str, float] = {"ranks_heard": len(fresh)}
    allocator = any(name in numbers for name in _COMPARED)
    for name in _COMPARED if allocator else _COMPARED_WITHOUT_ALLOCATOR:
        values = {rank: numbers[name] for rank, numbers in fresh.items() if name in numbers}
        if not values:
            continue
        stem = name.removesuffix("_gib")
        statistics[f"{stem}_mean_gib"] = sum(values.values()) / len(values)
        statistics[f"{stem}_max_gib"] = max(values.values())
        statistics[f"{stem}_max_rank"] = max(values, key=lambda rank: values[rank])
    return statistics
