"""Several findings at once, records with holes, what a finding holds, and the time it takes."""

from __future__ import annotations

import json
import math
import random
import time

import pytest

from hf_memkit.report.diagnosis import diagnose
from hf_memkit.report.series import KINDS
from tests.report.made_steps import (
    MIB,
    SEEDS,
    Records,
    changing_lengths,
    fragments,
    kinds,
    since,
    training,
)


def test_several_at_once() -> None:
    records = training(
        400,
        floor=since(50, lambda n: 3 * MIB * n),
        others=lambda step: 2.0 if step >= 301 else 0.0,
        length=lambda step: 512 if step < 200 else 900,
        activations=3,
        capacity=24,
    )
    found = diagnose(records)
    assert [finding.kind for finding in found] == ["leak", "longer batches", "another process"]
    assert [finding.first_step for finding in found] == [pytest.approx(50, abs=8), 200, 301]


CASES: dict[str, Records] = {
    "leak": training(400, floor=lambda step: 5 * MIB * step, length=changing_lengths(1)),
    "longer batches": training(400, length=lambda step: 300 if step < 200 else 700),
    "fragmentation": training(400, gap=lambda step: fragments(step // 2), retries=lambda step: max(0, step - 380)),
    "another process": training(400, others=lambda step: 3.0 if step > 200 else 0.0, nvml_every=2),
    "": training(400, length=changing_lengths(1)),
}


@pytest.mark.parametrize("kind", CASES)
@pytest.mark.parametrize("seed", SEEDS)
def test_holes_in_the_records_change_nothing(kind: str, seed: int) -> None:
    chance = random.Random(seed)
    records = []
    for record in CASES[kind]:
        if chance.random() < 0.1:
            continue
        kept = {name: value for name, value in record.items() if name == "step" or chance.random() > 0.1}
        spoilt = {name: chance.choice([None, math.nan, "3", True]) for name in kept if chance.random() < 0.03}
        records.append(kept | {name: value for name, value in spoilt.items() if name != "step"})
    records += [{}, {"step": None}, {"step": "7"}, {"kind": "step"}]
    chance.shuffle(records)
    assert kinds(records) == ([kind] if kind else [])


@pytest.mark.parametrize("kind", CASES)
def test_no_field_is_needed(kind: str) -> None:
    """Each field away from all records: never an error, never another kind."""
    for name in CASES[kind][0]:
        records = [{key: value for key, value in record.items() if key != name} for record in CASES[kind]]
        assert set(kinds(records)) <= {kind}


@pytest.mark.parametrize("kind", CASES)
def test_records_that_stand_for_several_steps(kind: str) -> None:
    merged = []
    for i in range(100, 400, 4):
        part = CASES[kind][i : i + 4]
        names = ("tokens", "longest_sequence", "allocated_gib", "host_rss_gib")
        means = {name: sum(record[name] for record in part) / 4 for name in names}
        peaks = {name: max(record[name] for record in part) for name in ("peak_allocated_gib", "peak_reserved_gib")}
        nvml = {key: value for record in part for key, value in record.items() if key.startswith(("device", "outs"))}
        merged.append(part[-1] | nvml | means | peaks | {"steps": 4})
    assert kinds(CASES[kind][:100] + merged) == ([kind] if kind else [])


@pytest.mark.parametrize("kind", CASES)
def test_few_steps_say_nothing(kind: str) -> None:
    assert diagnose(CASES[kind][:20]) == []
    assert diagnose([]) == []


def test_what_a_finding_holds() -> None:
    for kind, records in CASES.items():
        for found in diagnose(records):
            assert found.kind == kind and kind in KINDS
            assert found.first_step in {record["step"] for record in records}
            assert found.why and found.fix and "\n" not in found.why + found.fix
            assert all(math.isfinite(value) for value in found.figures.values())
            assert json.loads(json.dumps(found.to_json()))["figures"] == found.figures


def test_time_grows_with_the_number_of_steps_and_no_faster() -> None:
    records = CASES["leak"]
    many = [record | {"step": record["step"] + 400 * i} for i in range(100) for record in records]

    def seconds(count: int) -> float:
        took = []
        for _ in range(3):
            begin = time.process_time()
            diagnose(many[:count])
            took.append(time.process_time() - begin)
        return min(took)

    few, all_of_them = seconds(4_000), seconds(40_000)
    assert all_of_them < 25 * few
