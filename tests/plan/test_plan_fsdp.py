"""Plans with FSDP2: of a script that has it, and as another engine of one that has not."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any, Final

import pytest
from transformers.trainer_pt_utils import AcceleratorConfig

from hf_memkit.catalog.hardware import described_machine
from hf_memkit.common.errors import InputError
from hf_memkit.common.user_script import UserScript
from hf_memkit.plan.candidate import Candidate, Choice, combine
from hf_memkit.plan.choices import choices_for
from hf_memkit.plan.make_plan import _refuse_sequences
from hf_memkit.plan.pasted import pasted
from hf_memkit.plan.refused_settings import refused
from hf_memkit.plan.wording import gpu_of
from hf_memkit.prediction.running_scripts import ScriptJob
from hf_memkit.prediction.traced_training import Fsdp, TracedTraining
from hf_memkit.prediction.waiting_script import WaitingScript
from hf_memkit.setup.script_overrides import Overrides, _is_same_value, read_plan
from tests.plan.made_plans import plan, setup
from tests.plan.made_trainings import MADE, changed

MACHINE: Final = described_machine("RTX 4090", None, None, None)
WRITTEN: Final = {"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}
FSDP: Final = changed(
    MADE,
    sharded=True,
    fsdp=Fsdp(reshard_after_forward=True, cpu_offload=False, activation_checkpointing=False),
    arguments__bf16=True,
    arguments__fsdp=True,
    arguments__fsdp_config={**WRITTEN, "min_num_params": 0, "xla": False, "xla_fsdp_v2": False},
)
PLAIN: Final = changed(MADE, arguments__bf16=True)


def choices(own: TracedTraining, *, gpus: int = 4) -> tuple[dict[str, list[Choice | None]], dict[str, str]]:
    left_out: dict[str, str] = {}
    return choices_for(own, MACHINE, {}, gpus=gpus, left_out=left_out), left_out


def change(own: TracedTraining, slot: str, number: int) -> Choice:
    choice = choices(own)[0][slot][number]
    assert choice is not None
    return choice


def test_what_a_script_with_fsdp2_can_change() -> None:
    """Defect: 8-bit states or an engine beside FSDP2, which both end with an error; keys that Trainer has added."""
    by_slot, left_out = choices(FSDP)
    assert by_slot["engine"] == by_slot["small optimizer"] == [None]
    assert {"DeepSpeed", "8-bit AdamW"} <= set(left_out)
    assert by_slot["checkpointing"][0] is by_slot["sharding"][0] is None

    offload = change(FSDP, "sharding", 3)
    saved = change(FSDP, "checkpointing", -1)
    both = Candidate(1, 1, combine(saved, offload))
    assert both.arguments["fsdp_config"] == {**WRITTEN, "reshard_after_forward": True, "cpu_offload": True}
    assert both.arguments["activation_checkpointing"] is True, "Trainer's, with which version 2 gathers nothing again"
    gloo = {"ACCELERATE_USE_FSDP": "true", "FSDP_OFFLOAD_PARAMS": "true"}
    assert both.environment == gloo, "NCCL alone cannot clip gradients in RAM"
    assert not refused(both.settings, FSDP.arguments, MACHINE, 4)
    kept = Candidate(1, 1, (change(FSDP, "sharding", 2),))
    assert kept.arguments["fsdp_config"] == {**WRITTEN, "reshard_after_forward": False}


def test_micro_batches_that_reduce_gradients() -> None:
    """Defect: other keys of the script's accelerator_config are lost, or a setting that it has already."""
    own = {"even_batches": False, "gradient_accumulation_kwargs": {"sync_with_dataloader": False}}
    synced = {"sync_with_dataloader": False, "sync_each_batch": True}
    made = change(changed(FSDP, arguments__accelerator_config=own), "sharding", 1)
    assert made.settings == {"arguments.accelerator_config": {**own, "gradient_accumulation_kwargs": synced}}
    assert "accelerator_config" in Candidate(4, 2, (made,)).arguments
    assert "accelerator_config" not in Candidate(8, 1, (made,)).arguments, "nothing is accumulated"
    has_it = changed(FSDP, arguments__accelerator_config=made.settings["arguments.accelerator_config"])
    assert len(choices(has_it)[0]["sharding"]) == 3


def test_checkpointing_of_fsdp_is_not_joined_by_trainers() -> None:
    """Defect: both forms of checkpointing, which Trainer refuses."""
    by_fsdp = Fsdp(reshard_after_forward=True, cpu_offload=False, activation_checkpointing=True)
    written = {**WRITTEN, "activation_checkpointing": True}
    off, unchanged = choices(changed(FSDP, fsdp=by_fsdp, arguments__fsdp_config=written))[0]["checkpointing"]
    assert unchanged is None and off is not None
    assert Candidate(1, 1, (off,)).arguments["fsdp_config"] == {**WRITTEN, "activation_checkpointing": False}

    by_slot, left_out = choices(changed(FSDP, fsdp=by_fsdp, arguments__fsdp=None, arguments__fsdp_config=None))
    assert by_slot["checkpointing"] == [None] and "accelerate" in left_out["no checkpointing"]


def test_settings_in_accelerates_config_are_not_changed() -> None:
    """Defect: arguments for FSDP that the launcher's config overrides, or that enable it a second time; no
    checkpointing, although Trainer's does not depend on that config."""
    own = changed(FSDP, arguments__fsdp=None, arguments__fsdp_config=None)
    unchanged, synced = choices(own)[0]["sharding"]
    assert unchanged is None and synced is not None and set(synced.settings) == {"arguments.accelerator_config"}
    assert change(own, "checkpointing", -1).settings["arguments.activation_checkpointing"] is True


def test_context_parallelism_is_kept() -> None:
    """Defect: other sizes of the layout, or rows without padding, which ring attention takes for one."""
    padded = changed(FSDP, plan__padding__share=0.5)
    assert any(choices(padded)[0]["padding"])
    by_slot, left_out = choices(changed(padded, parallel_sizes={"dp_shard_size": 2, "cp_size": 2}))
    assert left_out["another layout of the GPUs"] == "every setup keeps the script's dp_shard_size=2, cp_size=2"
    assert len(by_slot["sharding"]) == 4 and len(by_slot["checkpointing"]) == 3
    assert by_slot["padding"] == by_slot["compile"] == by_slot["engine"] == [None]
    assert {"padding-free", "torch.compile"} <= set(left_out)


def test_weights_that_are_sharded_when_loaded() -> None:
    """Defect: an engine, a kernel or adapters for weights that are DTensors, with which a run ends with an error."""
    own = changed(PLAIN, sharded=True, parallel_sizes={"tp_size": 4}, plan__model__device_map=True)
    left_out: dict[str, str] = {}
    by_slot = choices_for(own, MACHINE, {}, gpus=4, left_out=left_out, also=("lora", "qlora", "paged_adamw_8bit"))
    changing = {slot for slot, each in by_slot.items() if any(each)}
    assert changing <= {"checkpointing", "optimizer", "allocator", "attention"}
    assert len(by_slot["checkpointing"]) == 3, "Trainer's own"
    assert {"LoRA", "QLoRA", "paged_adamw_8bit", "DeepSpeed"} <= set(left_out)


def test_sequences_of_gpus_that_share_a_batch() -> None:
    """Defect: a step has as many sequences as if each GPU had a batch of its own."""
    own = setup(2, 4, 10.0, 1.0, training=changed(FSDP, parallel_sizes={"cp_size": 2, "dp_shard_size": 4}))
    made = plan(own, gpus=8)
    assert (made.ranks, made.batches, made.own_sequences) == (8, 4, 32)
    assert made.file(own)["about"]["gpus_per_batch"] == 2


def test_sequences_are_divided_over_batches_and_not_gpus() -> None:
    """Defect: a number that the batches of all GPUs cannot share, or a refusal of one that they can."""
    with pytest.raises(InputError, match=r"--sequences-per-step 10: must be a multiple of 4, .* write 8 or 12"):
        _refuse_sequences(10, 4, None, "")
    with pytest.raises(InputError, match=r"must be a multiple of 4, .* write 4"):
        _refuse_sequences(2, 4, None, "")
    _refuse_sequences(12, 4, None, "")


def test_fsdp2_stands_beside_zero() -> None:
    """Also instead of the script's DeepSpeed; not on one GPU."""
    engines = choices(PLAIN)[0]["engine"]
    fsdp = engines[-1]
    assert fsdp is not None and fsdp.name == "FSDP2" and len(engines) > 4
    assert all(engine is None or engine.name != "FSDP2" for engine in choices(PLAIN, gpus=1)[0]["engine"])
    assert fsdp.result, "weights are copied to bf16"
    arguments = Candidate(1, 1, combine(change(PLAIN, "checkpointing", -1), fsdp)).arguments
    assert (arguments["fsdp_config"], arguments["activation_checkpointing"]) == ({"version": 2}, True)

    *_, kept, sharded = choices(changed(PLAIN, arguments__per_device_train_batch_size=2))[0]["engine"]
    assert kept == fsdp and sharded is not None
    assert sharded.settings["arguments.accelerator_config"]["gradient_accumulation_kwargs"] == {
        "sync_each_batch": True
    }

    zero = changed(PLAIN, arguments__deepspeed={"zero_optimization": {"stage": 2}})
    other = choices(zero)[0]["engine"][-1]
    assert other is not None and other.settings["arguments.deepspeed"] is None
    assert not refused(other.settings, zero.arguments, MACHINE, 4)


@pytest.mark.parametrize(
    "fields",
    [
        {"plan__model__quantised": True},
        {"plan__own_optimizer": True},
        {"plan__model__device_map": True},
        {"plan__model__of_transformers": False},
        {"arguments__bf16": None, "arguments__fp16": True},
    ],
)
def test_no_fsdp2_for_what_it_cannot_train(fields: dict[str, Any]) -> None:
    by_slot, left_out = choices(changed(PLAIN, **fields))
    assert all(engine is None or engine.name != "FSDP2" for engine in by_slot["engine"])
    assert left_out["FSDP2"]


def test_its_flags_are_words_that_trainer_reads() -> None:
    candidate = Candidate(1, 1, combine(change(PLAIN, "checkpointing", -1), change(PLAIN, "engine", -1)))
    flags = pasted(candidate, PLAIN).flags
    assert "--fsdp" in flags, "a value would be the name of a strategy"
    (config,) = (flag.partition(" ")[2] for flag in flags if flag.startswith("--fsdp_config "))
    assert json.loads(*shlex.split(config)) == candidate.arguments["fsdp_config"]


def test_a_plan_file_with_it_is_read(tmp_path: Path) -> None:
    candidate = Candidate(1, 1, combine(change(PLAIN, "checkpointing", -1), change(PLAIN, "engine", -1)))
    (tmp_path / "plan.yaml").write_text(json.dumps(candidate.overrides.to_json()))
    overrides, _ = read_plan(tmp_path / "plan.yaml")
    assert overrides.arguments == candidate.arguments


def test_keys_that_trainer_adds_are_no_difference_of_a_run() -> None:
    """Defect: a run with a plan says that its fsdp_config has no effect."""
    added = {**WRITTEN, "min_num_params": 0, "xla": False}
    assert _is_same_value(added, WRITTEN)
    assert not _is_same_value({**added, "version": 1}, WRITTEN)

    accumulation = {"sync_each_batch": True}
    config = AcceleratorConfig(gradient_accumulation_kwargs={**accumulation, "num_steps": 1})
    assert _is_same_value(config, {"gradient_accumulation_kwargs": accumulation})
    assert not _is_same_value(config, {"gradient_accumulation_kwargs": accumulation, "even_batches": False})


def test_a_plan_for_several_machines() -> None:
    """Defect: sequences or the price of one machine, or a launcher that starts on one."""
    own = setup(2, 4, 10.0, 1.0)
    made = plan(own, gpus=8, nodes=2)
    assert (made.ranks, made.own_sequences) == (16, 128)
    assert "--nnodes 2 " in made.launch and "--nproc_per_node 8 " in made.launch
    assert gpu_of(made) == "2 × 8 × RTX 3090"
    assert made.file(own)["about"]["gpus"] == 16


SCRIPT: Final = """
import torch
from transformers import HfArgumentParser, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

(args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
model = LlamaForCausalLM(LlamaConfig(
    hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
    vocab_size=514, use_cache=False,
))
rows = [{"input_ids": torch.arange(64), "labels": torch.arange(64)}] * 64
Trainer(model, args, train_dataset=rows).train()
"""


@pytest.mark.slow
@pytest.mark.tracing
@pytest.mark.parametrize("is_there", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_fork_is_traced_with_other_settings_of_fsdp2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_there: bool
) -> None:
    """Would notice: a setting that does not reach a fork of a script with FSDP2, or of one without."""
    (tmp_path / "train.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    flags = ["--output_dir", "out", "--bf16", "True", "--report_to", "none", "--max_steps", "3"]
    if is_there:
        flags += ["--fsdp", "full_shard", "--fsdp_config", json.dumps(WRITTEN)]
        flags += ["--accelerator_config", '{"even_batches": false}']
    with WaitingScript(ScriptJob(UserScript.at("train.py", flags), MACHINE, 2)) as script:
        own = script.trace(Overrides()).outcome().training
        assert own is not None and (own.fsdp is not None) == is_there
        slots = ("checkpointing", "sharding" if is_there else "engine")
        candidate = Candidate(4, 2, combine(*(choices(own, gpus=2)[0][slot][-1] for slot in slots)))
        other = script.trace(candidate.overrides).outcome().training
    assert other is not None
    assert other.fsdp == Fsdp(reshard_after_forward=True, cpu_offload=is_there, activation_checkpointing=False)
    assert other.arguments.activation_checkpointing is True
    assert other.arguments.per_device_train_batch_size == 4
    synced = {"gradient_accumulation_kwargs": {"sync_each_batch": True}}
    assert other.arguments.accelerator_config == ({"even_batches": False, **synced} if is_there else synced)
