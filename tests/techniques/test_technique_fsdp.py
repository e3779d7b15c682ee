"""FSDP2: two processes that shard on a CPU against one process with the same batches."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from hf_memkit.common.units import GIB
from hf_memkit.measuring.report.load import load_run
from hf_memkit.setup.process_group import single_process_environment
from hf_memkit.setup.setup import Setup
from hf_memkit.setup.techniques.registry import TECHNIQUES
from tests.techniques import fsdp_worker
from tests.techniques.jobs import gpt2_job
from tests.techniques.proving import proves


def on_two(folder: Path) -> list[dict[str, Any]]:
    port = int(single_process_environment()["MASTER_PORT"])  # a free one
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([fsdp_worker.__name__])  # torch and transformers are imported once for both
    with ProcessPoolExecutor(2, mp_context=context) as pool:
        ranks = [pool.submit(fsdp_worker.train_rank, rank, port, str(folder)) for rank in range(2)]
        return [rank.result(timeout=300) for rank in ranks]


@proves("same-result", "fsdp2")
@proves("memory", "fsdp2")
@pytest.mark.slow
def test_two_ranks_train_as_one_process_and_hold_half_each(tmp_path: Path) -> None:
    """Gradients are summed in another order: 1e-5. Each weight has an even number of rows."""
    ranks = on_two(tmp_path / "two")
    for case in fsdp_worker.CASES:
        two, other = (rank[case] for rank in ranks)
        one = fsdp_worker.train(case, str(tmp_path / "one" / case), 1)
        assert two["wrapped"].startswith("FSDP"), case
        assert two["losses"] == pytest.approx(one["losses"], abs=1e-5), case
        assert two["norms"] == pytest.approx(one["norms"], rel=1e-4), case
        assert two["weights"] == other["weights"] == one["weights"] / 2, case
        assert two["states"] == one["states"] / 2, case
        assert_recorded(tmp_path / "two" / case, case, two)
        assert one["saved"] and set(one["saved"]) <= set(two["saved"]), case  # tied weights twice
    assert ranks[0]["checkpointing"]["gathers"] == ranks[0]["plain"]["gathers"] > 0, (
        "recomputing gathers nothing again"
    )


def assert_recorded(folder: Path, case: str, first: dict[str, Any]) -> None:
    """The records of both ranks have the shares that the first one really held."""
    run = load_run(folder)
    assert [rank.rank for rank in run.ranks] == [0, 1], case
    facts = run.first.run
    assert (facts["engine"], facts["world_size"]) == ("FSDP2", 2), case
    assert facts["arguments"]["activation_checkpointing"] is (case in ("checkpointing", "lora")), case
    held = [step["held"]["host"] for step in run.first.steps if "held" in step][-1]
    assert held["weights_gib"] * GIB == pytest.approx(first["weights"], rel=0.01), case
    assert held["optimizer_gib"] * GIB == pytest.approx(first["states"], rel=0.01), case
    if case != "lora":
        assert held["gradients_gib"] * GIB == pytest.approx(first["weights"], rel=0.01), case


def test_four_bit_weights_are_stored_in_the_type_that_they_are_computed_in() -> None:
    """Defect: FSDP2 leaves integers whole, and casts another float, which destroys the codes."""
    setup = TECHNIQUES["fsdp2"](TECHNIQUES["qlora"](Setup(preset="x", job=gpt2_job(gpus=2))))
    quantization = setup["model.quantization"]
    assert quantization["bnb_4bit_quant_storage"] == quantization["bnb_4bit_compute_dtype"] == "bfloat16"
    assert "cpu_ram_efficient_loading" not in setup["arguments.fsdp_config"], "accelerate broadcasts no 4-bit weights"
