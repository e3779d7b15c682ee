"""Files as they are in use, and right: nothing is said of them, or nothing bad; and one mistake is said once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hf_memkit.checks import check_file

SAID: dict[str, tuple[str, list[tuple[str, str, str]]]] = {
    "lora by a script of one's own": (
        "{torch_dtype: bfloat16, bf16: true, use_lora: true, lora_r: 8, gradient_checkpointing: true, "
        "gradient_checkpointing_kwargs: {use_reentrant: true}, max_seq_length: 1024}", []),
    "lora by TRL, whose switch is on by default": (
        "{output_dir: out, model_name_or_path: Qwen/Qwen3-0.6B, dtype: bfloat16, use_peft: true, lora_r: 16, "
        "dataset_text_field: text, max_length: 1024, gradient_checkpointing_kwargs: {use_reentrant: false}}", []),
    "16-bit weights under FSDP": (
        "{output_dir: out, torch_dtype: bfloat16, bf16: true, block_size: 1024, fsdp: true, "
        "fsdp_config: {transformer_layer_cls_to_wrap: [LlamaDecoderLayer]}}", []),
    "Kahan summation": ("{output_dir: out, torch_dtype: bfloat16, optim: stable_adamw, learning_rate: 2.0e-5}", []),
    "plain SGD": ("{output_dir: out, optim: sgd, learning_rate: 0.1}", []),
    "an evaluation alone": ("{output_dir: out, do_eval: true, bf16_full_eval: true}", []),
    "empty values": ("{output_dir: x, local_rank: , eval_strategy: , dataloader_prefetch_factor: }", []),
    "full evaluation": (
        "{output_dir: out, do_train: true, eval_strategy: steps, bf16: true, bf16_full_eval: true}",
        [("full-eval-while-training", "bf16_full_eval", "warning")]),
    "16-bit weights": (
        "{output_dir: out, torch_dtype: bfloat16}", [("bf16-weights-lose-updates", "torch_dtype", "hint")]),
    "a key of DeepSpeed's": (
        "{output_dir: o, learning_rate: 2.0e-5, train_batch_size: 64}",
        [("unknown-argument", "train_batch_size", "hint")]),
    "names of one's own": (
        "{output_dir: o, prompt_template: x, max_prompt_len: 9, use_nested_quant: true, loss_weight: 1.0}",
        [("unknown-argument", "prompt_template", "hint")]),
    "a misspelling, or a script's own name": (
        "{output_dir: o, lora_target_module: [q_proj]}", [("misspelt-argument", "lora_target_module", "hint")]),
    "a misspelling of TRL's": (
        "{use_peft: true, lora_target_module: [q_proj]}", [("misspelt-argument", "lora_target_module", "error")]),
    "a misspelling": (
        "{output_dir: o, gradient_checkpointin: true}", [("misspelt-argument", "gradient_checkpointin", "error")]),
}  # fmt: skip

_AUTO = {f"train_{name}": "auto" for name in ("batch_size", "micro_batch_size_per_gpu")} | {
    "gradient_accumulation_steps": "auto"
}
_CLIPPED = _AUTO | {"gradient_clipping": "auto"}
_PRECISION = {"fp16": {"enabled": "auto", "loss_scale": 0, "initial_scale_power": 16}, "bf16": {"enabled": "auto"}}
_ADAMW = {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")}
_IN_RAM = {"device": "cpu", "pin_memory": True}
_OFFLOADED = {"offload_optimizer": _IN_RAM, "offload_param": _IN_RAM}
_BUFFERS = dict.fromkeys(
    ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold"), "auto"
)
_STAGE_3 = {
    "stage": 3, "overlap_comm": True, "contiguous_gradients": True, "sub_group_size": 1e9, **_BUFFERS,
    "stage3_max_live_parameters": 1e9, "stage3_max_reuse_distance": 1e9,
}  # fmt: skip
_GATHERED = {"stage3_gather_16bit_weights_on_model_save": True}
_STAGE_0 = {
    "stage": 0, "allgather_partitions": True, "allgather_bucket_size": 5e8, "overlap_comm": False,
    "reduce_scatter": True, "reduce_bucket_size": 5e8, "contiguous_gradients": True, "round_robin_gradients": True,
}  # fmt: skip

WELL_KNOWN: dict[str, dict[str, Any]] = {
    "axolotl, stage 1": {
        **_AUTO, **_PRECISION, "optimizer": _ADAMW, "zero_optimization": {"stage": 1, "overlap_comm": True},
    },
    "axolotl, stage 3 in bf16": {
        **_CLIPPED, "bf16": {"enabled": True}, "wall_clock_breakdown": False,
        "zero_optimization": _STAGE_3 | _GATHERED | {"sub_group_size": 0, "stage3_max_live_parameters": 0},
    },
    "LLaMA-Factory, stage 0": {
        **_CLIPPED, **_PRECISION, "zero_allow_untested_optimizer": True, "comms_config": {"verbose": False},
        "zero_optimization": _STAGE_0,
    },
    "LLaMA-Factory, stage 3 offloaded": {
        **_CLIPPED, **_PRECISION, "zero_allow_untested_optimizer": True,
        "zero_optimization": _STAGE_3 | _OFFLOADED | _GATHERED,
    },
    "Alpaca, stage 3 offloaded, saved in shards": {
        **_CLIPPED, "bf16": {"enabled": "auto"}, "optimizer": _ADAMW, "steps_per_print": 5,
        "zero_optimization": _STAGE_3 | _OFFLOADED | dict.fromkeys(_GATHERED, False),
    },
    "FastChat, stage 2 offloaded": {
        "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}, "overlap_comm": True},
    },
    "DeepSpeedExamples, everything by number": {
        "train_batch_size": 32, "train_micro_batch_size_per_gpu": 4, "steps_per_print": 10, "gradient_clipping": 1.0,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "betas": [0.8, 0.999], "eps": 1e-8}},
        "fp16": {"enabled": True, "loss_scale": 0}, "prescale_gradients": False, "zero_optimization": {"stage": 2},
    },
    "alignment-handbook, full fine-tuning under accelerate's own config": {
        "output_dir": "out", "torch_dtype": "bfloat16", "bf16": True, "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": False}, "learning_rate": 1e-3, "max_length": 2048,
        "eval_strategy": "epoch", "warmup_steps": 0.1, "dataset_num_proc": 24,
    },
}  # fmt: skip
"""What these projects' examples set, in short. Each trains; a rule may have something to say all the same."""


@pytest.mark.parametrize("content", WELL_KNOWN.values(), ids=list(WELL_KNOWN))
def test_well_known_files_pass(tmp_path: Path, content: dict[str, Any]) -> None:
    path = tmp_path / "file.json"
    path.write_text(json.dumps(content))
    assert [str(problem) for problem in check_file(path) if problem.severity == "error"] == []


@pytest.mark.parametrize(("text", "messages"), SAID.values(), ids=list(SAID))
def test_messages_about_arguments(tmp_path: Path, text: str, messages: list[tuple[str, str, str]]) -> None:
    (tmp_path / "args.yaml").write_text(text)
    assert [(each.rule, each.key, each.severity) for each in check_file(tmp_path / "args.yaml")] == messages


def test_weights_that_are_not_gathered_are_named_once(tmp_path: Path) -> None:
    gather = {"stage3_gather_16bit_weights_on_model_save": "auto"}
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({**_CLIPPED, **_PRECISION, "zero_optimization": _STAGE_3 | gather}))
    (problem,) = check_file(path)
    assert (problem.rule, problem.severity) == ("no-weights-saved", "warning") and "auto" in problem.why


def test_an_old_argument_that_is_off_is_to_be_deleted(tmp_path: Path) -> None:
    path = tmp_path / "args.yaml"
    for value, fix in (("false", "delete the key"), ("true", "train_sampling_strategy")):
        path.write_text(f"{{output_dir: out, group_by_length: {value}}}")
        (problem,) = check_file(path)
        assert problem.rule == "argument-of-transformers-4" and fix in problem.fix
