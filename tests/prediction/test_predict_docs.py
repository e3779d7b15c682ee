"""docs/predict.md: its table of GPUs claims what was measured."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.conftest import load_script


@pytest.fixture(scope="module")
def script() -> SimpleNamespace:
    return load_script("docs_evidence.py")


def test_a_gpu_s_worst_and_what_was_called_fits_are_shown(script: SimpleNamespace, tmp_path: Path) -> None:
    def row(case: str, verdict: str, status: str, error: float) -> dict[str, Any]:
        return {
            "case": case, "kind": "train", "status": status, "peak_allocated_gib": 10.0,
            "prediction": {"peak_allocated_gib": 10 * (1 + error), "verdict": verdict},
            "errors": {"peak_allocated": error, "peak_reserved": error / 2},
            "versions": {"torch": "2.11.0", "transformers": "5.23.0"}, "hardware": {"gpu": {"name": "NVIDIA H200"}},
        }  # fmt: skip

    timed = row("a", "fits", "fits", 0.01) | {"step_time_ms": 20.0, "predicted_step_s": [0.01, 0.016, 0.03]}
    timed |= {"priced_since_s": [0.02, 0.021, 0.03], "errors": {"peak_allocated": 0.01, "peak_reserved": 0.0}}
    timed["errors"]["step_time"] = -0.2
    waits = {"case": "d", "kind": "train", "status": "predicted", "prediction": {"peak_allocated_gib": 1.0}}
    (tmp_path / "predict-rehearsal.json").write_text(
        json.dumps({"section": "predict", "rehearsal": True, "cases": [timed]})
    )
    rows = [timed, waits, row("b", "fits", "does not fit", -0.04), row("c", "tight", "fits", 0.02)]
    (tmp_path / "predict-h200.json").write_text(json.dumps({"section": "predict", "rehearsal": False, "cases": rows}))
    (line,) = script.our_gpus(tmp_path).splitlines()[2:]
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells[:5] == ["NVIDIA H200", "3", "2.0 %, 4.0 % (b)", "1.0 %, 2.0 %", "b"], "without the rehearsal"
    assert cells[-2:] == ["20 %, 20 %", "5 %"]
