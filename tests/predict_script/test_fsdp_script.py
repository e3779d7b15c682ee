"""Scripts with FSDP2: one rank is traced, and what is not predicted is refused."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any, Final

import pytest

from hf_memkit.cli.predict_script import _advice
from hf_memkit.common.terms import Category
from hf_memkit.prediction.gpu_memory import cublas_workspace_bytes
from hf_memkit.prediction.launch_command import PARALLELISM
from hf_memkit.prediction.trace.request import TORCHRUN
from hf_memkit.prediction.trace.trace import Trace
from hf_memkit.prediction.trace.work import EXCHANGES
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
if "parallel" in options:
    from accelerate.parallelism_config import ParallelismConfig

    options["parallelism_config"] = ParallelismConfig(**options.pop("parallel"))
if "deepspeed" not in options:
    options["fsdp"] = True
    options["fsdp_config"] = {
        "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"], **options.pop("fsdp_config", {})
    }
arguments = TrainingArguments("out", max_steps=3, report_to=[], bf16=True, **options)
evaluated = rows if "eval_strategy" in options else None
Trainer(model, arguments, train_dataset=rows, eval_dataset=evaluated).train()
"""

_LAUNCHED: Final = _SCRIPT.replace('if "deepspeed" not in options:', "if False:")

_LOADED: Final = """
import json, sys
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Trainer, TrainingArguments
from transformers.distributed import DistributedConfig

LlamaConfig(
    architectures=["LlamaForCausalLM"], hidden_size=64, intermediate_size=128, num_hidden_layers=2,
    num_attention_heads=2, num_key_value_heads=2, vocab_size=514, use_cache=False,
).save_pretrained("saved")
sizes = DistributedConfig(**json.loads(sys.argv[1]))
model = AutoModelForCausalLM.from_pretrained("saved", distributed_config=sizes)
rows = [{"input_ids": torch.arange(128), "labels": torch.arange(128)}] * 64
arguments = TrainingArguments("out", max_steps=3, report_to=[], bf16=True, save_only_model=True, save_steps=1)
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


@pytest.mark.slow
def test_the_launchers_precision_counts_as_the_arguments(predict: Predict) -> None:
    """Defect: a script whose precision only accelerate's YAML names is refused, or predicted in fp32."""
    launched = {"ACCELERATE_MIXED_PRECISION": "bf16"}
    outcomes = [
        predict(_SCRIPT.replace("bf16=True", f"bf16={bf16}"), "{}", processes=2, per_node=2, environment=environment)
        for bf16, environment in ((True, {}), (False, launched))
    ]
    by_argument, by_launcher = [outcome.training for outcome in outcomes]
    assert by_argument is not None and by_launcher is not None, outcomes[1].failed
    assert by_launcher.arguments.bf16
    assert by_launcher.trace.events == by_argument.trace.events


def test_heads_that_tensor_parallelism_cannot_divide_are_named(predict: Predict) -> None:
    """Defect: an error about the shape of a tensor, which names no setting."""
    outcome = predict(_LOADED.replace("num_key_value_heads=2", "num_key_value_heads=1"), '{"tp_size": 2}',
                      processes=2, per_node=2)  # fmt: skip
    assert outcome.failed is not None
    assert "tp_size=2 does not divide the model's num_attention_heads=2 and num_key_value_heads=1" in (
        outcome.failed.message
    )


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


@pytest.mark.slow
@pytest.mark.tracing
def test_one_rank_of_torchrun_is_traced(predict: Predict) -> None:
    """Defect: one process counts as started without a launcher, where Trainer refuses FSDP."""
    outcome = predict(_SCRIPT, "{}", environment={TORCHRUN: "none"})
    training = outcome.training
    assert training is not None, outcome.failed
    assert training.fsdp
    assert 4 * PARAMETERS <= bytes_alive(training.trace, "weights") <= 4 * PARAMETERS + ROUNDING


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
    ("options", "reason"),
    [
        ('{"fsdp_config": {"version": 1}}', "fsdp: FSDP version 1 "),
        ('{"parallel": {"sp_size": 2, "dp_shard_size": 2}}', "Write cp_size in its place"),
        ('{"deepspeed": {"tensor_parallel": {"autotp_size": 2}}}', "DistributedConfig(tp_size=2)"),
    ],
)
def test_what_is_not_predicted_is_refused(predict: Predict, options: str, reason: str) -> None:
    failed = predict(_SCRIPT, options, processes=4, per_node=4).failed
    assert failed is not None and failed.type == "Unmodelled" and not failed.by_script
    assert reason in failed.message and "\n" not in failed.message


@pytest.mark.slow
def test_the_version_in_effect_decides(predict: Predict) -> None:
    """Defect: the variable of a preset is refused although the arguments choose version 2; or the refusal does not
    name the variable that is to be set."""
    environment = {"ACCELERATE_USE_FSDP": "true"}
    assert predict(_SCRIPT, "{}", processes=2, per_node=2, environment=environment).training is not None
    failed = predict(_LAUNCHED, "{}", processes=2, per_node=2, environment=environment).failed
    assert failed is not None and failed.message.startswith("ACCELERATE_USE_FSDP without FSDP_VERSION: ")
    assert "Set FSDP_VERSION=2" in failed.message
    environment["FSDP_VERSION"] = "1"  # as accelerate's YAML with fsdp_version: 1
    failed = predict(_LAUNCHED, "{}", processes=2, per_node=2, environment=environment).failed
    assert failed is not None and failed.message.startswith("FSDP_VERSION=1: FSDP version 1 is not predicted")
    assert "fsdp_version: 2 in accelerate's config" in failed.message


@pytest.mark.slow
@pytest.mark.tracing
@pytest.mark.parametrize(
    ("sizes", "sharing", "longest"),
    [
        ({"dp_replicate_size": 2, "dp_shard_size": 2}, 2, 128),
        pytest.param({"cp_size": 2, "dp_shard_size": 2}, 4, 64, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("by_launcher", [pytest.param(False, marks=pytest.mark.slow), True])
def test_ranks_share_weights_and_sequences(
    predict: Predict, sizes: dict[str, int], sharing: int, longest: int, by_launcher: bool
) -> None:
    """Defect: the sizes in accelerate's environment are not read; attention is not split, without a message."""
    options = {} if by_launcher else {"parallel": sizes}
    environment = {f"PARALLELISM_CONFIG_{name.upper()}": str(size) for name, size in sizes.items()}
    environment = {PARALLELISM: "true", **environment} if by_launcher else {}
    outcome = predict(_SCRIPT, json.dumps(options), environment=environment, processes=4, per_node=4)
    training = outcome.training
    assert training is not None, outcome.failed
    share = 4 * PARAMETERS / sharing
    assert share <= bytes_alive(training.trace, "weights") <= share + ROUNDING
    logits = 4 * 8 * longest * 514  # in fp32, of 8 rows
    trace = training.trace
    sizes_of_losses = {
        size
        for size, operation in zip(trace.sizes_bytes, trace.operation_of, strict=True)
        if "log_softmax" in trace.operations[operation]
    }
    assert max(sizes_of_losses) in range(logits, logits + 512)
    exchanges = [name for name in trace.operations if "all_to_all_single" in name]
    assert bool(exchanges) == ("cp_size" in sizes), "gradients of keys and values go round"
    assert training.parallel_sizes == sizes
    assert training.ranks_per_batch == sizes.get("cp_size", 1)


@pytest.mark.slow
@pytest.mark.tracing
def test_context_parallelism_is_timed_and_counted(predict: Predict) -> None:
    """Defect: exchanges that take no time or that hold computation up while it has other work; rows of an epoch as
    if each rank had rows of its own."""
    sizes = {"cp_size": 2, "dp_shard_size": 2}
    options = {"parallel": sizes, "per_device_train_batch_size": 4}
    training = predict(_SCRIPT, json.dumps(options), processes=4, per_node=4, for_plan=True).training
    assert training is not None and training.trace.work is not None
    assert training.facts.length.rows_an_epoch == 64

    work = training.trace.work
    begin, end = work.steps()[-1]
    calls = [work.operations[call] for call in work.calls[begin:end]]
    keys_and_values = 2 * 4 * 64 * 64 * 2  # two tensors, four rows of 64 tokens in a rank, 64 wide, in bf16
    sent = [call.moved_bytes for call in calls if (call.name, call.stream) == ("all-gather", EXCHANGES)]
    assert sent == [keys_and_values] * 4, "two layers, forward and backward: (2 - 1) / 2 of what two ranks have"
    returned = [call.moved_bytes for call in calls if (call.name, call.stream) == ("all-to-all", EXCHANGES)]
    assert len(returned) == 4, "gradients of keys and values: to the next rank, and back to their own"
    waits = {(wait.stream, wait.on) for wait in work.waits if begin < wait.call <= end}
    assert {(EXCHANGES, 0), (0, EXCHANGES)} <= waits


@pytest.mark.tracing
@pytest.mark.parametrize(
    "sizes", [{"tp_size": 2, "fsdp_size": 2}, pytest.param({"fsdp_size": 4}, marks=pytest.mark.slow)]
)
def test_a_model_is_sharded_when_loaded(predict: Predict, sizes: dict[str, int]) -> None:
    """Defect: whole weights are loaded, or the buckets of DistributedDataParallel are added."""
    outcome = predict(_LOADED, json.dumps(sizes), processes=4, per_node=4)
    training = outcome.training
    assert training is not None, outcome.failed
    assert training.sharded
    assert (training.parallel_sizes, training.ranks_per_batch) == (sizes, sizes.get("tp_size", 1))
    share = 4 * PARAMETERS / 4
    assert share <= bytes_alive(training.trace, "weights") <= share + ROUNDING
    assert 2 * share <= bytes_alive(training.trace, "optimizer") <= 2 * (share + ROUNDING)


@pytest.mark.slow
@pytest.mark.tracing
@pytest.mark.parametrize("by_first_rank", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_one_rank_loads_for_all_only_with_the_launchers_variable(predict: Predict, by_first_rank: bool) -> None:
    """Defect: `cpu_ram_efficient_loading` counts the model once where each process loads it."""
    script = _SCRIPT.replace("options = json", 'model.save_pretrained("saved")\noptions = json')
    script = script.replace(
        "evaluated =", 'model = LlamaForCausalLM.from_pretrained("saved", dtype=torch.bfloat16)\nevaluated ='
    )
    environment = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"} if by_first_rank else {}
    options = '{"fsdp_config": {"cpu_ram_efficient_loading": true}}'
    training = predict(script, options, processes=4, per_node=4, environment=environment).training
    assert training is not None and training.host is not None
    assert ("load" in training.host.of_other_ranks) is by_first_rank


@pytest.mark.tracing
@pytest.mark.parametrize(
    ("changes", "sizes", "fix"),
    [
        ({}, '{"pp_size": 4}', "Write fsdp_size=4"),
        ({"Llama": "Qwen3Moe", "hidden_size": "num_experts=4, hidden_size"}, '{"ep_size": 2, "fsdp_size": 4}',
         "Omit ep_size"),
        ({'"saved", ': '"saved", quantization_config=BitsAndBytesConfig(load_in_4bit=True), ',
          "import AutoModel": "import BitsAndBytesConfig, AutoModel",
          "rows =": "import peft; model = peft.get_peft_model(model, peft.LoraConfig(task_type='CAUSAL_LM'))\nrows ="},
         '{"tp_size": 4}', "Omit distributed_config"),
    ],
)  # fmt: skip
def test_what_is_not_loaded_in_shares_is_refused(
    predict: Predict, changes: dict[str, str], sizes: str, fix: str
) -> None:
    script = _LOADED
    for old, new in changes.items():
        script = script.replace(old, new)
    failed = predict(script, sizes, processes=4, per_node=4).failed
    assert failed is not None and fix in failed.message and "\n" not in failed.message


@pytest.mark.slow
@pytest.mark.tracing
@pytest.mark.parametrize("kind", ["FULL_STATE_DICT", pytest.param("SHARDED_STATE_DICT", marks=pytest.mark.slow)])
def test_a_checkpoint_is_loaded_into_shards(predict: Predict, kind: str) -> None:
    """Defect: the first rank reads the whole model and its states, or RAM is counted for every rank."""
    options = {"resume_from_checkpoint": "out/checkpoint-1", "fsdp_config": {"state_dict_type": kind}}
    training = predict(_SCRIPT, json.dumps(options), processes=4, per_node=4).training
    assert training is not None and training.host is not None
    assert "resume" in {phase for _, _, phase in training.trace.spans()}
    full = 4 * 3 * PARAMETERS  # fp32 weights and two moments
    of_first, others = (training.host.tensor_bytes[phase] for phase in ("resume", "optimizer"))
    if kind == "FULL_STATE_DICT":
        assert of_first > full * 2 / 3 > others and {"resume", "save"} <= set(training.host.of_other_ranks)
    else:
        assert of_first < full / 3 and not training.host.of_other_ranks


@pytest.mark.slow
@pytest.mark.tracing
def test_offloaded_shards_are_rounded_to_powers_of_two(predict: Predict) -> None:
    """Defect: page-locked memory is counted without the rounding of its allocator."""
    training = predict(_SCRIPT, '{"fsdp_config": {"cpu_offload": true}}', processes=4, per_node=4).training
    assert training is not None and training.host is not None
    rows_of_a_rank = (514 + 3) // 4
    matrices = 2 * [rows_of_a_rank * 64] + 2 * [*(4 * [64 * 64 // 4]), *(3 * [64 * 128 // 4])]
    vectors = 5 * [64 // 4]
    pinned = sum(2 * (1 << (4 * elements - 1).bit_length()) for elements in (*matrices, *vectors))  # and gradients
    states = 2 * 4 * sum(matrices + vectors)
    at_step = training.host.tensor_bytes["optimizer"]
    assert pinned + states <= at_step <= pinned + states + 4 * max(matrices) + 4096
    assert bytes_alive(training.trace, "weights") <= 1024, "rotary frequencies, which are buffers"


@pytest.mark.slow
@pytest.mark.tracing
@pytest.mark.parametrize(
    ("config", "savings"),
    [
        ({}, ["activation_checkpointing", "per_device_train_batch_size", "cpu_offload"]),
        pytest.param(
            {"activation_checkpointing": True, "cpu_offload": True, "reshard_after_forward": False},
            ["reshard_after_forward", "per_device_train_batch_size"],
            marks=pytest.mark.slow,
        ),
    ],
)
def test_what_saves_memory_is_named(predict: Predict, config: dict[str, bool], savings: list[str]) -> None:
    """Defect: a search that silently finds nothing, because plans do not change FSDP2."""
    training = predict(_SCRIPT, json.dumps({"fsdp_config": config}), processes=4, per_node=4).training
    assert training is not None
    assert [saving.partition(":")[0] for saving in training.unused_savings] == savings


def test_what_saves_memory_is_shown_only_where_it_is_short() -> None:
    traced = SimpleNamespace(sharded=True, unused_savings=("cpu_offload: true",))
    training: Any = SimpleNamespace(traced=traced, setup=SimpleNamespace(micro_batch_size=1))
    fits: Any = SimpleNamespace(verdict="fits")
    assert _advice(fits, training, None) == []
    lacks: Any = SimpleNamespace(verdict="does not fit")
    assert _advice(lacks, training, None) == ["Try, in this order: cpu_offload: true; more GPUs."]


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        '{"fsdp_config": {"activation_checkpointing": true}}',
        '{"fsdp_config": {"cpu_offload": true}}',
        '{"fsdp_config": {"state_dict_type": "SHARDED_STATE_DICT"}, "save_steps": 1}',
        '{"fsdp_config": {"cpu_ram_efficient_loading": true}}',
        '{"gradient_accumulation_steps": 4}',
        '{"load_best_model_at_end": true, "eval_strategy": "steps", "eval_steps": 1, "save_steps": 1}',
        '{"torch_compile": true}',
    ],
)
def test_a_script_with_this_option_is_traced(predict: Predict, options: str) -> None:
    outcome = predict(_SCRIPT, options, processes=4, per_node=4)
    assert outcome.training is not None, outcome.failed
    assert outcome.training.fsdp
