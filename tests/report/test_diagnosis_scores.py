"""The diagnosis against runs whose truth is known: 300 generated ones in two halves, and real trainings."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from benchmarks.diagnosis.generated_runs import RUNS, generate, runs
from benchmarks.diagnosis.scores import KINDS, Scores, score
from hf_memkit.report.diagnosis import diagnose
from tests.record_shape import misfits

MIB = 2**20


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


@pytest.mark.exhaustive
def test_held_out_half() -> None:
    _assert_good(score(runs("held-out"), diagnose), detection=0.95, alarms=0.02)


@pytest.mark.exhaustive
def test_real_trainings(tmp_path: Path) -> None:
    from benchmarks.diagnosis.real_runs import real_runs

    found = score(real_runs(tmp_path), diagnose)
    assert found.runs >= 20
    _assert_good(found, detection=0.9, alarms=0.0)


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
