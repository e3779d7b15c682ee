"""ZeRO-R's activation checkpointing: the same losses, half of each checkpoint on each of two ranks; and refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from hf_memkit.common.errors import SettingError
from hf_memkit.deepspeed.checkpointing import zero_r_checkpointing
from tests.engine.conftest import Results
from tests.engine.tiny_training import load_model
from tests.engine.zero_r_cases import CASES, CHECKPOINT_ELEMENTS


@pytest.mark.parametrize("name", [name for name, options in CASES.items() if options])
def test_losses_are_those_of_plain_checkpointing(double: Results, folder: Path, name: str) -> None:
    double("zero1")
    for rank in range(2):
        trained = json.loads((folder / "2" / f"more-rank{rank}.json").read_text())
        assert trained[name]["losses"] == trained["plain"]["losses"]
        assert trained[name]["undone"]
        if CASES[name].get("contiguous"):  # a buffer for each of two layers
            assert trained[name]["kept_elements"] == [CHECKPOINT_ELEMENTS // 2] * 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "activation_checkpointing=True"),
        ({"partition": True}, "between tensor-parallel ranks, and this job has none"),
        ({"contiguous": True}, "only with partition=True"),
        pytest.param(
            {"cpu": True},
            "on a CPU they already are",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU it is right"),
        ),
    ],
)
def test_what_saves_nothing_is_refused(folder: Path, options: dict[str, bool], message: str) -> None:
    model = load_model(folder / "initial", bf16_weights=False, lora=False)
    with pytest.raises(SettingError, match="activation checkpointing is off"):
        zero_r_checkpointing(model, **options)
    model.gradient_checkpointing_enable()
    with pytest.raises(SettingError, match=message):
        zero_r_checkpointing(model, **options)


def test_no_thread_of_the_process_group_outlives_it(single: Results, double: Results, folder: Path) -> None:
    """With engines and their parameters alive: threads that are left may abort the interpreter's shutdown."""
    single("plain"), double("zero1")
    paths = list(folder.glob("*/threads-*.json"))
    assert len(paths) == 4, "two halves in one process each, and two ranks"
    for path in paths:
        assert not [name for name in json.loads(path.read_text()) if "gloo" in name]
