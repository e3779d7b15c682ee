from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import BertConfig, BertForMaskedLM, LlamaConfig, LlamaForCausalLM, Trainer

from hf_memkit import MemoryReportCallback
from hf_memkit.measuring.memory.records import read_records, steps
from tests.measuring.recorded import EVERYTHING
from tests.tiny_trainer import losses_of

SMALL = {
    "hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 16, "vocab_size": 64,
}  # fmt: skip
REENTRANT = {"activation_checkpointing_kwargs": {"use_reentrant": True}}


@pytest.mark.compat
@pytest.mark.parametrize("kwargs", [{}, REENTRANT])
def test_layers_times_micro_batches_times_steps(make_trainer: Any, bare: Trainer, kwargs: dict[str, Any]) -> None:
    callback = MemoryReportCallback()
    trainer = make_trainer([callback], **EVERYTHING, activation_checkpointing=True, **kwargs)
    trainer.train()
    assert losses_of(trainer) == losses_of(bare)
    records = read_records(callback.path)
    assert [s["recomputed_layers"] for s in steps(records)] == [2 * 2] * 3
    assert records[-1]["recomputed_layers"] == 2 * 2 * 3
    assert records[0]["arguments"]["activation_checkpointing"] is True


def left_alone_by_dynamo() -> LlamaForCausalLM:
    """As a part does that replaces the model's forward; a compiled model's layers get no hooks."""
    model = LlamaForCausalLM(LlamaConfig(**SMALL))
    model.forward = torch.compiler.disable(model.forward)
    return model


@pytest.mark.parametrize("make_model", [left_alone_by_dynamo, lambda: BertForMaskedLM(BertConfig(**SMALL))])
def test_other_architectures(make_trainer: Any, make_model: Any) -> None:
    callback = MemoryReportCallback()
    make_trainer([callback], model=make_model(), max_steps=2, activation_checkpointing=True).train()
    assert [s["recomputed_layers"] for s in steps(read_records(callback.path))] == [3, 3]
