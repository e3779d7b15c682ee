"""Section `predict` of the GPU benchmark: its cases, what is made of what a child left, and its path on a CPU."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu, predict_section
from benchmarks.predict_cases import MODELS, Case, cases
from hf_memkit.hardware import gpu_of_size, this_machine
from hf_memkit.units import GIB

STEPS = 3


@pytest.mark.parametrize("case", [case for case in cases() if case.model], ids=lambda case: case.name)
def test_every_case_has_a_setup_on_the_gpu_it_is_for(case: Case) -> None:
    """Sizes, techniques and arguments go together: what fails here would fail on the GPU."""
    machine = replace(this_machine(), gpu=gpu_of_size("140GB"), ram_bytes=128 * GIB, disk_free_bytes=64 * GIB)
    setup, facts = predict_section.make_setup(case, machine, on_cpu=False)
    assert not setup.problems, setup.problems
    assert (facts is None) == (MODELS[case.model].model_class is not None)
    assert setup["arguments.per_device_eval_batch_size"] == setup["arguments.per_device_train_batch_size"]


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
    found = predict_section.errors(prediction, measured)
    assert found == {
        "peak_allocated": pytest.approx(0.1), "peak_reserved": pytest.approx(-0.04), "total": pytest.approx(0.0),
        "allocated_forward": pytest.approx(-0.1),
    }  # fmt: skip
    assert predict_section.errors(prediction, {**measured, "peak_reserved_gib": 11.7})["peak_reserved"] == 0
    assert predict_section.errors(prediction, {}) == {}


def test_the_summary_names_what_was_wrong() -> None:
    found = predict_section.summary(
        [
            row("calibrate", "calibrate"),
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
    nothing = predict_section.summary([])
    assert nothing.cases == 0 and nothing.median_error is None and nothing.worst_case is None


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "name",
    [
        "gpt2: bf16-autocast, micro batch 8",
        pytest.param("t5-large: bf16=True, micro batch 8", marks=pytest.mark.exhaustive),
    ],
)
def test_a_case_runs_end_to_end(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prediction, child, Trainer, records, evidence; marked as a rehearsal, with nothing measured of a GPU."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    wanted = next(case.name for case in cases() if case.name.startswith(name) and case.kind == "train")
    monkeypatch.setattr(predict_section, "cases", lambda: [case for case in cases() if case.name == wanted])
    assert gpu.main(["--section", "predict", "--rehearse", "--steps", str(STEPS), "--out", str(tmp_path)]) == 0
    content = json.loads((tmp_path / "predict-rehearsal.json").read_text())
    (found,) = content["cases"]
    assert content["rehearsal"] and found["status"] == "fits" and found["steps"] == STEPS, found
    assert found["prediction"]["confidence"]["level"] == "trace" and found["prediction"]["peak_allocated_gib"] > 0
    assert found["optimizer_class"] == "AdamW"
    assert found["errors"] == {} and "peak_allocated_gib" not in found
    assert predict_section.summary(content["cases"]).cases == 0


def test_a_calibration_needs_a_gpu(tmp_path: Path) -> None:
    found = predict_section.measure(cases()[0], on_cpu=True, max_steps=STEPS)
    assert found["status"] == "refused" and "no GPU" in found["why"]
