"""FSDP2 as one fake rank needs the bytes that each of several real ranks needs on a CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from hf_memkit.setup.process_group import single_process_environment
from tests.prediction.fsdp_rank import CASES

ROOT: Final = Path(__file__).resolve().parents[2]


def start(kind: str, rank: int, ranks: int, port: int = 0) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.prediction.fsdp_rank", kind, str(rank), str(ranks), str(port)]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def answer(process: subprocess.Popen[str]) -> dict[str, dict[str, int]]:
    output, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors[-2000:]
    result: dict[str, dict[str, int]] = json.loads(output)
    return result


@pytest.mark.tracing
@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_one_fake_rank_has_the_bytes_of_real_ranks(ranks: int) -> None:
    """Uneven shards, tied weights, a mixture of experts, checkpointing, accumulation, hybrid sharding."""
    port = int(single_process_environment()["MASTER_PORT"])  # a free one
    started = [start("real", rank, ranks, port) for rank in range(ranks)]
    real = [answer(process) for process in started]
    for rank in (0, ranks - 1):
        fake = answer(start("fake", rank, ranks))
        for case in CASES:
            assert fake[case] == real[rank][case], (ranks, rank, case)
