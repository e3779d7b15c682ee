"""A leak: found where it began; and what rises, jumps or is collected, and is none."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from hf_memkit.report.diagnosis import diagnose
from tests.report.made_steps import (
    MIB,
    SEEDS,
    Level,
    Records,
    changing_lengths,
    kinds,
    nothing,
    only,
    since,
    training,
)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("begin", [1, 60, 150])
@pytest.mark.parametrize("lengths", ["fixed", "changing"])
def test_a_leak_is_found_where_it_began(seed: int, begin: int, lengths: str) -> None:
    length = changing_lengths(seed) if lengths == "changing" else lambda step: 512
    records = training(floor=since(begin, lambda n: 5 * MIB * n), length=length, noise=3, seed=seed)
    leak = only(records, "leak")
    assert abs(leak.first_step - begin) <= 6
    assert leak.figures["rise_mib_per_step"] == pytest.approx(5, rel=0.15)
    assert leak.figures["last_step"] == 200


def test_a_leak_says_when_the_gpu_is_full_and_calls_it_a_projection() -> None:
    leak = only(training(floor=lambda step: 10 * MIB * step), "leak")
    # Peak of step 200: 4 + 4 + 1.95 GiB; (16 − 9.95) GiB at 10 MiB a step are 619 steps.
    assert leak.figures["projected_full_step"] == pytest.approx(200 + 619, abs=10)
    assert "projection" in leak.why and "detach" in leak.fix


def test_a_leak_of_each_evaluation_is_a_staircase() -> None:
    leak = only(training(floor=lambda step: 0.3 * (step // 25)), "leak")
    assert leak.first_step <= 25


def test_a_leak_is_found_beside_a_jump_and_warm_up() -> None:
    def floor(step: int) -> float:
        return 4 * MIB * step + (0.5 if step > 90 else 0) + 0.3 * (1 - math.exp(-step / 3))

    assert kinds(training(floor=floor)) == ["leak"]


def test_a_leak_before_and_after_a_resume_is_one() -> None:
    records = training(floor=lambda step: 5 * MIB * (step if step <= 100 else step - 100))
    leak = only(records, "leak", run={"start_step": 100})
    assert leak.first_step == 1


def test_a_leak_that_is_gone_since_the_resume_is_no_news() -> None:
    records = training(floor=lambda step: 5 * MIB * step if step <= 100 else 0)
    assert kinds(records, run={"start_step": 100}) == []
    assert kinds(records[:100]) == ["leak"]


def test_a_leak_that_began_late_is_found_after_a_level_that_settled() -> None:
    records = training(
        2000, floor=lambda step: 2 * (1 - math.exp(-step / 200)) + 4 * MIB * max(0, step - 1700), capacity=24
    )
    assert abs(only(records, "leak").first_step - 1700) <= 25


def test_a_leak_that_quickens_is_found() -> None:
    assert kinds(training(floor=lambda step: MIB * step + 4 * MIB * max(0, step - 100))) == ["leak"]


def test_a_leak_is_found_under_what_is_collected_now_and_then() -> None:
    assert kinds(training(floor=lambda step: 3 * MIB * step + 0.004 * (step % 30))) == ["leak"]


def test_a_leak_is_found_in_spite_of_one_low_reading() -> None:
    assert kinds(training(floor=lambda step: 5 * MIB * step - (1 if step == 190 else 0))) == ["leak"]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("begin", "end"), [(50, 90), (90, 145)])
def test_a_leak_that_pauses_is_one_from_its_beginning(seed: int, begin: int, end: int) -> None:
    records = training(floor=lambda step: 5 * MIB * (step - min(max(step - begin, 0), end - begin)), seed=seed)
    leak = only(records, "leak")
    assert leak.first_step == 1
    assert leak.figures["rise_mib_per_step"] == pytest.approx(5, rel=0.25)


def test_a_leak_is_found_under_what_is_held_for_some_steps() -> None:
    assert kinds(training(floor=lambda step: 5 * MIB * step + (0.5 if 80 <= step < 110 else 0))) == ["leak"]


def at(*jumps: tuple[int, float]) -> Level:
    return lambda step: sum(size for begin, size in jumps if step >= begin)


LEVEL: dict[str, Level] = {
    "six like jumps, and no more": at(*((20 * k, 0.3) for k in range(1, 7))),
    "seven jumps, two far apart": at(*((k, 0.3) for k in (8, 16, 24, 32, 40, 48, 190))),
    "three large jumps on a trickle": lambda step: 0.2 * MIB * step + at((60, 1), (110, 1), (185, 0.5))(step),
    "gathered in half of 100 steps, then dropped": lambda step: 0.03 * max(0, (step - 1) % 100 - 50),
    "gathered in the last half of 70 steps, then dropped": lambda step: 0.03 * max(0, (step + 10) % 70 - 35),
    "a cache that fills twice": lambda step: min(step, 60) / 30 + min(max(0, step - 100), 60) / 30,
    "half the run between two parts of a cache": lambda step: min(step, 40) / 30 + min(max(0, step - 140), 40) / 30,
    "flat": nothing,
    "one jump": lambda step: 1.0 if step > 120 else 0,
    "three jumps, as layers are unfrozen": lambda step: 0.4 * (step // 50),
    "levels off over a fifth of the run": lambda step: 2 * (1 - math.exp(-step / 40)),
    "levels off over half of the run": lambda step: 2 * (1 - math.exp(-step / 100)),
    "logarithm": lambda step: 0.4 * math.log1p(step / 5),
    "square root": lambda step: 0.15 * math.sqrt(step),
    "a cache that fills in half the run": lambda step: 2 * min(1, step / 100),
    "a cache that fills in 80 % of the run": lambda step: 2 * min(1, step / 160),
    "collected every 40 steps": lambda step: 0.05 * (step % 40),
    "collected every 90 steps": lambda step: 0.03 * (step % 90),
    "collected every 130 steps": lambda step: 0.02 * (step % 130),
    "up and down again": lambda step: 1.0 if 60 < step < 140 else 0,
    "falls": lambda step: 1 - step / 200,
    "15 MiB in all": lambda step: 15 * MIB * step / 200,
}


@pytest.mark.parametrize("shape", LEVEL)
def test_a_floor_that_does_not_go_on_rising_is_no_leak(shape: str) -> None:
    for seed in SEEDS:
        for noise in (0.0, 1.0, 10.0):
            assert diagnose(training(floor=LEVEL[shape], noise=noise, seed=seed)) == []


def test_what_only_the_longest_input_so_far_adds_is_no_leak() -> None:
    length = changing_lengths(1)
    highest = list(itertools.accumulate((length(step) for step in range(201)), max))
    assert diagnose(training(floor=lambda step: highest[step] / 200, length=length, noise=0)) == []


def test_what_follows_the_inputs_step_by_step_is_no_leak() -> None:
    chance = random.Random(4)
    length = [500 if step == 10 else 200 + step + chance.randint(-20, 20) for step in range(201)]
    records = training(floor=lambda step: length[step] / 200, length=length.__getitem__, activations=0.1, capacity=80)
    assert diagnose(records) == []


def test_what_each_new_longest_input_adds_is_no_leak() -> None:
    chance = random.Random(8)
    length = [100 + step if step % 12 == 0 else chance.randint(60, 100) for step in range(401)]
    highest = list(itertools.accumulate(length, max))
    records = training(400, floor=lambda step: highest[step] / 200, length=length.__getitem__, activations=0.1)
    assert diagnose(records) == []
    assert kinds([record | {"tokens": 1, "longest_sequence": 1} for record in records]) == ["leak"]


def test_little_of_a_large_floor_is_no_leak() -> None:
    assert diagnose(training(floor=lambda step: 40 + 0.3 * MIB * step, capacity=80)) == []


def test_counters_that_begin_again_tell_of_a_resume() -> None:
    records = training(
        floor=lambda step: 5 * MIB * (step if step <= 100 else step - 100),
        retries=lambda step: 2 if step <= 100 else 0,
    )
    assert kinds(records) == ["leak"]
    assert diagnose([record | {"alloc_retries": 0} for record in records]) == []


def test_optimizer_states_that_the_records_name_are_no_leak() -> None:
    records = training(floor=lambda step: 0.3 * (step // 20))
    for record in records[9::10]:
        record["held"] = {"device": {"weights_gib": 2.0, "optimizer_gib": 1 + 0.3 * (record["step"] // 20)}}
    assert diagnose(records) == []
    for record in records[9::10]:
        record["held"]["device"]["optimizer_gib"] = 1.0
    assert kinds(records) == ["leak"]


# The host's memory


def on_cpu(records: Records) -> Records:
    names = ("step", "host_rss_gib", "host_available_gib", "tokens", "longest_sequence")
    return [{name: record[name] for name in names} for record in records]


def test_a_leak_in_host_memory() -> None:
    records = training(80, rss=lambda step: 5 * MIB * step)
    for found in (only(records, "leak"), only(on_cpu(records), "leak")):
        assert "host memory" in found.why
        assert found.figures["host_rise_mib_per_step"] == pytest.approx(5, rel=0.1)
        assert found.figures["projected_host_full_step"] > 1000


@pytest.mark.parametrize(
    "rss",
    [
        nothing,
        lambda step: 0.5 if step > 30 else 0,
        lambda step: 0.3 * (step // 10),
        lambda step: 1 - math.exp(-step / 20),
        lambda step: 1.1 * MIB * step,
        lambda step: 0.6 * MIB * step - 1.8,
    ],
    ids=["flat", "a jump", "jumps", "levels off", "4 %", "42 MiB"],
)
def test_host_memory_that_creeps_or_jumps_is_no_leak(rss: Level) -> None:
    assert diagnose(on_cpu(training(80, rss=rss))) == []


def test_pages_of_a_memory_mapped_dataset_are_no_leak() -> None:
    records = training(rss=lambda step: 0.02 * step)
    for record in records:
        record["host_available_gib"] = 60.0
    assert diagnose(records) == []
    assert diagnose(on_cpu(records)) == []
    for record in records:
        del record["host_available_gib"]
    assert diagnose(records) == []
