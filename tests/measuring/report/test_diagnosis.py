"""Findings over steps: recorded trainings, and made-up steps for what no recorded training shows."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from hf_memkit.measuring.report.diagnosis import Finding, diagnose

Records = list[dict[str, Any]]

# What MemoryReportCallback recorded of 28 trainings of a tiny GPT-2, whose tensors were counted through a copy of
# torch's allocator (benchmarks/diagnosis/real_runs.py at commit 10c073e). 14 are normal; `problems` has the others'.
RECORDED = json.loads(gzip.decompress((Path(__file__).parent / "recorded_trainings.json.gz").read_bytes()))


def recorded(name: str) -> tuple[Records, dict[str, Any], list[str]]:
    """The steps, the `run` record and the problems of a recorded training."""
    fields = dict(RECORDED[name])
    problems, start, capacity = (fields.pop(key) for key in ("problems", "start_step", "capacity_gib"))
    steps = [dict(zip(fields, values, strict=True)) for values in zip(*fields.values(), strict=True)]
    return steps, {"start_step": start, "hardware": {"capacity_gib": capacity}}, problems


def kinds(steps: Records, run: dict[str, Any] | None = None, **kwargs: Any) -> list[str]:
    return sorted(finding.kind for finding in diagnose(steps, run, **kwargs))


def only(steps: Records, run: dict[str, Any] | None = None, **kwargs: Any) -> Finding:
    (finding,) = diagnose(steps, run, **kwargs)
    return finding


def training(count: int = 200, **fields: Any) -> Records:
    """Steps on a GPU of 16 GiB: 4 GiB stay allocated, and a sequence of 512 tokens needs 4 more."""
    return [
        {
            "step": step, "samples": 8, "micro_batches": 1, "longest_sequence": 512, "capacity_gib": 16.0,
            "allocated_gib": 4.0, "peak_allocated_gib": 8.0, "peak_reserved_gib": 8.4, "reserved_gib": 8.4,
            "device_used_gib": 8.9, "alloc_retries": 0, **{name: value(step) for name, value in fields.items()},
        }
        for step in range(1, count + 1)
    ]  # fmt: skip


@pytest.mark.parametrize("name", RECORDED)
def test_recorded_trainings(name: str) -> None:
    steps, run, problems = recorded(name)
    findings = diagnose(steps, run)
    assert sorted(finding.kind for finding in findings) == problems
    for finding in findings:
        assert finding.why and finding.fix and "\n" not in finding.why + finding.fix
        assert json.loads(json.dumps(finding.to_json()))["figures"] == finding.figures
    assert kinds(steps[:20], run) == []
    for missing in steps[0].keys() - {"step"}:
        assert set(kinds([{k: v for k, v in step.items() if k != missing} for step in steps], run)) <= set(problems)


@pytest.mark.parametrize(
    ("name", "begun"),
    [
        ("logits kept", {"leak": 1}),
        ("gradients kept later", {"leak": 21}),
        ("curriculum in three stages", {"longer batches": 17}),
        ("one giant batch", {"longer batches": 34}),
        ("a little longer in each step", {"fragmentation": 16, "longer batches": 22}),
    ],
)
def test_the_step_at_which_a_problem_began(name: str, begun: dict[str, int]) -> None:
    steps, run, _ = recorded(name)
    assert {finding.kind: finding.first_step for finding in diagnose(steps, run)} == begun


def test_figures_of_a_leak() -> None:
    steps = training(allocated_gib=lambda s: 4 + s / 100, peak_allocated_gib=lambda s: 8 + s / 100)
    figures = only(steps).figures
    assert figures["rise_mib_per_step"] == pytest.approx(10.24, rel=0.05) and figures["last_step"] == 200
    # (16 − 0.5 − 10) GiB are 550 more steps.
    assert figures["projected_full_step"] == pytest.approx(750, abs=25)


@pytest.mark.parametrize(
    "allocated",
    [
        lambda s: 5.0 if s > 120 else 4.0,
        lambda s: 4 + 2 * min(1, s / 160),
        lambda s: 4 + 0.03 * (s % 90),
        lambda s: 4 + s / 20_000,
    ],
    ids=["a jump", "a cache that fills", "collected now and then", "a trickle"],
)
def test_growth_that_is_no_leak(allocated: Any) -> None:
    assert diagnose(training(allocated_gib=allocated)) == []


def test_only_the_steps_since_a_resume_count() -> None:
    steps = training(peak_reserved_gib=lambda s: 15.0, alloc_retries=lambda s: s // 20 if s <= 100 else 0)
    assert kinds(steps[:100]) == ["fragmentation"]
    assert diagnose(steps, {"start_step": 100}) == []


def test_one_longer_batch_counts_where_it_fills_what_the_allocator_can_have() -> None:
    steps = training(
        longest_sequence=lambda s: 820 if s == 143 else 512, peak_allocated_gib=lambda s: 10.4 if s == 143 else 8.0
    )
    assert diagnose(steps) == []
    assert kinds(steps, {"hardware": {"allocator_cap_fraction": 0.7}}) == ["longer batches"]
    assert diagnose(training(peak_allocated_gib=lambda s: 15.0 if s == 143 else 8.0)) == []


def test_the_longer_batch_that_ended_the_run() -> None:
    steps = training(100)
    oom = {"step": 101, "samples": 8, "longest_sequence": 2048, "allocated_gib": 12.0, "requested_gib": 3.5}
    finding = only(steps, ooms=[oom])
    assert finding.first_step == 101 and finding.figures["peak_gib"] == 15.5
    assert finding.figures["size"] == 8 * 2048 and finding.figures["size_before"] == 8 * 512
    for change in ({"longest_sequence": 300}, {"allocated_gib": 1.0}, {"step": 50}):
        assert diagnose(steps, ooms=[oom | change]) == []


def test_the_fix_of_fragmentation() -> None:
    steps, run, _ = recorded("a little longer in each step")
    fragmentation, _ = diagnose(steps, run)
    assert "expandable_segments:True" in fragmentation.fix
    run["hardware"]["allocator_settings"] = "expandable_segments:True"
    fragmentation, _ = diagnose(steps, run)
    assert "already" in fragmentation.fix


def test_another_process() -> None:
    named = training(other_processes_gib=lambda s: 0.1 if s < 50 else 2.1)
    assert only(named).first_step == 50 and "other processes" in only(named).why
    finding = only(training(device_used_gib=lambda s: 8.9 if s < 104 else 11.9))
    assert (finding.kind, finding.first_step) == ("another process", 104) and "context" in finding.why
    for used in (
        lambda s: 11.9,  # from the start
        lambda s: 8.9 + 0.15 * (s % 3),  # a desktop
        lambda s: 12.9 if s == 101 else 8.9,  # memory that changes hands
        lambda s: 8.4 if s <= 40 else 8.9,  # this process's own context, late
    ):
        assert diagnose(training(device_used_gib=used)) == []


def test_recompilations() -> None:
    def compiling(late: int, **last: int) -> Records:
        """Steps with four graphs at the beginning, and one in each of some steps from step 60 on."""
        steps = training(100)
        for place in (0, 1, *range(59, 59 + late)):
            steps[place] |= {"compilation": {"graphs": 4, **last}, "compiled_graphs": 2 if place < 2 else 1}
        return steps

    assert diagnose(compiling(8)) == []
    finding = only(compiling(9))
    assert (finding.kind, finding.first_step, finding.figures["late_graphs"]) == ("recompilations", 60, 9)
    assert diagnose(compiling(9), {"start_step": 30}) == []  # a resume compiles anew
    assert only(compiling(1, given_up=1)).first_step == 1
