"""The loss in chunks on two processes, and with Liger's real kernel where Triton is installed."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys

import pytest

from hf_memkit.deepspeed import ops
from tests.conftest import ROOT

pytestmark = pytest.mark.operators

KINDS = ("replicated", "sharded", "stage 3")


@pytest.fixture(scope="module")
def actual() -> dict[str, list[float]]:
    """(difference of the loss, largest of the gradients) by what was compared."""
    ops.build(("deepspeed_shm_comm",), print, cpu=True)
    environment = {
        **os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE",
        "CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu", "TRITON_INTERPRET": "1",
    }  # fmt: skip
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        environment.pop(name, None)
    command = [sys.executable, "-m", "tests.techniques.chunked_loss_ranks"]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=300)
    lines = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    assert lines, done.stdout[-2000:] + done.stderr[-4000:]
    result: dict[str, list[float]] = json.loads(lines[-1].removeprefix("FOUND "))
    return result


@pytest.mark.parametrize("model_type", ["gpt2", "llama"])
@pytest.mark.parametrize("kind", KINDS)
def test_weights_copied_split_or_gathered(kind: str, model_type: str, actual: dict[str, list[float]]) -> None:
    loss, gradient = actual[f"{kind}, {model_type}"]
    assert loss <= 1e-6 and gradient <= 1e-6


@pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or importlib.util.find_spec("liger_kernel") is None,
    reason="Triton or liger-kernel is not installed",
)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("model_type", ["gpt2", "llama"])
def test_ligers_real_kernel_in_tritons_interpreter(
    model_type: str, smoothing: float, actual: dict[str, list[float]]
) -> None:
    loss, gradient = actual[f"liger, {model_type}, {smoothing}"]
    assert loss < 1e-6 and gradient < 1e-6
