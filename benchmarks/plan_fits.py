"""Every published training whose memory is predicted: does a plan say that it fits, and did it run?

A plan calls a setup fitting if the most that it may reserve and what lies outside the allocator take at most 92 % of
the GPU (`hf_memkit/catalog/fit.py`). A false "fits" is one of a training that ran out of memory on this
GPU.

Nearly all of these trainings had a GPU much larger than they needed. So the same is asked of smaller ones: on the
smallest GPU that a plan would have let each run on, was there room for the tensors that it was measured to hold at its
peak, with the context? What it reserved beyond them tells nothing: on a smaller GPU the allocator gives that back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from benchmarks.published_summary import ALLOCATED
from hf_memkit.catalog.fit import FULL_SHARE
from hf_memkit.catalog.hardware import described_machine
from hf_memkit.common.units import GIB

Row = Mapping[str, Any]
Found = dict[str, Any]

_COMPARABLE: Final = ("same", "near")


def judged(rows: Iterable[Row]) -> list[Found]:
    """Each row of results/published.json that has a prediction: with the libraries of its day where there is one."""
    return [_judged(row, which) for row in rows if (which := _which(row)) is not None]


def _which(row: Row) -> str | None:
    return next((each for each in ("then", "today") if "peak_reserved_gib" in row.get(each, {})), None)


def _judged(row: Row, which: str) -> Found:
    answer = row[which]
    gpu = described_machine(row["gpu"].removeprefix("NVIDIA "), None, None, None).gpu
    assert gpu is not None
    capacity = gpu.capacity_bytes / GIB
    needs = answer["peak_reserved_gib"][1] + answer["outside_allocator_gib"]
    ran = row.get("outcome") != "out_of_memory"
    found: Found = {
        "id": row["id"], "gpu": row["gpu"], "gpus": row["gpus"], "libraries": which,
        # What today's libraries allocate may be something else than those of the training did.
        "code": "same" if which == "then" else row.get("code", "not compared"),
        "needs_gib": needs, "capacity_gib": capacity, "fits": needs <= FULL_SHARE * capacity,
        "ran": ran, "measured": row["measured"], "gib": row.get("gib"),
    }  # fmt: skip
    found["false_fit"] = found["fits"] and not ran
    if row["measured"] in ALLOCATED and row.get("gib") is not None:
        held = row["gib"] + answer["outside_allocator_gib"]
        found["held_of_smallest_gpu"] = held / (needs / FULL_SHARE)
    return found


def summary(rows: Sequence[Found]) -> Found:
    """Counts, and the lists that must be empty."""
    virtual = [each for each in rows if "held_of_smallest_gpu" in each]
    over = [each for each in virtual if each["held_of_smallest_gpu"] > 1]
    return {
        "full_share": FULL_SHARE,
        "rows": len(rows),
        "out_of_memory": sum(not each["ran"] for each in rows),
        "false_fits": [each["id"] for each in rows if each["false_fit"]],
        "ran_and_fit": sum(each["ran"] and each["fits"] for each in rows),
        "ran_and_called_not_fitting": [each["id"] for each in rows if each["ran"] and not each["fits"]],
        "of_these_below_the_whole_gpu": [
            each["id"]
            for each in rows
            if each["ran"] and not each["fits"] and each["needs_gib"] <= each["capacity_gib"]
        ],
        "smaller_gpus": {
            "rows": len(virtual),
            "too_small": [each["id"] for each in over if each["code"] in _COMPARABLE],
            "too_small_with_other_code": [each["id"] for each in over if each["code"] not in _COMPARABLE],
            "fullest": max(
                (each["held_of_smallest_gpu"] for each in virtual if each["code"] in _COMPARABLE), default=None
            ),
        },
    }


def not_judged(rows: Iterable[Row], groups: Iterable[Row]) -> Found:
    """What has no prediction: reason → how many trainings; and those of the groups that ran out of memory, by id."""
    reasons: Counter[str] = Counter()
    for row in rows:
        if _which(row) is None:
            reasons[row.get("not_predicted") or row.get("today", {}).get("error", "not predicted")] += 1
    return {
        "memory": dict(sorted(reasons.items())),
        "out_of_memory": {name: group["reason"] for group in groups for name in group.get("out_of_memory", ())},
    }
