"""What a live DeepSpeed engine holds, and its phases, in real trainings of ZeRO 1 and 3."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from hf_memkit.measuring.memory.records import read_records, steps
from tests.conftest import ROOT

pytestmark = pytest.mark.operators

BUCKET_BYTES = 2 * 100_000


def test_zero_1_and_3(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.measuring.memory.deepspeed_driver", str(tmp_path)]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr[-3000:]
    orders = [json.loads(line) for line in ran.stdout.splitlines() if line.startswith('["load"')]
    micro_batch = ["data", "forward", "backward"]
    assert orders == [["load", *micro_batch, *micro_batch, "optimizer"]] * 2
    for stage in (1, 3):
        records = read_records(tmp_path / str(stage) / "memory-rank0.jsonl")
        run, last = records[0], steps(records)[-1]
        parameters = run["parameters"]
        assert run["arguments"]["deepspeed_stage"] == stage
        assert set(last["phases"]) == {"data", "forward", "backward", "optimizer"}
        held = {name[:-4]: round(gib * 2**30) for name, gib in last["held"]["device"].items()}
        assert held["weights"] == pytest.approx(2 * parameters, rel=0.01)  # bf16: whole in stage 1, all parts in 3
        assert held["optimizer"] == pytest.approx(12 * parameters, rel=0.01)  # fp32 weights and two moments
        if stage == 3:
            assert held["gradients"] == pytest.approx(2 * parameters, rel=0.01)  # the flat partition
            assert held["buffers"] == BUCKET_BYTES
        else:
            assert "gradients" not in held  # dropped in the step
        assert sum(last["categories"].values()) == pytest.approx(last["peak_allocated_gib"], abs=1e-8)
        modules = next(record for record in records if record["kind"] == "modules")
        assert sum(row["parameters"] * row.get("repeats", 1) for row in modules["rows"]) == parameters
