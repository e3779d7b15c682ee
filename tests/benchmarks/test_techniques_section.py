"""Section `techniques` of the GPU benchmark: its cases against the registry, and its whole path on a CPU."""

from __future__ import annotations

import itertools
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu, techniques_child, techniques_section
from benchmarks.techniques_cases import COVERED, LADDERS, MODELS, UPON, Case, cases, comparisons, rungs
from hf_memkit.technique import TECHNIQUES

STEPS = 3


@pytest.fixture(scope="module", autouse=True)
def own_temporary_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The first weights go there, here and in the processes that are started."""
    with pytest.MonkeyPatch.context() as patch:
        folder = str(tmp_path_factory.mktemp("temporary"))
        patch.setattr(tempfile, "tempdir", folder)
        patch.setenv("TMPDIR", folder)
        yield


def test_every_technique_has_a_case_or_a_reason_why_not() -> None:
    measured = {comparison.technique for comparison in comparisons()}
    assert measured | COVERED.keys() == TECHNIQUES.keys() and not measured & COVERED.keys()
    named = (
        {name for ladder in LADDERS.values() for name in ladder} | UPON.keys() | techniques_section.NOT_ON_CPU.keys()
    )
    named |= {name for needs in UPON.values() for name in (*needs.techniques, *(needs.base or ()))}
    assert named <= TECHNIQUES.keys(), f"no techniques: {sorted(named - TECHNIQUES.keys())}"
    assert len(COVERED) < len(measured) / 4, "a case for nearly every technique"


def test_covered_techniques_are_measured_where_it_says() -> None:
    from benchmarks import deepspeed_section

    presets = {case.name for case in deepspeed_section.cases()}
    for name, where in COVERED.items():
        if where.startswith("section deepspeed, case"):
            assert where.rpartition(" ")[2] in presets, name


def test_cases_can_be_composed_and_compared() -> None:
    every = cases()
    assert len({case.name for case in every}) == len(every)
    by_name = {case.name for case in every}
    for case in every:
        slots = [TECHNIQUES[name].slot for name in case.techniques if TECHNIQUES[name].slot]
        assert len(set(slots)) == len(slots), case.name
        given = {key for name in case.techniques for key in TECHNIQUES[name].values}
        assert case.values.keys() <= given, case.name
    for comparison in comparisons():
        assert {comparison.case.name, comparison.base.name} <= by_name
        assert comparison.technique in comparison.case.techniques
        assert comparison.technique not in comparison.base.techniques
        same = ("model", "data", "evaluates", "cap_gib")
        assert all(getattr(comparison.case, key) == getattr(comparison.base, key) for key in same)


@pytest.mark.parametrize("model", list(LADDERS))
def test_a_ladder_adds_one_technique_in_each_rung(model: str) -> None:
    found = rungs(model)
    assert found[0] == ("defaults", Case(model))
    assert [adds for adds, _ in found[1:]] == list(LADDERS[model])
    for (_, below), (adds, rung) in itertools.pairwise(found):
        new, gone = set(rung.techniques) - set(below.techniques), set(below.techniques) - set(rung.techniques)
        assert new == {adds}
        assert {TECHNIQUES[name].slot for name in gone} <= {TECHNIQUES[adds].slot}, "only one of its own slot goes"


def test_what_a_child_left_becomes_evidence(tmp_path: Path) -> None:
    records = [
        {"kind": "run", "phases": {"load": {"peak_allocated_gib": 1.5}}},
        {"kind": "step", "step": 1, "step_time_ms": 90.0, "tokens": 100, "peak_allocated_gib": 5.0,
         "phases": {"forward": {"peak_allocated_gib": 4.0}, "backward": {"peak_allocated_gib": 5.0}},
         "categories": {"weights_gib": 2.0, "other_gib": 3.0}},
        {"kind": "step", "step": 2, "step_time_ms": 50.0, "tokens": 100, "peak_allocated_gib": 4.5,
         "phases": {"forward": {"peak_allocated_gib": 4.5}}},
        {"kind": "step", "step": 3, "step_time_ms": 50.0, "tokens": 100, "peak_allocated_gib": 4.5},
        {"kind": "evaluate", "step": 3, "peak_allocated_gib": 7.0},
    ]  # fmt: skip
    (tmp_path / "memory-rank0.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (tmp_path / "result.json").write_text(json.dumps({"losses": [9.0, 8.0, 7.0], "expected_steps": 3}))
    found = techniques_section.conclude(tmp_path, 0, "", STEPS)
    assert found["status"] == "fits" and found["peak_allocated_gib"] == 5.0 and found["tokens_per_s"] == 2000
    assert found["phases"] == {"forward": 4.5, "backward": 5.0} and found["categories"]["other_gib"] == 3.0
    assert found["evaluate_peak_allocated_gib"] == 7.0 and found["load_peak_allocated_gib"] == 1.5
    (tmp_path / "result.json").write_text(json.dumps({"refused": "no such kernel"}))
    assert techniques_section.conclude(tmp_path, 0, "", STEPS) == {"status": "refused", "why": "no such kernel"}
    (tmp_path / "result.json").unlink()
    message = "Traceback …\ntorch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB\n"
    assert techniques_section.conclude(tmp_path, 1, message, STEPS)["status"] == "does not fit"


@pytest.mark.exhaustive
def test_a_case_runs_end_to_end_in_its_own_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole path: first weights on disk, setup, child, Trainer, records, evidence; marked as a rehearsal.

    The program itself runs in this process, which has the libraries already.
    """
    name = "gpt2: bf16-autocast + chunked-loss"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # it would leave this process one GPU
    first_weights("gpt2")
    command = ["--section", "techniques", "--rehearse", "--only", name, "--steps", str(STEPS), "--out", str(tmp_path)]
    assert gpu.main(command) == 0
    content = json.loads((tmp_path / "techniques-rehearsal.json").read_text())
    (row,) = content["cases"]
    assert row["case"] == name
    assert content["rehearsal"] and row["status"] == "fits" and row["steps"] == STEPS, row
    assert len(row["losses"]) == STEPS and row["tokens_per_s"] > 0 and row["optimizer_class"] == "AdamW"
    assert "peak_allocated_gib" not in row and row["formula_device_gib"] > 0


def first_weights(name: str) -> Path:
    """Made in this process, which has the libraries already."""
    folder = techniques_section.model_folder(name, on_cpu=True)
    if not folder.exists():
        techniques_child.write_model(name, str(folder), "cpu")
    return folder


def trained(case: Case, tmp_path: Path) -> dict[str, Any]:
    """The measured process's own work, in this one."""
    model = first_weights(case.model)
    setup = techniques_section.make_setup(case, str(model), on_cpu=True)
    assert not setup.problems
    job = {"model": str(model), "on_cpu": True, "max_steps": STEPS, "setup": setup.to_json()}
    assert techniques_child.run(case, MODELS[case.model], tmp_path, job) == 0
    result: dict[str, Any] = json.loads((tmp_path / "result.json").read_text())
    assert "refused" not in result, result
    return result
