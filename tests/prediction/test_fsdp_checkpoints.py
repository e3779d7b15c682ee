"""Saving and loading of checkpoints with FSDP2: the trace, beside two real ranks of gloo on a CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import pytest

from hf_memkit.common.user_script import UserScript
from hf_memkit.prediction.trace.request import ScriptRequest
from hf_memkit.prediction.traced_training import TracedTraining
from hf_memkit.prediction.worker import Worker
from tests.prediction import checkpoint_job
from tests.prediction.checkpoint_rank import CASES, peaks_of

ROOT: Final = Path(__file__).resolve().parents[2]

SMALL: Final = 8192
"""Bytes, less than a shard of any matrix: of rows, rotary frequencies, indices of DTensor and counters of steps, which
are in RAM in one of the two, or counted in one only."""


def start(rank: int, folder: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.prediction.checkpoint_rank", str(rank), "2", str(folder)]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def answers(process: subprocess.Popen[str]) -> dict[str, Any]:
    output, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors[-2000:]
    lines = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    return {name: peaks for line in lines for name, peaks in line.items()}


def traced(worker: Worker, folder: Path, **options: Any) -> TracedTraining:
    arguments = (str(folder / "out"), json.dumps(options))
    script = UserScript(checkpoint_job.__file__, False, arguments)
    request = ScriptRequest(script, str(folder), dict(os.environ), processes=2, per_node=2, worst_batch=False)
    outcome = worker.run(request)
    assert outcome.training is not None, outcome
    return outcome.training


@pytest.mark.tracing
@pytest.mark.slow
def test_checkpoints_need_what_real_ranks_need(worker: Worker, tmp_path: Path) -> None:
    """The peak of each phase on the GPU and in RAM: full and sharded saves, resuming, offload, a model that the first
    rank loads for all."""
    started = [start(rank, tmp_path) for rank in (0, 1)]
    gloo = "cuda:nccl,cpu:gloo"
    trainings = {name: traced(worker, tmp_path, fsdp_config=CASES[name], ddp_backend=gloo) for name in CASES}
    first, second = [answers(process) for process in started]
    for name, training in trainings.items():
        assert training.host is not None
        predicted: dict[str, dict[Any, int]] = {"gpu": peaks_of(training.trace), "ram": training.host.tensor_bytes}
        for space, phases in predicted.items():
            assert {"load", "save", "resume"} <= phases.keys()
            for phase, size in phases.items():
                assert abs(size - first[name][space][phase]) <= SMALL, (name, space, phase)
        for phase, size in training.host.of_other_ranks.items():
            if phase in predicted["ram"] and "offload" not in name:  # under offload their shards are there, too
                more = second[name]["ram"][phase] - size
                late = (
                    4 * 96 * 1003 if phase == "resume" else 0
                )  # gloo's thread may free a whole tensor after the next
                assert -SMALL <= more <= late + SMALL, (name, phase)
        padded = 4 * 96 * 502  # of the largest tensor, which only the last rank pads to gather it
        for phase, size in second[name]["gpu"].items():
            assert size <= predicted["gpu"][phase] + padded + SMALL, (name, phase)

    # Ranks of NCCL alone, as torchrun starts them, broadcast through the GPU, and each copies back what goes to RAM.
    alone = traced(worker, tmp_path, fsdp_config=CASES["full"], ddp_backend="nccl").host
    beside = trainings["full"].host
    assert alone is not None and beside is not None
    assert alone.tensor_bytes["resume"] - beside.tensor_bytes["resume"] == 4 * 96 * 1003, "the embedding"
