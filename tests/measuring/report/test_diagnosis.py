"""Problems over steps: recorded trainings, and for each rule made-up ones that it must find and that it must not."""

from __future__ import annotations

import gzip
import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hf_memkit.measuring.report.diagnosis import Finding, diagnose

# What MemoryReportCallback recorded of 28 trainings of a tiny GPT-2, whose tensors were counted through a copy of
# torch's allocator (benchmarks/diagnosis/real_runs.py at commit 10c073e). 14 are normal; `problems` has the others'.
RECORDED = json.loads(gzip.decompress((Path(__file__).parent / "recorded_trainings.json.gz").read_bytes()))

MIB = 1 / 1024
CAPACITY, CONTEXT, FLOOR = 16.0, 0.5, 4.0
Records = list[dict[str, Any]]
Level = Callable[[int], float]


def training(
    steps: int = 200,
    *,
    floor: Level = lambda step: 0.0,
    length: Callable[[int], int] = lambda step: 512,
    gap: Level = lambda step: 0.0,
    retries: Callable[[int], int] = lambda step: 0,
    others: Level = lambda step: 0.0,
    rss: Level = lambda step: 0.0,
    activations: float = 4.0,
) -> Records:
    """A normal training on a GPU of 16 GiB, and what is added to it (GiB, from step 1 on).

    4 GiB stay at step end, and 4 more are needed for a sequence of 512; the allocator caches 5 % more than the highest
    peak.
    """
    chance, highest, records = random.Random(0), 0.0, []
    for step in range(1, steps + 1):
        warm = 1 - math.exp(-step)
        held = FLOOR * (0.5 if step == 1 else 1.0) + floor(step) + abs(chance.gauss(0, MIB))
        peak = held + activations * length(step) / 512
        highest = max(highest, peak)
        reserved = min(highest * (1 + 0.05 * warm) + gap(step), CAPACITY - CONTEXT - others(step))
        record: dict[str, Any] = {
            "kind": "step", "step": step, "samples": 8, "micro_batches": 1, "tokens": 8 * length(step),
            "longest_sequence": length(step), "allocated_gib": held, "reserved_gib": reserved,
            "peak_allocated_gib": peak, "peak_reserved_gib": reserved, "capacity_gib": CAPACITY,
            "alloc_retries": retries(step), "host_rss_gib": 2 + 0.2 * warm + rss(step),
            "host_available_gib": 60 - rss(step),
        }  # fmt: skip
        if step % 5 == 1:
            used = reserved + CONTEXT * warm + others(step)
            record |= {"device_used_gib": used, "outside_allocator_gib": CONTEXT * warm}
        records.append(record)
    return records


def changing(least: int, most: int) -> Callable[[int], int]:
    chance = random.Random(0)
    lengths = [chance.randint(least, most) for _ in range(401)]
    return lengths.__getitem__


def kinds(records: Records, *args: Any, **kwargs: Any) -> list[str]:
    return [finding.kind for finding in diagnose(records, *args, **kwargs)]


def only(records: Records, *args: Any, **kwargs: Any) -> Finding:
    (finding,) = diagnose(records, *args, **kwargs)
    return finding


def without(records: Records, *names: str) -> Records:
    return [{name: value for name, value in record.items() if name not in names} for record in records]


@pytest.mark.parametrize("name", RECORDED)
def test_recorded_trainings(name: str) -> None:
    run = dict(RECORDED[name])
    problems, start, capacity = (run.pop(key) for key in ("problems", "start_step", "capacity_gib"))
    records = [dict(zip(run, values, strict=True)) for values in zip(*run.values(), strict=True)]
    for record in records:
        record["phases"] = {"data": {"peak_reserved_gib": record.pop("reserved_before_forward_gib")}}
    found = kinds(records, {"start_step": start, "hardware": {"capacity_gib": capacity}})
    assert sorted(found) == problems


short, long = changing(100, 400), changing(500, 1200)

FOUND: dict[str, tuple[Records, str, range]] = {
    "a leak in each step": (training(floor=lambda s: 5 * MIB * s), "leak", range(1, 2)),
    "a leak under changing lengths": (training(floor=lambda s: 5 * MIB * s, length=short), "leak", range(1, 2)),
    "a leak in each evaluation": (training(floor=lambda s: 0.3 * (s // 25)), "leak", range(1, 2)),
    "a leak that began in the middle": (training(floor=lambda s: 5 * MIB * max(0, s - 80)), "leak", range(74, 88)),
    "a leak that began late": (training(floor=lambda s: 5 * MIB * max(0, s - 150)), "leak", range(140, 160)),
    "longer batches from a step on": (
        training(length=lambda s: short(s) if s < 120 else long(s)),
        "longer batches",
        range(120, 125),
    ),
    "ever longer batches": (training(length=lambda s: 300 + 3 * s), "longer batches", range(60, 140)),
    "one longer batch that fills the GPU": (
        training(length=lambda s: 1350 if s == 143 else short(s)),
        "longer batches",
        range(143, 144),
    ),
    "fragmentation": (
        training(gap=lambda s: 0.07 * max(0, s - 80), retries=lambda s: max(0, s - 190)),
        "fragmentation",
        range(191, 192),
    ),
    "another process": (training(others=lambda s: 3.0 if s >= 104 else 0.0), "another process", range(106, 107)),
    "another process that grows": (
        training(others=lambda s: max(0.0, 0.02 * (s - 60))),
        "another process",
        range(97, 103),
    ),
}

NORMAL: dict[str, Records] = {
    "nothing": training(),
    "changing lengths": training(400, length=changing(100, 512)),
    "lengths that change little near the GPU's limit": training(length=changing(440, 512), activations=10.6),
    "a jump": training(floor=lambda s: 1.0 if s > 120 else 0.0),
    "jumps, as layers are unfrozen": training(floor=lambda s: 0.4 * (s // 50)),
    "levels off": training(floor=lambda s: 2 * (1 - math.exp(-s / 40))),
    "levels off late": training(floor=lambda s: 2 * (1 - math.exp(-s / 100))),
    "slows down": training(floor=lambda s: 0.4 * math.log1p(s / 5)),
    "a cache that filled in 80 % of the run": training(floor=lambda s: 2 * min(1, s / 160)),
    "collected every 90 steps": training(floor=lambda s: 0.03 * (s % 90)),
    "collected every 130 steps": training(floor=lambda s: 0.02 * (s % 130)),
    "up and down": training(floor=lambda s: 1.0 if 60 < s < 140 else 0.0),
    "a trickle": training(floor=lambda s: 15 * MIB * s / 200),
    "falls, and ends with a peak": [
        {"step": s, "allocated_gib": 5.0 if s <= 152 else 4.0 if s <= 197 else 9.0} for s in range(1, 201)
    ],
    "host memory that jumps": training(rss=lambda s: 0.5 if s > 60 else 0.0),
    "host memory that levels off": training(rss=lambda s: 1 - math.exp(-s / 40)),
    "host memory that creeps": training(rss=lambda s: MIB * s),
    "one longer batch that leaves room": training(length=lambda s: 800 if s == 143 else short(s)),
    "a long batch in the first steps and later": training(length=lambda s: 1350 if s in (4, 143) else short(s)),
    "slightly longer batches": training(length=lambda s: 400 if s < 100 else 470),
    "a somewhat longer batch near the GPU's limit": training(
        length=lambda s: 490 if s == 143 else 400 - s % 9, activations=10.6
    ),
    "retries beside a cache of the highest peak": training(
        length=lambda s: 1300 if s == 4 else 60, retries=lambda s: s // 20
    ),
    "a large cache with room": training(gap=lambda s: 0.02 * s),
    "two retries": training(gap=lambda s: 8.0, retries=lambda s: s // 80),
    "retries of a job that fills the GPU": training(activations=10.8, retries=lambda s: s // 10),
    "another process from the start": training(others=lambda s: 3.0),
    "a desktop": training(others=lambda s: 0.15 * (s % 3)),
    "one reading while memory changed hands": training(others=lambda s: 4.0 if s == 101 else 0.0),
}


@pytest.mark.parametrize("name", FOUND)
def test_a_problem_is_found_where_it_began(name: str) -> None:
    records, kind, began = FOUND[name]
    found = only(records)
    assert found.kind == kind and found.first_step in began
    assert found.why and found.fix and "\n" not in found.why + found.fix
    assert json.loads(json.dumps(found.to_json()))["figures"] == found.figures
    assert kinds(records[:20]) == []


@pytest.mark.parametrize("name", NORMAL)
def test_what_is_normal_is_not_reported(name: str) -> None:
    assert diagnose(NORMAL[name]) == []


@pytest.mark.parametrize("name", FOUND)
def test_any_field_may_be_missing(name: str) -> None:
    records, kind, _ = FOUND[name]
    for field in records[0].keys() - {"step"}:
        assert set(kinds(without(records, field))) <= {kind}
    chance = random.Random(0)
    holes = [{key: value for key, value in r.items() if key == "step" or chance.random() > 0.02} for r in records]
    if "one longer batch" not in name:
        assert kinds(holes) == [kind]


def test_several_at_once() -> None:
    records = training(
        400,
        floor=lambda s: 3 * MIB * s,
        length=lambda s: 512 if s < 200 else 1000,
        others=lambda s: 2.0 if s > 300 else 0.0,
        activations=2,
    )
    assert kinds(records) == ["leak", "longer batches", "another process"]


def test_figures_of_a_leak() -> None:
    figures = only(training(floor=lambda s: 10 * MIB * s)).figures
    assert figures["rise_mib_per_step"] == pytest.approx(10, rel=0.05) and figures["last_step"] == 200
    # The peak of step 200 is 4 + 4 + 1.95 GiB; (16 − 0.5 − 9.95) GiB at 10 MiB a step are 568 steps.
    assert figures["projected_full_step"] == pytest.approx(200 + 568, abs=25)


def test_a_leak_in_host_memory() -> None:
    records = training(80, rss=lambda s: 5 * MIB * s)
    on_a_cpu = [{key: r[key] for key in ("step", "host_rss_gib", "host_available_gib")} for r in records]
    for found in (only(records), only(on_a_cpu)):
        assert found.kind == "leak" and "host memory" in found.why
        assert found.figures["host_rise_mib_per_step"] == pytest.approx(5, rel=0.1)
    # Pages of a memory-mapped dataset are resident, but available.
    assert diagnose([record | {"host_available_gib": 60.0} for record in records]) == []


def test_growth_that_the_records_name_is_no_leak() -> None:
    records = training(floor=lambda s: 0.3 * (s // 20))
    for record in records[9::10]:
        record["held"] = {"device": {"weights_gib": 2.0, "optimizer_gib": 1 + 0.3 * (record["step"] // 20)}}
    assert diagnose(records) == []
    for record in records[9::10]:
        record["held"]["device"]["optimizer_gib"] = 1.0
    assert kinds(records) == ["leak"]


def test_only_the_steps_since_a_resume_count() -> None:
    records = training(gap=lambda s: 8.0, retries=lambda s: s // 20 if s <= 100 else 0)
    assert kinds(records[:100]) == ["fragmentation"]
    assert diagnose(records, {"start_step": 100}) == []


def test_a_peak_that_rose_for_another_reason_is_no_longer_batch() -> None:
    records = training(length=lambda s: 600 if s == 130 else short(s), activations=2)
    for record in records[120:]:
        record["peak_allocated_gib"] += 4
        record["peak_reserved_gib"] += 4
    assert diagnose(records) == []


def test_a_cap_of_the_allocator_is_what_can_be_filled() -> None:
    records = training(length=lambda s: 820 if s == 143 else 300 + s % 3)
    assert diagnose(records) == []
    assert kinds(records, {"hardware": {"allocator_cap_fraction": 0.7}}) == ["longer batches"]


def test_the_longer_batch_that_ended_the_run() -> None:
    records = training(100, length=short)
    oom = {"step": 101, "longest_sequence": 2048, "allocated_gib": 12.0, "requested_gib": 3.5}
    assert only(records, ooms=[oom]).first_step == 101
    assert diagnose(records, ooms=[oom | {"longest_sequence": 300}]) == []
    assert diagnose(records, ooms=[oom | {"allocated_gib": 1.0}]) == []
    assert diagnose(records, ooms=[oom | {"step": 50}]) == []


def test_the_fix_of_fragmentation() -> None:
    records = FOUND["fragmentation"][0]
    assert only(records).figures["alloc_retries"] == 10 and "expandable_segments:True" in only(records).fix
    already = {"hardware": {"allocator_settings": "expandable_segments:True"}}
    assert "already" in only(records, already).fix


def test_an_evaluation_that_needs_more_than_the_steps_is_no_fragmentation() -> None:
    """Each fills the GPU between two steps, and leaves a cache that the next step frees."""
    records = training(gap=lambda s: 8.0 if s % 25 == 5 else 0.0, retries=lambda s: (s + 20) // 25)
    for record in records:
        start = 15.0 if record["step"] % 25 == 5 else 8.0
        record["phases"] = {"data": {"peak_reserved_gib": start}}
    assert diagnose(records) == []
    assert kinds(without(records, "phases")) == ["fragmentation"]


def test_another_process_where_the_reader_names_it_or_cannot_tell_this_process_apart() -> None:
    named = [r | {"other_processes_gib": 0.1 if r["step"] < 50 else 2.1} for r in training()]
    assert only(named).first_step == 50 and "other processes" in only(named).why
    unknown = without(training(others=lambda s: 3.0 if s > 100 else 0.0), "outside_allocator_gib")
    assert kinds(unknown) == ["another process"] and "context" in only(unknown).why
    late_context = without(training(others=lambda s: 0.4 if s > 40 else 0.0), "outside_allocator_gib")
    early_communicators = without(training(others=lambda s: 1.5 if s > 2 else 0.0), "outside_allocator_gib")
    assert diagnose(late_context) == [] and diagnose(early_communicators) == []


def test_a_library_of_this_process_and_another_gpu_are_no_other_process() -> None:
    library, other_gpu = training(), training()
    for record in (r for r in library[100:] if "device_used_gib" in r):
        record["device_used_gib"] += 2
        record["outside_allocator_gib"] += 2
    for record in (r for r in other_gpu if "device_used_gib" in r):
        record["device_used_gib"] = 1.0 if record["step"] < 100 else 3.0
    assert diagnose(library) == [] and diagnose(other_gpu) == []
