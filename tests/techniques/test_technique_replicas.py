"""Two replicas, each with half of the batch, against one process that accumulates both halves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hf_memkit.technique import find_technique
from hf_memkit.training_setup import TrainingSetup
from tests.conftest import ROOT
from tests.techniques.jobs import gpt2_job
from tests.techniques.proving import proves


def train(folder: Path, processes: int, accumulation: int) -> dict[str, Any]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    launcher = torchrun if processes > 1 else []
    worker = [str(ROOT / "tests/techniques/replicas_worker.py"), str(folder), str(processes), str(accumulation)]
    done = subprocess.run(
        [sys.executable, *launcher, *worker], env=environment, cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert len(lines) == 1, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(lines[0].removeprefix("RESULT "))
    return found


@proves("same-result", "data-parallel")
def test_two_replicas_train_as_one_process_with_their_batches(tmp_path: Path) -> None:
    """Gradients are summed in another order: 1e-5."""
    two, one = train(tmp_path / "two", 2, 1), train(tmp_path / "one", 1, 2)
    assert two["losses"] == pytest.approx(one["losses"], abs=1e-5)
    assert two["norms"] == pytest.approx(one["norms"], abs=1e-5)
    assert two["wrapped"] == "DistributedDataParallel" and two["ddp_find_unused_parameters"] is False
    assert "ddp_find_unused_parameters" not in one, "with one process there is nothing to set"


def test_deepspeed_needs_no_replicas() -> None:
    setup = TrainingSetup(preset="x").put("deepspeed.config", {}, "an engine of its own")
    assert find_technique("data-parallel")(setup, gpt2_job(None, gpus=2)) == setup
