"""FSDP1 as one fake rank needs the bytes that each of two real ranks needs on a CPU."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from hf_memkit.setup.process_group import single_process_environment
from tests.benchmarks.fsdp1_rank import CASES
from tests.prediction.test_fsdp import ROOT, answer


@pytest.mark.tracing
@pytest.mark.slow
def test_a_fake_rank_of_fsdp1_has_the_bytes_of_real_ranks() -> None:
    """Flat parameters of layers and of each matrix of LoRA, original parameters, casts, a checkpoint around a unit."""
    port = single_process_environment()["MASTER_PORT"]  # a free one
    ranks = [start("real", "0", port), start("real", "1", port)]
    fake = answer(start("fake", "0"))
    for real in map(answer, ranks):
        for case in CASES:
            assert fake[case] == real[case], case


def start(kind: str, rank: str, *port: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.benchmarks.fsdp1_rank", kind, rank, "2", *port]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
