"""Scripts with FSDP2: one rank is traced, and what is not predicted is refused."""

from __future__ import annotations

from typing import Any, Final

import pytest

from hf_memkit.common.terms import Category
from hf_memkit.prediction.gpu_memory import cublas_workspace_bytes
from hf_memkit.prediction.trace.trace import Trace
from tests.predict_script.conftest import Predict

_SCRIPT: Final = """
import json, sys
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

model = LlamaForCausalLM(LlamaConfig(
    hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
    vocab_size=514, use_cache=False,
))
rows = [{"input_ids": torch.arange(128), "labels": torch.arange(128)}] * 64
options = json.loads(sys.argv[1])
if options.pop("hybrid", False):
    from accelerate.parallelism_config import ParallelismConfig

    options["parallelism_config"] = ParallelismConfig(dp_replicate_size=2, dp_shard_size=2)
config = {"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"], **options.pop("fsdp_config", {})}
arguments = TrainingArguments("out", max_steps=3, report_to=[], bf16=True, fsdp=True, fsdp_config=config, **options)
Trainer(model, arguments, train_dataset=rows).train()
"""

PARAMETERS: Final = 2 * 514 * 64 + 2 * (4 * 64 * 64 + 3 * 64 * 128 + 2 * 64) + 64
TENSORS: Final = 2 + 2 * 9 + 1
ROUNDING: Final = 512 * TENSORS + 2 * 4 * 64
"""Bytes: each tensor is rounded up to 512, and each of the two with 514 rows to a row more than a quarter."""


def bytes_alive(trace: Trace, category: Category) -> int:
    """Bytes of a category after the last optimizer step."""
    end = [stop for _, stop, phase in trace.spans() if phase == "optimizer"][-1]
    return trace.at(end - 1).categories[category]


@pytest.mark.tracing
def test_a_rank_holds_its_share(predict: Predict) -> None:
    """Defect: whole weights stay, or the buffers of a process that has all gradients are added."""
    outcome = predict(_SCRIPT, "{}", processes=4, per_node=4)
    training = outcome.training
    assert training is not None, outcome.failed
    assert training.fsdp
    share = 4 * PARAMETERS / 4  # fp32, four ranks
    assert share <= bytes_alive(training.trace, "weights") <= share + ROUNDING
    assert 2 * share <= bytes_alive(training.trace, "optimizer") <= 2 * (share + ROUNDING)
    workspaces = 2 * cublas_workspace_bytes((8, 0))  # of the threads that run forward and backward
    assert bytes_alive(training.trace, "buffers") == workspaces, "gathered weights are freed"
    assert len(set(training.trace.stream_of)) > 2, "gathers and reductions have streams of their own"


@pytest.mark.tracing
def test_collectives_are_recorded_with_their_streams(predict: Predict) -> None:
    """Defect: communication that takes no time, or that computation never waits for."""
    outcome = predict(_SCRIPT, '{"gradient_accumulation_steps": 2}', processes=8, per_node=4, for_plan=True)
    assert outcome.training is not None, outcome.failed
    work = outcome.training.trace.work
    assert work is not None
    begin, end = work.steps()[-1]
    calls = [work.operations[call] for call in work.calls[begin:end]]
    collectives = [call for call in calls if call.kind == "collective"]
    assert {(call.ranks, call.on_node) for call in collectives} == {(8, 4)}

    whole = 2 * PARAMETERS * 7 // 8  # bytes that a rank sends of the weights in bf16
    gathered = [call for call in collectives if call.name == "all-gather"]
    kept = 2 * (514 * 64 + 64) * 7 // 8  # the last norm and the head stay gathered between forward and backward
    expected = 4 * whole - 2 * kept
    assert expected <= sum(call.moved_bytes for call in gathered) < 1.01 * expected, "each micro-batch, both ways"
    reduced = [call for call in collectives if call.name == "reduce-scatter"]
    assert len(reduced) == 4, "the embedding, two layers and the head, in the last micro-batch"
    assert whole <= sum(call.moved_bytes for call in reduced) < 1.03 * whole
    (gathers,), (reductions,) = ({call.stream for call in group} for group in (gathered, reduced))
    assert 0 != gathers != reductions != 0

    pairs = {(wait.stream, wait.on) for wait in work.waits if begin < wait.call <= end}
    assert {(0, gathers), (0, reductions), (reductions, 0)} <= pairs
    assert not [call.name for call in calls if call.kind == "unknown"]


@pytest.mark.parametrize(
    ("options", "options_of_request", "reason"),
    [
        ('{"fsdp_config": {"version": 1}}', {}, "Write version: 2 in fsdp_config"),
        ('{"hybrid": true}', {}, "parallelism_config: tensor, context and hybrid parallelism"),
    ],
)
def test_what_is_not_predicted_is_refused(
    predict: Predict, options: str, options_of_request: dict[str, Any], reason: str
) -> None:
    failed = predict(_SCRIPT, options, processes=4, per_node=4, **options_of_request).failed
    assert failed is not None and failed.type == "Unmodelled" and not failed.by_script
    assert reason in failed.message and "\n" not in failed.message


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        '{"fsdp_config": {"activation_checkpointing": true}}',
        '{"fsdp_config": {"cpu_offload": true}}',
        '{"fsdp_config": {"state_dict_type": "SHARDED_STATE_DICT"}, "save_steps": 1}',
        '{"fsdp_config": {"cpu_ram_efficient_loading": true}}',
        '{"gradient_accumulation_steps": 4}',
        '{"resume_from_checkpoint": "out/checkpoint-1"}',
        '{"torch_compile": true}',
    ],
)
def test_a_script_with_this_option_is_traced(predict: Predict, options: str) -> None:
    outcome = predict(_SCRIPT, options, processes=4, per_node=4)
    assert outcome.training is not None, outcome.failed
    assert outcome.training.fsdp
