"""FSDP2 as one fake rank needs the bytes that each of several real ranks needs on a CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Final

import pytest

from hf_memkit.common.errors import Unmodelled
from hf_memkit.common.terms import CATEGORIES
from hf_memkit.prediction.child.gpu import fsdp
from hf_memkit.prediction.from_script import _with_ram
from hf_memkit.prediction.from_setup import _rank_trace
from hf_memkit.prediction.traced_training import HostMemory
from hf_memkit.setup.job import Job, process_row
from hf_memkit.setup.process_group import single_process_environment
from hf_memkit.setup.setup import Setup
from tests.prediction.fsdp_rank import CASES, LENGTH
from tests.prediction.test_prediction import made
from tests.prediction.test_split_states import MACHINE
from tests.prediction.traces import trace_of

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
    """Uneven shards, tied weights, a mixture of experts, checkpointing, accumulation, hybrid sharding, contexts."""
    port = int(single_process_environment()["MASTER_PORT"])  # a free one
    started = [start("real", rank, ranks, port) for rank in range(ranks)]
    real = [answer(process) for process in started]
    for rank in (0, ranks - 1):
        fake = answer(start("fake", rank, ranks))
        for case in CASES:
            if "compiled" in case:  # dynamo keeps the positions of the first call, and compiled code some of a step's
                kept = {name: size - fake[case][name] for name, size in real[rank][case].items()}
                assert set(kept.values()) == {0, 8 * LENGTH}, (ranks, rank, kept)
                continue
            assert fake[case] == real[rank][case], (ranks, rank, case)
            # Both are measured by one tracer. Without it: padded weights, two states of AdamW, buffers and counters.
            left = fake[case]["after step"] - fake[case]["padded"] - 2 * fake[case]["shards"]
            assert 0 <= left < 4096, (ranks, rank, case)


def test_a_torch_without_a_private_name_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fsdp, "_missing", ["module 'x' has no attribute 'y'"])
    plugin = SimpleNamespace(fsdp_version=2)
    trainer = SimpleNamespace(accelerator=SimpleNamespace(state=SimpleNamespace(fsdp_plugin=plugin)))
    with pytest.raises(
        Unmodelled, match=r"torch \S+ lacks what the trace of FSDP2 needs \(module 'x' has no attribute"
    ):
        fsdp.refuse_fsdp(trainer)


@pytest.mark.parametrize(("size", "fix"), [("pp_size", "Write fsdp_size"), ("ep_size", "Omit ep_size")])
def test_pipelines_and_shared_experts_are_refused(size: str, fix: str) -> None:
    config = SimpleNamespace(distributed_config=SimpleNamespace(**{size: 2}))
    trainer = SimpleNamespace(accelerator=None, model=SimpleNamespace(config=config), args=None)
    with pytest.raises(Unmodelled, match=f"{size}=2: .*{fix}"):
        fsdp.refuse_parallelism(trainer)


def test_ram_of_a_full_save_is_the_first_ranks() -> None:
    host = HostMemory(10, {"load": 100, "save": 400}, of_other_ranks={"save": 50, "resume": 500})  # which is not done
    libraries = process_row().size_bytes
    assert _with_ram(made(), host, 4).host_rss_bytes == 4 * (libraries + 10) + 400 + 3 * 100


def test_no_buckets_of_ddp_are_added() -> None:
    """Defect: the buffers of a process that holds all gradients, on top of the shards that are traced."""
    job = Job(None, MACHINE, 1, 8, gpus=4)
    setup = Setup(preset="", job=job).put("arguments.optim", "adamw_torch", "the test's")
    trace = trace_of([1, -1], [512], [(2, "optimizer")])
    trace.category_of = [CATEGORIES.index("gradients")]
    assert len(_rank_trace(trace, setup, job, None).sizes_bytes) == 2
    assert _rank_trace(trace, setup.put("arguments.fsdp", True, "the test's"), job, None) is trace
