from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import BertConfig, BertForMaskedLM, LlamaConfig, LlamaForCausalLM

from hf_memkit import MemoryReportCallback
from hf_memkit.measuring.memory.records import read_records, steps

SMALL = {
    "hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 16, "vocab_size": 64,
}  # fmt: skip
REENTRANT = {"activation_checkpointing_kwargs": {"use_reentrant": True}}


@pytest.mark.compat
@pytest.mark.parametrize("kwargs", [{}, REENTRANT])
def test_layers_times_micro_batches_times_steps(make_trainer: Any, kwargs: dict[str, Any]) -> None:
    callback = MemoryReportCallback()
    make_trainer([callback], gradient_accumulation_steps=3, activation_checkpointing=True, **kwargs).train()
    records = read_records(callback.path)
    assert [s["recomputed_layers"] for s in steps(records)] == [2 * 3] * 3
    assert records[-1]["recomputed_layers"] == 2 * 3 * 3
    assert records[0]["arguments"]["activation_checkpointing"] is True


def test_none_without(make_trainer: Any) -> None:
    callback = MemoryReportCallback()
    make_trainer([callback]).train()
    records = read_records(callback.path)
    assert [s["recomputed_layers"] for s in steps(records)] == [0] * 3 and records[-1]["recomputed_layers"] == 0


@pytest.mark.parametrize("model", [LlamaForCausalLM(LlamaConfig(**SMALL)), BertForMaskedLM(BertConfig(**SMALL))])
def test_other_architectures(make_trainer: Any, model: Any) -> None:
    callback = MemoryReportCallback()
    make_trainer([callback], model=model, max_steps=2, activation_checkpointing=True).train()
    assert [s["recomputed_layers"] for s in steps(read_records(callback.path))] == [3, 3]


def test_a_forward_that_dynamo_leaves_alone_is_not_taken_for_compiled(make_trainer: Any) -> None:
    """As a part does that replaces the model's forward; a compiled model's layers get no hooks."""
    model = LlamaForCausalLM(LlamaConfig(**SMALL))
    model.forward = torch.compiler.disable(model.forward)
    callback = MemoryReportCallback()
    make_trainer([callback], model=model, max_steps=2, activation_checkpointing=True).train()
    assert [s["recomputed_layers"] for s in steps(read_records(callback.path))] == [3, 3]
