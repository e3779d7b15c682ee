"""The loss in chunks on two processes, and with Liger's real kernel where Triton is installed."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys

import pytest

from hf_memkit.zero import ops
from tests.conftest import ROOT

KINDS = ("replicated", "sharded", "stage 3")


@pytest.fixture(scope="module")
def ranks() -> dict[str, list[float]]:
    ops.build(("deepspeed_shm_comm",), print, cpu=True)
    environment = {
        **os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE",
        "CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu",
    }  # fmt: skip
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        environment.pop(name, None)
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command = [sys.executable, *launch, "-m", "tests.techniques.chunked_loss_ranks"]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=300)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RANKS ")]
    assert lines, done.stdout[-2000:] + done.stderr[-4000:]
    found: dict[str, list[float]] = json.loads(lines[-1].removeprefix("RANKS "))
    return found


@pytest.mark.parametrize("model_type", ["gpt2", "llama"])
@pytest.mark.parametrize("kind", KINDS)
def test_weights_copied_split_or_gathered(kind: str, model_type: str, ranks: dict[str, list[float]]) -> None:
    loss, gradient = ranks[f"{kind}, {model_type}"]
    assert loss <= 1e-6 and gradient <= 1e-6


_LIGER = """
import copy
from hf_memkit.parts import chunked_loss
from tests.techniques.tiny_models import batch, causal_model
chunked_loss._not_liger = lambda hidden: ""
for model_type in ("gpt2", "llama"):
    for smoothing in (0.0, 0.1):
        model = causal_model(model_type)
        fused = copy.deepcopy(model)
        chunked_loss.install(model, engine="loop", label_smoothing=smoothing, chunk_tokens=7)
        chunked_loss.install(fused, engine="liger", label_smoothing=smoothing)
        expected, found = (one(**batch(), num_items_in_batch=31).loss for one in (model, fused))
        expected.backward()
        found.backward()
        assert abs(float(expected.detach() - found.detach())) < 1e-6
        for theirs, ours in zip(model.parameters(), fused.parameters(), strict=True):
            assert float((theirs.grad - ours.grad).abs().max()) < 1e-6
print("SAME")
"""


@pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or importlib.util.find_spec("liger_kernel") is None,
    reason="Triton or liger-kernel is not installed",
)
def test_ligers_real_kernel_in_tritons_interpreter() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-c", _LIGER]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert "SAME" in done.stdout, done.stderr[-3000:]
