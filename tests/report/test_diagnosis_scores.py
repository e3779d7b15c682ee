"""The diagnosis against runs whose truth is known: 300 generated ones in two halves, and real trainings."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from hf_memkit.report.diagnosis import diagnose
from tests.record_shape import misfits
from tests.report.diagnosis_scores import KINDS, Scores, score
from tests.report.generated_runs import RUNS, GeneratedRun, State, generate, half_of, runs
from tests.report.simulated_allocator import OutOfDeviceMemory, SimulatedAllocator

MIB = 2**20


@dataclasses.dataclass(frozen=True)
class Said:
    """What a toy detector finds."""

    kind: str
    first_step: int


def _assert_good(scores: Scores, *, detection: float, alarms: float) -> None:
    report = "\n".join([scores.text(), *scores.wrong])
    print(report)
    assert scores.detection >= detection, report
    assert all(scores.detection_of(kind) >= detection - 0.05 for kind in KINDS if scores.states[kind]), report
    assert scores.false_alarms <= alarms, report
    assert scores.healthy_false_alarms <= alarms, report
    assert scores.first_step >= 0.9, report


def test_tune_half() -> None:
    _assert_good(score(runs("tune"), diagnose), detection=0.95, alarms=0.02)


def test_held_out_half() -> None:
    _assert_good(score(runs("held-out"), diagnose), detection=0.95, alarms=0.02)


@pytest.mark.longer
def test_real_trainings(tmp_path: Path) -> None:
    from tests.report.real_runs import real_runs

    found = score(real_runs(tmp_path), diagnose)
    assert found.runs >= 20
    _assert_good(found, detection=0.9, alarms=0.0)


# --- the judge ---


def test_a_detector_that_knows_the_truth_scores_full_marks_and_one_that_says_nothing_none() -> None:
    truth = {id(run.steps): run for run in runs("tune")}

    def oracle(steps: Sequence[Mapping[str, Any]], run: Mapping[str, Any]) -> list[Said]:
        return [Said(state.kind, state.first) for state in truth[id(steps)].states]

    perfect = score(truth.values(), oracle)
    assert (perfect.detection, perfect.false_alarms, perfect.first_step) == (1, 0, 1)
    assert not perfect.wrong
    mute = score(truth.values(), lambda steps, run: [])
    assert (mute.detection, mute.false_alarms) == (0, 0)


def test_false_alarms_and_wrong_dates_are_counted() -> None:
    steps = [{"step": step} for step in range(1, 101)]
    leaking = GeneratedRun("leaking", steps, {}, (State("leak", 30, 32),))
    healthy = GeneratedRun("healthy", steps, {}, ())

    def shouting(steps: Sequence[Mapping[str, Any]], run: Mapping[str, Any]) -> list[Said]:
        return [Said("leak", 43), Said("fragmentation", 1)]

    scores = score([leaking, healthy], shouting)
    assert (scores.detection, scores.false_alarms, scores.healthy_false_alarms) == (1, 1, 1)
    assert scores.false == Counter({"fragmentation": 2, "leak": 1})
    assert (scores.dated, scores.dated_right, scores.errors) == (1, 0, [0.11])


# --- the generator ---


def test_there_are_enough_runs_of_each_kind_in_each_half() -> None:
    halves: dict[str, Counter[str]] = {"tune": Counter(), "held-out": Counter()}
    for seed in range(RUNS):
        states = generate(seed).states
        halves[half_of(seed)].update([state.kind for state in states] or ["healthy"])
    assert RUNS >= 200
    for counts in halves.values():
        assert counts["healthy"] >= 0.4 * RUNS / 2
        assert all(counts[kind] >= 15 for kind in KINDS), counts


def test_generated_records_hold_what_the_contract_names_and_their_numbers_agree() -> None:
    for seed in range(0, RUNS, 7):
        run = generate(seed)
        for record in run.steps:
            assert not misfits({"kind": "step", **record})
            assert record["peak_allocated_gib"] <= record["peak_reserved_gib"] <= record["capacity_gib"]
            peaks = [phase["peak_allocated_gib"] for phase in record["phases"].values()]
            assert record["peak_allocated_gib"] == max(peaks)
            if "categories" in record:
                assert math.isclose(sum(record["categories"].values()), record["peak_allocated_gib"], rel_tol=1e-6)
        steps = [record["step"] for record in run.steps]
        assert steps == list(range(1, len(steps) + 1))


# --- the allocator under the generator ---


def test_the_allocator_keeps_to_the_cards_limit_and_knows_what_its_blocks_hold() -> None:
    left = [44 * MIB]
    allocator = SimulatedAllocator(lambda: left[0])
    allocator.watching = True
    allocator.allocate(5 * MIB, "weights")
    cached = allocator.allocate(20 * MIB, "loss")
    assert allocator.at_peak == {"weights": 5 * MIB, "loss": 20 * MIB}
    allocator.release(cached)
    allocator.allocate(22 * MIB, "loss")  # only if the cached 20 go back
    assert (allocator.reserved, allocator.retries) == (42 * MIB, 1)
    left[0] = 40 * MIB  # another process has come
    with pytest.raises(OutOfDeviceMemory):
        allocator.allocate(MIB, "other")
    assert allocator.by_tag == {"weights": 5 * MIB, "loss": 22 * MIB}
