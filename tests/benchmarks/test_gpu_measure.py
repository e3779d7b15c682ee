"""One case of the GPU benchmark: its setup, what is made of what a child left, and its path on a CPU."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu, gpu_measure, gpu_summary
from benchmarks.gpu_cases import MODELS, Case, cases
from hf_memkit.catalog.hardware import gpu_of_size, this_machine
from hf_memkit.common.units import GIB

STEPS = 3


@pytest.mark.parametrize("case", [case for case in cases() if case.model], ids=lambda case: case.name)
def test_every_case_has_a_setup_on_the_gpu_it_is_for(case: Case) -> None:
    """Sizes, techniques and arguments go together: what fails here would fail on the GPU."""
    machine = replace(this_machine(), gpu=gpu_of_size("140GB"), ram_bytes=128 * GIB, disk_free_bytes=64 * GIB)
    setup, facts = gpu_measure.make_setup(case, machine, on_cpu=False)
    assert not setup.problems, setup.problems
    assert (facts is None) == (MODELS[case.model].model_class is not None)
    assert setup["arguments.per_device_eval_batch_size"] == setup["arguments.per_device_train_batch_size"]


def test_what_a_child_s_end_means() -> None:
    def step(number: int, ms: float) -> dict[str, Any]:
        return {"step": number, "step_time_ms": ms, "tokens": 1000, "peak_allocated_gib": 10 + number}

    made = [step(1, 9000.0), step(2, 9000.0), step(3, 100.0), step(4, 300.0), step(5, 200.0)]
    done = gpu_measure.judge(0, "", made, 5)
    assert done == {
        "status": "fits", "steps": 5, "peak_allocated_gib": 15, "step_time_ms": 200.0, "tokens_per_s": 5000.0
    }  # fmt: skip
    oom = gpu_measure.judge(1, "…\ntorch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB\n", made[:1], 5)
    assert oom["status"] == "does not fit" and "Tried to allocate" in oom["why"] and oom["steps"] == 1
    slow = gpu_measure.judge(None, "", made, 12)
    assert slow["status"] == "fits" and "5 of 12 steps" in slow["why"]
    assert gpu_measure.judge(None, "", made[:1], 12)["status"] == "failed"
    crashed = gpu_measure.judge(1, "Traceback\nImportError: no libaio", [], 12)
    assert crashed["status"] == "failed" and "no libaio" in crashed["why"] and "step_time_ms" not in crashed
    assert gpu_measure.judge(0, "", made[:3], 5)["status"] == "failed"


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
    (tmp_path / "result.json").write_text(json.dumps({"optimizer_class": "AdamW", "expected_steps": 3}))
    found = gpu_measure.conclude(tmp_path, 0, "", STEPS)
    assert found["status"] == "fits" and found["peak_allocated_gib"] == 5.0 and found["tokens_per_s"] == 2000
    assert found["phases"] == {"forward": 4.5, "backward": 5.0} and found["categories"]["other_gib"] == 3.0
    assert found["evaluate_peak_allocated_gib"] == 7.0 and found["load_peak_allocated_gib"] == 1.5
    (tmp_path / "result.json").write_text(json.dumps({"refused": "no such kernel"}))
    assert gpu_measure.conclude(tmp_path, 0, "", STEPS) == {"status": "refused", "why": "no such kernel"}
    (tmp_path / "result.json").unlink()
    message = "Traceback …\ntorch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB\n"
    assert gpu_measure.conclude(tmp_path, 1, message, STEPS)["status"] == "does not fit"


def row(case: str, kind: str = "train", **content: Any) -> dict[str, Any]:
    return {"case": case, "kind": kind, "status": "fits", **content}


def compared(case: str, off: float, verdict: str, status: str) -> dict[str, Any]:
    found = {"errors": {"peak_allocated": off, "peak_reserved": off / 2}, "prediction": {"verdict": verdict}}
    return {**row(case), **found, "status": status}


def test_errors_are_shares_of_what_was_measured() -> None:
    prediction = {
        "peak_allocated_gib": 11.0, "peak_reserved_gib": [11.5, 12.0], "outside_allocator_gib": 0.5,
        "phases": {"forward": {"peak_allocated_gib": 9.0}, "load": {"peak_allocated_gib": 1.0}},
    }  # fmt: skip
    measured = {
        "peak_allocated_gib": 10.0, "peak_reserved_gib": 12.5, "device_used_gib": 12.5, "phases": {"forward": 10.0},
    }  # fmt: skip
    found = gpu_summary.errors(prediction, measured)
    assert found == {
        "peak_allocated": pytest.approx(0.1), "peak_reserved": pytest.approx(-0.04), "total": pytest.approx(0.0),
        "allocated_forward": pytest.approx(-0.1),
    }  # fmt: skip
    assert gpu_summary.errors(prediction, {**measured, "peak_reserved_gib": 11.7})["peak_reserved"] == 0
    assert gpu_summary.errors(prediction, {}) == {}


def test_the_summary_names_what_was_wrong() -> None:
    found = gpu_summary.summary(
        [
            compared("near", 0.01, "fits", "fits"),
            compared("far", -0.2, "fits", "fits"),
            compared("between", 0.03, "tight", "does not fit"),
            {**compared("died", 0.02, "fits", "does not fit"), "history_replay": {"exact": True}},
            row("edge", "edge", runs={}, as_predicted=True, history_replay={"error": "began too late"}),
            row("other edge", "edge", runs={}, as_predicted=False, history_replay={"exact": False}),
            row("refused"),
        ]
    )
    assert found.cases == 4 and found.median_error == pytest.approx(0.025)
    assert found.worst_error == pytest.approx(0.2) and found.worst_case == "far"
    assert found.worst_reserved_error == pytest.approx(0.1)
    assert found.wrongly_fits == ("died",), "and only what was promised"
    assert (found.edges, found.edges_right, found.histories, found.histories_exact) == (2, 1, 2, 1)
    nothing = gpu_summary.summary([])
    assert nothing.cases == 0 and nothing.median_error is None and nothing.worst_case is None


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["gpt2: bf16-autocast, micro batch 8", "t5-large: bf16=True, micro batch 8"])
def test_a_case_runs_end_to_end(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prediction, child, Trainer, records, evidence; marked as a rehearsal, with nothing measured of a GPU."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    wanted = next(case.name for case in cases() if case.name.startswith(name) and case.kind == "train")
    monkeypatch.setattr(gpu, "cases", lambda: [case for case in cases() if case.name == wanted])
    assert gpu.main(["--rehearse", "--steps", str(STEPS), "--out", str(tmp_path)]) == 0
    content = json.loads((tmp_path / "predict-rehearsal.json").read_text())
    (found,) = content["cases"]
    assert content["rehearsal"] and found["status"] == "fits" and found["steps"] == STEPS, found
    assert found["prediction"]["confidence"]["level"] == "trace" and found["prediction"]["peak_allocated_gib"] > 0
    assert found["optimizer_class"] == "AdamW"
    assert found["errors"] == {} and "peak_allocated_gib" not in found
    assert gpu_summary.summary(content["cases"]).cases == 0


@pytest.mark.exhaustive
def test_a_script_with_its_arguments_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Finds: arguments that are lost, records that are read from another folder."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    small = "GPT2Config(n_layer=1, n_embd=16, n_head=2)"
    script = tmp_path / "train.py"
    script.write_text(Path(gpu.__file__).with_name("gpu_script.py").read_text().replace("GPT2Config()", small))
    own = "--use_cpu True --max_steps 3 --per_device_train_batch_size 1 --report_to none --save_strategy no"
    line = f"{script} --output_dir '{tmp_path / 'its own'}' {own}"
    assert gpu.main([line, "--rehearse", "--out", str(tmp_path)]) == 0
    (found,) = json.loads((tmp_path / "predict-rehearsal.json").read_text())["cases"]
    assert (found["case"], found["status"], found["steps"]) == (line, "fits", STEPS), found
