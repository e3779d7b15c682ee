"""The GPU benchmark's logic, on a CPU: refusal, cases, resuming, flushing, what is made of a child's end."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import children, gpu
from tests.conftest import ROOT

SCRIPT = ROOT / "benchmarks" / "gpu.py"


def test_without_a_gpu_it_says_so_in_one_line_and_exits_2() -> None:
    command = [sys.executable, str(SCRIPT), "--section", "recipe"]
    ran = subprocess.run(command, capture_output=True, text=True, env={"CUDA_VISIBLE_DEVICES": "", "PATH": ""})
    assert ran.returncode == 2
    assert (
        ran.stderr.strip().splitlines()[-1] == "benchmarks/gpu.py: this machine has no CUDA GPU; nothing was measured"
    )


def test_what_a_child_s_end_means() -> None:
    def step(number: int, ms: float) -> dict[str, Any]:
        return {"kind": "step", "step": number, "step_time_ms": ms, "tokens": 1000, "peak_allocated_gib": 10 + number}

    records = [step(1, 9000.0), step(2, 9000.0), step(3, 100.0), step(4, 300.0), step(5, 200.0)]
    done = children.judge(0, "", records, 5)
    assert done == {
        "status": "fits", "steps": 5, "peak_allocated_gib": 15, "step_time_ms": 200.0, "tokens_per_s": 5000.0
    }  # fmt: skip
    oom = children.judge(1, "…\ntorch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB\n", records[:1], 5)
    assert oom["status"] == "does not fit" and "Tried to allocate" in oom["why"] and oom["steps"] == 1
    slow = children.judge(None, "", records, 12)
    assert slow["status"] == "fits" and "5 of 12 steps" in slow["why"]
    assert children.judge(None, "", records[:1], 12)["status"] == "failed"
    crashed = children.judge(1, "Traceback\nImportError: no libaio", [], 12)
    assert crashed["status"] == "failed" and "no libaio" in crashed["why"] and "step_time_ms" not in crashed
    assert children.judge(0, "", records[:3], 5)["status"] == "failed"


def test_a_section_flushes_every_case_stops_in_time_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only `measure` is replaced here: it is what needs a GPU."""
    path = tmp_path / "recipe.json"
    seen: list[str] = []

    def measure(case: Any, *, on_cpu: bool, max_steps: int) -> dict[str, Any]:
        seen.append(case.name)
        if len(seen) == 3:
            raise KeyboardInterrupt
        return {"status": "fits", "peak_allocated_gib": 1.0}

    monkeypatch.setattr(gpu.recipe_section, "measure", measure)
    options: dict[str, Any] = {"on_cpu": False, "max_steps": 12, "only": None}
    with pytest.raises(KeyboardInterrupt):
        gpu.run_section("recipe", path, **options)
    assert [row["case"] for row in json.loads(path.read_text())["cases"]] == seen[:2]
    assert gpu.run_section("recipe", path, **options, section_s=0) == 1
    assert gpu.run_section("recipe", path, **options) == 0
    rows = json.loads(path.read_text())["cases"]
    assert len(rows) == 8 and len(seen) == 9
    assert all(row["versions"]["torch"] and row["hardware"]["ram_gib"] > 0 for row in rows)


def test_several_at_once_have_no_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(case: Any, *, on_cpu: bool, max_steps: int) -> dict[str, Any]:
        return {"status": "fits", "peak_allocated_gib": 1.0, "step_time_ms": 5.0, "errors": {"step_time": 0.1}}

    monkeypatch.setattr(gpu.recipe_section, "measure", measure)
    path = tmp_path / "recipe.json"
    assert gpu.run_section("recipe", path, on_cpu=False, max_steps=12, only=None, at_once=3) == 0
    rows = json.loads(path.read_text())["cases"]
    assert len(rows) == 8 and all("step_time_ms" not in row and row["errors"] == {} for row in rows)


@pytest.mark.exhaustive
def test_a_case_runs_end_to_end_in_its_own_process(tmp_path: Path) -> None:
    """The whole path with a real child, Trainer and records; marked as a rehearsal, in a file of its own."""
    command = [sys.executable, str(SCRIPT), "--section", "recipe", "--rehearse", "--only", "lora 16GB", "--steps", "4"]
    ran = subprocess.run([*command, "--out", str(tmp_path)], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-2000:]
    content = json.loads((tmp_path / "recipe-rehearsal.json").read_text())
    (row,) = content["cases"]
    assert content["rehearsal"] and row["status"] == "fits" and row["steps"] == 4, row
    assert row["tokens_per_s"] > 0 and "peak_allocated_gib" not in row


@pytest.mark.operators
def test_a_preset_s_ledger_is_laid_beside_the_live_engine(tmp_path: Path) -> None:
    """The path of section `deepspeed`, with the real engine: on a CPU places are only names, sizes are real."""
    command = [sys.executable, str(SCRIPT), "--section", "deepspeed", "--rehearse", "--steps", "3", "--only"]
    ran = subprocess.run([*command, "zero2-offload", "--out", str(tmp_path)], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-2000:]
    (row,) = json.loads((tmp_path / "deepspeed-rehearsal.json").read_text())["cases"]
    assert row["status"] == "fits" and row["steps"] == 3, row
    both = [term for term in row["rows"] if "measured_gib" in term]
    assert len(both) >= 7
    for term in both:
        assert term["measured_gib"] == pytest.approx(term["formula_gib"], rel=0.01), term
    again = subprocess.run([*command, "onebit", "--out", str(tmp_path)], capture_output=True, text=True)
    rows = json.loads((tmp_path / "deepspeed-rehearsal.json").read_text())["cases"]
    assert again.returncode == 0 and [r["status"] for r in rows if "onebit" in r["case"]] == ["refused"] * 2
