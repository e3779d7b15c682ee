"""What is told because it fills the GPU: a cache that lies idle, a few long inputs; and what looks like them."""

from __future__ import annotations

from typing import Any

import pytest

from hf_memkit.report.diagnosis import diagnose
from tests.report.made_steps import (
    CAPACITY,
    CONTEXT,
    SEEDS,
    Level,
    Records,
    changing_lengths,
    kinds,
    only,
    training,
)

# A cache that lies idle


def with_phases(records: Records, *, between: Level = lambda step: 0.0, loaded: float = 2.0) -> Records:
    """The same records with what was reserved before each step's first forward: what the step before left, and
    `between`. The first step begins with `loaded`."""
    before = loaded
    for record in records:
        start = min(before + between(record["step"]), record["peak_reserved_gib"])
        record["phases"] = {
            "data": {"peak_allocated_gib": record["allocated_gib"], "peak_reserved_gib": start},
            "forward": {key: record[key] for key in ("peak_allocated_gib", "peak_reserved_gib")},
        }
        before = record["reserved_gib"]
    return records


def brim(step: int) -> float:
    """Fills the GPU of 16 GiB, of which the tensors need 8."""
    return 8.0 if step > 2 else 1.0


def test_a_full_gpu_that_lies_half_idle_is_fragmentation() -> None:
    found = only(with_phases(training(gap=brim)), "fragmentation")
    assert found.first_step == 3
    assert found.figures["gap_gib"] > CAPACITY / 3
    assert "cudaMalloc" not in found.why


def test_fragmentation_that_came_late_and_at_once() -> None:
    assert only(with_phases(training(gap=lambda step: 8.0 if step > 120 else 1.0)), "fragmentation").first_step == 121


def test_one_retry_in_a_gpu_that_is_nearly_full() -> None:
    change: dict[str, Any] = {"gap": lambda step: 5.7 if step > 30 else 0.5}
    assert diagnose(with_phases(training(**change))) == []
    found = only(with_phases(training(**change, retries=lambda step: int(step > 30))), "fragmentation")
    assert found.first_step == 31
    assert "tried again once" in found.why


def test_what_was_reserved_outside_the_steps_is_no_fragmentation() -> None:
    late: Level = lambda step: 8.0 if step > 120 else 1.0  # noqa: E731
    assert diagnose(with_phases(training(gap=late), between=lambda step: 20.0 * (step == 121))) == []
    assert diagnose(with_phases(training(gap=lambda step: 8.0), loaded=20.0)) == []
    assert diagnose(training(gap=brim)) == []  # nothing is known of the phases


def test_evaluations_that_need_more_than_the_steps_are_no_fragmentation() -> None:
    """Each empties the cache, fills the GPU, and leaves its own cache."""
    records = training(gap=lambda step: 0.0 if step % 25 < 5 else 8.0, retries=lambda step: step // 25)
    assert diagnose(with_phases(records, between=lambda step: 20.0 * (step % 25 == 5))) == []
    assert kinds(with_phases(records)) == ["fragmentation"]


def test_what_an_evaluation_left_is_gone_after_a_retry() -> None:
    def gap(step: int) -> float:
        return 8.0 if 40 <= step < 60 or step >= 80 else 0.5

    records = training(gap=gap, retries=lambda step: int(step >= 60))
    assert only(with_phases(records, between=lambda step: 20.0 * (step == 40)), "fragmentation").first_step == 80


def test_little_reserved_between_steps_hides_no_fragmentation() -> None:
    records = training(gap=lambda step: brim(step) + (0.1 if step > 100 else -0.5))
    assert kinds(with_phases(records, between=lambda step: 20.0 * (step == 101))) == ["fragmentation"]


@pytest.mark.parametrize("change", [{"micro_batches": 4}, {"steps": 4}], ids=str)
def test_where_a_record_holds_several_forwards_it_is_left_open_who_reserved(change: dict[str, int]) -> None:
    records = with_phases(training(gap=brim), between=lambda step: 20.0 * (step <= 3))
    assert diagnose([record | change for record in records]) == []
    retried = with_phases(training(gap=brim, retries=lambda step: step // 30), between=lambda step: 20.0 * (step <= 3))
    assert only([record | change for record in retried], "fragmentation").first_step == 30
    few = with_phases(training(gap=brim), between=lambda step: 0.1)
    assert kinds([record | change for record in few]) == ["fragmentation"]


@pytest.mark.parametrize(
    "change",
    [
        {"gap": lambda step: 5.5},
        {"activations": 9.5, "gap": lambda step: 1.5},
        {"activations": 1.0, "gap": lambda step: 7.0, "retries": lambda step: 1},
    ],
    ids=["a tenth of the GPU left", "the tensors need most of it", "much room, in spite of a retry"],
)
@pytest.mark.parametrize("seed", SEEDS)
def test_a_gap_or_a_full_gpu_alone_is_no_news(change: dict[str, Any], seed: int) -> None:
    assert diagnose(with_phases(training(seed=seed, **change))) == []


# A few long inputs


def at(giants: dict[int, int], seed: int = 5) -> Records:
    short = changing_lengths(seed)
    return training(length=lambda step: giants.get(step, short(step)))


@pytest.mark.parametrize("seed", SEEDS)
def test_a_few_long_inputs_of_which_the_last_fills_the_gpu(seed: int) -> None:
    found = only(at({60: 1150, 110: 1250, 170: 1320}, seed), "longer batches")
    assert found.first_step == 60
    assert found.figures["peak_step"] == 170


def test_a_few_long_inputs_that_leave_room_are_no_news() -> None:
    assert diagnose(at({60: 1000, 110: 1050, 170: 1150})) == []


def test_long_inputs_that_are_known_from_the_first_steps_are_no_news() -> None:
    assert diagnose(at({4: 1320, 110: 1320})) == []


def test_long_inputs_that_are_a_part_of_the_data_are_no_news() -> None:
    assert diagnose(at(dict.fromkeys(range(11, 201, 7), 1320))) == []


def test_a_long_input_that_left_room_before_a_leak_filled_the_gpu() -> None:
    length = changing_lengths(5)
    records = training(floor=lambda step: 0.037 * step, length=lambda step: 700 if step == 60 else length(step))
    assert max(record["peak_allocated_gib"] for record in records) > 0.9 * CAPACITY
    assert kinds(records) == ["leak"]


def test_a_few_peaks_that_are_not_the_inputs_doing() -> None:
    records = at({40: 540, 60: 540})
    for step in (110, 170):
        records[step - 1]["peak_allocated_gib"] = 14.5
        records[step - 1]["longest_sequence"] = 300
        records[step - 1]["tokens"] = 2400
    assert diagnose(records) == []


def test_near_the_gpu_means_of_what_is_left_of_it() -> None:
    """A peak of 14.3 of 16 GiB: near with a usual context, far with a small one, as NVML says."""
    records = at({143: 1318})
    assert kinds(records) == ["longer batches"]
    small = [dict(record) for record in records]
    for record in small:
        if "device_used_gib" in record:
            record["device_used_gib"] -= CONTEXT - 0.05
            record["outside_allocator_gib"] = 0.05
    assert diagnose(small) == []
    for record in small:
        record.pop("device_used_gib", None)
    assert kinds(small, run={"hardware": {"device_type": "cuda"}}) == ["longer batches"]
    assert diagnose(small, {"hardware": {"device_type": "mps"}}) == []
