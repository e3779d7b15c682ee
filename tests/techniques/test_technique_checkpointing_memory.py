"""What checkpointing holds: storages that live in real models, and what the ledger says of page-locked RAM."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from hf_memkit.common.units import MIB
from hf_memkit.setup.ledger import Ledger
from hf_memkit.setup.setup import Setup
from hf_memkit.setup.techniques.registry import find_technique
from hf_memkit.setup.techniques.setup_ledger import rows
from tests.techniques.checkpointed_models import LENGTH, ROWS, WAYS, WIDTH, model_of, one_pass
from tests.techniques.jobs import gpt2_job
from tests.techniques.proving import proves

INPUT = 2 * ROWS * LENGTH * WIDTH
"""Bytes of a layer's input in 16 bits."""

ORDER = (
    "activation-checkpointing", "selective-checkpointing", "every-nth-layer-checkpointing",
    "none",
)  # fmt: skip
"""Of these small models, which have six layers, what holds least first."""


def highest(kind: str, way: str) -> int:
    model = model_of(kind, dtype=torch.bfloat16)
    WAYS[way](model)
    return one_pass(model, measure=True).peak


@proves(
    "memory",
    "activation-checkpointing",
    "every-nth-layer-checkpointing",
    "selective-checkpointing",
    "offloaded-checkpointing",
)
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_what_saves_most(kind: str) -> None:
    actual = {way: highest(kind, way) for way in ORDER}
    assert actual["activation-checkpointing"] == min(actual.values()) < actual["none"] / 2
    assert actual["selective-checkpointing"] < actual["none"] == max(actual.values())
    assert actual["every-nth-layer-checkpointing"] < actual["none"]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_offloaded_inputs_are_page_locked_in_powers_of_two(dtype: str) -> None:
    job = replace(gpt2_job("gpt2-xl", micro_batch_size=1, sequence_length=1024), gpus=2)
    setup = Setup(preset="x", job=job).put("model.dtype", dtype, "x")
    assert not Ledger(rows(setup)).total_bytes("pinned")
    each = {"bfloat16": 4, "float32": 8}[dtype] * MIB  # 3.125 and 6.25 MiB
    offloaded = find_technique("offloaded-checkpointing")(setup)
    by_part = setup.put("model_parts.checkpoint_offload", {}, "x")
    for each_setup in (offloaded, by_part):
        assert Ledger(rows(each_setup)).total_bytes("pinned") == 2 * 48 * each


def test_the_ledger_counts_nothing_that_grows_with_the_batch() -> None:
    small, large = (
        Ledger(rows(Setup(preset="x", job=gpt2_job(micro_batch_size=size)).put("model.dtype", "bfloat16", "x")))
        for size in (1, 64)
    )
    assert small.total_bytes("device") == large.total_bytes("device") > 0
    assert not {row.category for row in large.rows if row.place == "device"} & {"activations", "loss"}
