"""Longer batches, fragmentation, another process: each kind, and what looks like it and is not."""

from __future__ import annotations

import random
from typing import Any

import pytest

from hf_memkit.report.diagnosis import diagnose
from tests.report.made_steps import (
    CAPACITY,
    SEEDS,
    Level,
    changing_lengths,
    fragments,
    kinds,
    only,
    training,
)

# Longer batches


@pytest.mark.parametrize("seed", SEEDS)
def test_longer_batches_are_found_where_they_began(seed: int) -> None:
    short, long = changing_lengths(seed, 100, 400), changing_lengths(seed, 500, 1200)
    found = only(training(length=lambda step: short(step) if step < 120 else long(step), seed=seed), "longer batches")
    assert 120 <= found.first_step <= 125
    assert found.figures["peak_gib"] > found.figures["peak_before_gib"]
    assert "tokens" in found.why and "group_by_length" in found.fix


def test_lengths_that_grow_slowly_are_longer_batches() -> None:
    chance = random.Random(2)
    length = [int((300 + 3 * max(0, step - 60)) * chance.uniform(0.7, 1)) for step in range(201)]
    found = only(training(length=length.__getitem__), "longer batches")
    assert 60 <= found.first_step <= 70


def test_lengths_that_were_short_by_chance_are_not_where_it_began() -> None:
    chance = random.Random(7)
    ranges = [(100, 200)] * 40 + [(100, 400)] * 210 + [(500, 1000)] * 151
    length = [chance.randint(*both) for both in ranges]
    assert only(training(400, length=length.__getitem__), "longer batches").first_step == 250


def test_one_longer_batch_that_fills_the_gpu() -> None:
    short = changing_lengths(5)
    found = only(training(length=lambda step: 1350 if step == 143 else short(step)), "longer batches")
    assert found.first_step == 143


def test_one_longer_batch_that_leaves_room_is_no_news() -> None:
    short = changing_lengths(5)
    assert diagnose(training(length=lambda step: 800 if step == 143 else short(step))) == []


def test_a_peak_that_rose_for_another_reason_is_no_longer_batch() -> None:
    records = training(length=changing_lengths(3), activations=2)
    for record in records[120:]:
        record["peak_allocated_gib"] += 4
        record["peak_reserved_gib"] += 4
    assert "longer batches" not in kinds(records)


def test_a_peak_is_no_longer_batch_for_one_long_input_among_others() -> None:
    length = changing_lengths(3)
    records = training(length=lambda step: 600 if step == 130 else length(step), activations=2)
    for record in records[120:]:
        record["peak_allocated_gib"] += 4
        record["peak_reserved_gib"] += 4
    assert "longer batches" not in kinds(records)


def test_one_peak_with_an_input_that_is_not_the_longest() -> None:
    records = training(length=lambda step: 512 if step % 20 == 0 else 490 if step % 20 == 1 else 300)
    records[140]["peak_allocated_gib"] = 15.0
    assert records[140]["longest_sequence"] == 490
    assert "longer batches" not in kinds(records)


def test_a_job_that_always_fills_the_gpu_is_healthy() -> None:
    length = changing_lengths(1, 470, 512)
    records = training(length=lambda step: int(length(step) * (0.94 if step < 40 else 1)), activations=10.6)
    assert max(record["peak_allocated_gib"] for record in records) > 0.9 * CAPACITY
    assert diagnose(records) == []


def test_slightly_longer_batches_are_no_news() -> None:
    assert diagnose(training(length=lambda step: 400 if step < 100 else 470)) == []


def test_a_share_of_the_gpu_is_what_can_be_filled() -> None:
    records = training(length=lambda step: 620 if step == 143 else 300 + step % 3)
    assert diagnose(records) == []
    assert kinds(records, run={"hardware": {"allocator_cap_fraction": 0.57}}) == ["longer batches"]


def test_the_longer_batch_that_ended_the_run() -> None:
    records = training(100, length=changing_lengths(6))
    oom = {"step": 101, "longest_sequence": 2048, "allocated_gib": 12.0, "requested_gib": 3.5}
    assert only(records, "longer batches", ooms=[oom]).first_step == 101
    assert diagnose(records, ooms=[oom | {"longest_sequence": 400}]) == []
    assert diagnose(records, ooms=[oom | {"step": 50}]) == []


# Fragmentation


def test_fragmentation_is_found_where_it_began() -> None:
    records = training(gap=fragments, retries=lambda step: max(0, step - 190))
    found = only(records, "fragmentation")
    assert 80 <= found.first_step <= 100
    assert found.figures["alloc_retries"] == 10
    assert "expandable_segments:True" in found.fix
    run = {"hardware": {"allocator_settings": "expandable_segments:True"}}
    assert "already" in only(records, "fragmentation", run=run).fix


def test_fragmentation_from_the_start_shows_in_retries() -> None:
    found = only(training(gap=lambda step: 8.0, retries=lambda step: step // 30), "fragmentation")
    assert found.first_step == 30
    assert diagnose(training(gap=lambda step: 8.0)) == []


def test_fragmentation_without_a_known_capacity_needs_retries() -> None:
    records = training(gap=fragments)
    again = training(gap=fragments, retries=lambda step: max(0, step - 150))
    for record in records + again:
        del record["capacity_gib"]
    assert diagnose(records) == []
    assert kinds(again) == ["fragmentation"]


def test_fragmentation_beside_a_neighbour_fills_what_is_left() -> None:
    records = training(activations=2, gap=lambda step: 0.02 * max(0, step - 50), others=lambda step: 6.0)
    assert kinds(records) == ["fragmentation"]


@pytest.mark.parametrize(
    "change",
    [
        {"gap": lambda step: 6.4 + 0.0025 * step},
        {"gap": lambda step: 8.0, "retries": lambda step: 5 if step > 100 else 0},
        {"gap": lambda step: 8.0, "retries": lambda step: step // 80},
        {"gap": lambda step: 3.0},
        {"gap": lambda step: 8.0 if step > 100 else 0.0},
        {"gap": lambda step: 0.01 * step},
        {"retries": lambda step: 1 if step > 100 else 0},
        {"activations": 10.8, "retries": lambda step: step // 10},
    ],
    ids=[
        "large slack that hardly grows",
        "retries at once",
        "two retries",
        "slack",
        "the cache of an evaluation",
        "far from the GPU",
        "one retry",
        "the GPU is full of tensors",
    ],
)
def test_what_looks_like_fragmentation(change: dict[str, Any]) -> None:
    for seed in SEEDS:
        assert diagnose(training(seed=seed, **change)) == []


def test_a_cache_as_large_as_the_highest_peak_is_no_fragmentation() -> None:
    length = changing_lengths(9, 20, 100)
    records = training(
        length=lambda step: 1000 if step == 4 else length(step), capacity=13, retries=lambda step: step // 20
    )
    assert min(record["fragmentation_gib"] for record in records[10:]) > 7
    assert diagnose(records) == []


# Another process


@pytest.mark.parametrize("own_context_known", [True, False])
def test_another_process_is_found_where_it_came(own_context_known: bool) -> None:
    records = training(others=lambda step: 3.0 if step >= 104 else 0.0, own_context_known=own_context_known)
    found = only(records, "another process")
    assert found.first_step == 106  # the first reading of NVML after it came
    assert found.figures["rise_gib"] == pytest.approx(3, abs=0.1)
    assert "nvidia-smi" in found.fix


def test_another_process_as_the_reader_names_it() -> None:
    records = training()
    for record in records:
        record["other_processes_gib"] = 0.1 if record["step"] < 50 else 2.1
    assert only(records, "another process").first_step == 50


def test_another_process_that_grows() -> None:
    assert kinds(training(others=lambda step: max(0.0, 0.02 * (step - 60)))) == ["another process"]


def test_retries_that_another_process_causes_are_no_fragmentation() -> None:
    records = training(others=lambda step: 6.9 if step > 100 else 0, retries=lambda step: max(0, step - 110) // 5)
    assert kinds(records) == ["another process"]


@pytest.mark.parametrize(
    "others",
    [lambda step: 3.0, lambda step: 0.15 * (step % 3), lambda step: 4.0 if step == 101 else 0.0],
    ids=["there from the start", "a desktop", "one reading"],
)
def test_what_looks_like_another_process(others: Level) -> None:
    assert diagnose(training(others=others)) == []


def test_a_context_that_grows_late_is_no_other_process() -> None:
    records = training(own_context_known=False)
    for record in records[40:]:
        if "device_used_gib" in record:
            record["device_used_gib"] += 0.4
    assert diagnose(records) == []


def test_a_library_of_this_process_is_no_other_process() -> None:
    records = training()
    for record in records[100:]:
        if "device_used_gib" in record:
            record["device_used_gib"] += 2
            record["outside_allocator_gib"] += 2
    assert diagnose(records) == []


def test_communicators_of_the_first_step_are_no_other_process() -> None:
    records = training(others=lambda step: 1.5 if step > 2 else 0.0, own_context_known=False, nvml_every=2)
    for record in records:
        if record["step"] == 1:
            assert "device_used_gib" in record
    assert diagnose(records) == []


def test_readings_of_another_gpu_are_no_other_process() -> None:
    records = training()
    for record in records:
        if "device_used_gib" in record:
            record["device_used_gib"] = 1.0 if record["step"] < 100 else 3.0
    assert diagnose(records) == []


def test_little_of_a_large_gpu_is_no_news() -> None:
    assert diagnose(training(others=lambda step: 0.5 if step > 100 else 0.0, capacity=80)) == []
    assert kinds(training(others=lambda step: 0.5 if step > 100 else 0.0)) == ["another process"]
