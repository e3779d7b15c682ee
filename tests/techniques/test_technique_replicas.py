"""Two replicas, each with half of the batch, against one process that accumulates both halves."""

from __future__ import annotations

import multiprocessing
import socket
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from hf_memkit.setup.setup import Setup
from hf_memkit.setup.techniques.replicas import data_parallel
from tests.techniques import replicas_worker
from tests.techniques.jobs import gpt2_job
from tests.techniques.proving import proves


def on_two(folder: Path) -> dict[str, Any]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([replicas_worker.__name__])  # torch and transformers are imported once for both
    with ProcessPoolExecutor(2, mp_context=context) as pool:
        ranks = [pool.submit(replicas_worker.train_rank, rank, port, str(folder)) for rank in range(2)]
        first, second = (rank.result(timeout=300) for rank in ranks)
    assert first["norms"] == second["norms"], "the copies of the model are one model"
    return first


@proves("same-result", "data-parallel")
@pytest.mark.slow
def test_two_replicas_train_as_one_process_with_their_batches(tmp_path: Path) -> None:
    """Gradients are summed in another order: 1e-5."""
    two, one = on_two(tmp_path / "two"), replicas_worker.train(str(tmp_path / "one"), 1, 2)
    assert two["losses"] == pytest.approx(one["losses"], abs=1e-5)
    assert two["norms"] == pytest.approx(one["norms"], abs=1e-5)
    assert two["wrapped"] == "DistributedDataParallel" and two["ddp_find_unused_parameters"] is False
    assert "ddp_find_unused_parameters" not in one, "with one process there is nothing to set"


def test_deepspeed_needs_no_replicas() -> None:
    setup = Setup(preset="x", job=gpt2_job(None, gpus=2)).put("deepspeed.config", {}, "another engine")
    assert data_parallel(setup) == setup
