"""A script that torchrun starts twice, with DeepSpeed ZeRO-2 and ZeRO-3."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hf_memkit.common.units import GIB
from hf_memkit.deepspeed import ops
from hf_memkit.measuring.memory.records import steps
from tests.clients.clients import ATTACH, COMMON, Client, script
from tests.clients.compare import (
    assert_complete,
    assert_phases_and_categories,
    assert_same_output,
    assert_same_results,
    ended,
)

pytestmark = pytest.mark.operators

STAGES = (2, 3)


def config(stage: int) -> dict[str, Any]:
    return {
        "zero_optimization": {
            "stage": stage,
            "reduce_bucket_size": 20_000,
            "stage3_param_persistence_threshold": 100,
            "stage3_gather_16bit_weights_on_model_save": True,
        },
        "gradient_clipping": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
    }


def client(stage: int, folder: Path) -> Client:
    path = folder / f"zero{stage}.json"
    path.write_text(json.dumps(config(stage)))
    return Client(
        f"zero{stage}", script("run_lora"), ATTACH,
        (
            *COMMON, "--model", "{inputs}/tiny-gpt2", "--train_file", "{inputs}/texts.jsonl",
            "--rank", "0", "--deepspeed", str(path), "--save_strategy", "no",
            "--per_device_train_batch_size", "2", "--gradient_accumulation_steps", "2",
        ),
    )  # fmt: skip


@pytest.fixture(scope="module")
def ran(drive: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("zero")
    ops.build(("deepspeed_shm_comm",), print, cpu=True)
    counted = {f"zero{stage}": ("counted",) for stage in STAGES}
    return drive([client(stage, folder) for stage in STAGES], processes=2, further=counted)


@pytest.mark.parametrize("stage", STAGES)
def test_results_and_output_are_the_same(stage: int, ran: Path) -> None:
    place = ran / f"zero{stage}"
    assert_same_results(ended(place / "without"), ended(place / "with"))
    for rank in (0, 1):
        warm_up = ended(ran / "zero2" / "warm-up", rank)
        without, having = ended(place / "without", rank), ended(place / "with", rank)
        assert_same_output(without, having, summaries=1 - rank, before=warm_up)
    assert sorted(path.name for path in ended(place / "with").out.glob("memory-*")) == [
        "memory-rank0.jsonl", "memory-rank1.jsonl", "memory-report.html",
    ]  # fmt: skip


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("stage", STAGES)
def test_records_are_complete_and_each_rank_holds_its_part(stage: int, rank: int, ran: Path) -> None:
    """Half of the optimizer's fp32 copy and two states; of the weights all (stage 2), or half and the small ones."""
    records = ended(ran / f"zero{stage}" / "with", rank).records(rank)
    assert_complete(records, evaluations=0, saves=0)
    run, first = records[0], steps(records)[0]
    assert (run["rank"], run["world_size"], run["engine"]) == (rank, 2, "DeepSpeedEngine")
    assert run["arguments"]["deepspeed_stage"] == stage and run["optimizer_classes"][-1] == "AdamW"
    assert (first["samples"], first["micro_batches"]) == (4, 2) and 0 < first["longest_sequence"] < 48
    parameters, held = run["parameters"], first["held"]["host"]
    assert held["optimizer_gib"] * GIB == pytest.approx(12 * parameters / 2, rel=0.02)
    assert held["weights_gib"] * GIB == pytest.approx(4 * parameters / (stage - 1), rel=0.05)
    assert ("gradients_gib" in held) is (stage == 3), "dropped in the step, or a flat partition"


@pytest.mark.parametrize("stage", STAGES)
def test_phases_and_categories_in_an_engine(stage: int, ran: Path) -> None:
    assert_phases_and_categories(ended(ran / f"zero{stage}" / "counted"))
