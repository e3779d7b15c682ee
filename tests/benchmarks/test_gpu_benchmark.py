"""The GPU benchmark's logic, on a CPU: refusal, slices, resuming, flushing, what it prints."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu
from benchmarks.gpu_cases import Case
from tests.conftest import ROOT

CASES = [Case(str(number)) for number in range(4)]


def test_without_a_gpu_it_says_so_in_one_line_and_exits_2() -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu.py")]
    ran = subprocess.run(command, capture_output=True, text=True, env={"CUDA_VISIBLE_DEVICES": "", "PATH": ""})
    assert ran.returncode == 2
    assert (
        ran.stderr.strip().splitlines()[-1] == "benchmarks/gpu.py: this machine has no CUDA GPU; nothing was measured"
    )


def test_every_case_is_flushed_a_slice_stops_in_time_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only `measure` is replaced here: it is what needs a GPU."""
    path = tmp_path / "predict.json"
    seen: list[str] = []

    def measure(case: Case, *, on_cpu: bool, max_steps: int, before: Any) -> dict[str, Any]:
        seen.append(case.name)
        if len(seen) == 3:
            raise KeyboardInterrupt
        return {"status": "fits", "peak_allocated_gib": 1.0}

    monkeypatch.setattr(gpu, "measure", measure)
    with pytest.raises(KeyboardInterrupt):
        gpu.measure_all(CASES, path, on_cpu=False, max_steps=12)
    assert [row["case"] for row in json.loads(path.read_text())["cases"]] == seen[:2]
    assert gpu.measure_all(CASES, path, on_cpu=False, max_steps=12, slice_s=0) == 1
    assert gpu.measure_all(CASES, path, on_cpu=False, max_steps=12) == 0
    rows = json.loads(path.read_text())["cases"]
    assert len(rows) == 4 and len(seen) == 5
    assert all(row["versions"]["torch"] and row["hardware"]["ram_gib"] > 0 for row in rows)


def test_predicted_stands_beside_measured_by_phase() -> None:
    phases = {name: {"peak_allocated_gib": 2.0} for name in ("load", "forward")}
    row = {"case": "a", "status": "fits", "prediction": {"phases": phases}, "phases": {"forward": 2.25}}
    assert gpu.lines_of(row)[1:] == ["  forward: predicted 2.00, measured 2.25 GiB"]
