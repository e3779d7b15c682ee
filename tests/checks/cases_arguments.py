"""Cases of the rules about names and values of arguments in a file."""

from __future__ import annotations

from functools import partial
from typing import Any

from hf_memkit.checks import Subject
from tests.checks import case
from tests.checks.case import Case, Cases
from tests.checks.configs import ds


def file(**arguments: Any) -> Subject:
    return Subject(arguments=arguments, arguments_file="args.yaml")


value = partial(case.value, arguments_file="args.yaml")
BEST = {"load_best_model_at_end": True, "eval_strategy": "steps"}
SFT = {"packing": True, "dataset_text_field": "text"}
DPO = {"beta": 0.1, "loss_type": "apo_zero", "precompute_ref_log_probs": False}
KTO = {"beta": 0.1, "desirable_weight": 1.0, "undesirable_weight": 1.0}
GRPO = {"use_vllm": True, "num_generations": 8, "max_completion_length": 512}


def grpo(group: int, gpus: int | None = None, **arguments: Any) -> Subject:
    return Subject(arguments={**GRPO, "num_generations": group, **arguments}, arguments_file="args.yaml", gpus=gpus)


CASES: Cases = {
    "misspelt-argument": [
        Case("gradient_acumulation_steps", file(gradient_acumulation_steps=4),
             file(gradient_accumulation_steps=4, model_name="x")),
        Case("accelerator_configs", file(accelerator_configs={}), file(accelerate_config="zero2")),
        Case("per_device_batch_size", file(per_device_batch_size=4), file(per_device_eval_batch_size=4)),
    ],
    "argument-of-transformers-4": [
        *(Case(name, file(**{name: value}), file(bf16=True)) for name, value in (
            ("evaluation_strategy", "steps"), ("warmup_ratio", 0.1), ("overwrite_output_dir", True), ("no_cuda", True),
            ("per_gpu_train_batch_size", 8), ("logging_dir", "logs"), ("save_safetensors", False),
            ("fsdp_transformer_layer_cls_to_wrap", "GPT2Block"), ("push_to_hub_token", "x"), ("sharded_ddp", "simple"),
            ("dispatch_batches", None), ("group_by_length", True), ("jit_mode_eval", True), ("tp_size", 2),
        )),
        Case("warmup_ratio", Subject(arguments={"warmup_ratio": 0.1}),
             Subject(arguments={"warmup_ratio": 0.1}, arguments_file="llama.yaml", pinned=True)),
    ],
    "argument-of-older-trl": [
        Case("max_seq_length", file(max_seq_length=2048, **SFT), file(max_length=2048, **SFT)),
        Case("max_seq_length", file(max_seq_length=2048, use_peft=True),
             file(max_seq_length=128, pad_to_max_length=True)),
        Case("max_prompt_length", file(max_prompt_length=512, beta=0.1, loss_type="sigmoid"),
             file(max_prompt_length=512)),
        Case("max_prompt_length", file(max_prompt_length=512, num_generations=8, use_vllm=True),
             file(max_completion_length=512, num_generations=8)),
        Case("max_seq_length", file(max_seq_length=2048, use_gradient_checkpointing=True, **SFT),
             file(max_seq_length=2048, use_gradient_checkpointing="unsloth", **SFT)),
        # Names that other scripts have too show nothing, however many there are.
        *(Case("exp_name", file(exp_name="a", num_generations=4), file(exp_name="a", **others)) for others in (
            {"gamma": 1}, {"temperature": 1}, {"beta": 4, "gamma": 1}, {"total_episodes": 9, "kl_coef": 1},
        )),
        Case("max_prompt_length", file(max_prompt_length=512, **DPO),
             file(max_prompt_length=1800, beta=2.5, gamma_beta_ratio=0.5)),
        Case("max_seq_length", file(max_seq_length=128, loss_type="nll", **SFT),
             file(max_seq_length=128, loss_type="focal")),
        Case("torch_dtype", file(torch_dtype="bfloat16", attn_implementation="sdpa", **SFT),
             file(torch_dtype="bfloat16", use_lora=True, lora_r=8, max_seq_length=512)),
    ],
    "unknown-argument": [
        Case("my_own", file(output_dir="x", my_own=1, model_id="gpt2"),
             file(output_dir="x", max_seq_length=128, torch_dtype="auto", dataset_name="x", system_prompt="y")),
        Case("batch_size", file(output_dir="x", batch_size=8), file(output_dir="x", evaluation_strategy="no")),
        Case("num_processes", file(output_dir="x", num_processes=4), file(num_processes=4, accelerate_config="zero2")),
        Case("mixed_precision", file(mixed_precision="bf16", bf16=True), file(mixed_precision="bf16", **SFT)),
        Case("tokenizer", file(output_dir="x", tokenizer="gpt2"), file(output_dir="x", tokenizer_name="gpt2")),
        Case("fsdp_strategy", file(output_dir="x", fsdp_strategy="full_shard"), file(output_dir="x", fsdp=True)),
        Case("fsdp_version", file(output_dir="x", fsdp_version=2), file(output_dir="x", fsdp_config={"version": 2})),
    ],
    "trl-value-not-allowed": [
        Case("packing_strategy", file(packing_strategy="ffd", **SFT), file(packing_strategy="bfd-requeue", **SFT)),
        Case("packing_strategy", file(packing_strategy="ffd", **SFT),
             file(packing_strategy="ffd", dataset_text_field="text", packing=False)),
        Case("vllm_mode", file(vllm_mode="colocated", **GRPO), file(vllm_mode="colocate", **GRPO)),
    ],
    "generations-split": [
        Case("num_generations", grpo(16, per_device_train_batch_size=1, gradient_accumulation_steps=4),
             grpo(16, per_device_train_batch_size=16)),
        Case("num_generations", grpo(16, 7, per_device_train_batch_size=1, gradient_accumulation_steps=4),
             grpo(16, 8, per_device_train_batch_size=1, gradient_accumulation_steps=4)),
        Case("num_generations", grpo(6), grpo(4)),
        Case("num_generations", grpo(6, num_processes=2), grpo(6, num_processes=3)),
        Case("num_generations", grpo(8, 1, per_device_train_batch_size=2, steps_per_generation=2),
             grpo(8, 1, per_device_train_batch_size=2, steps_per_generation=4)),
        Case("num_generations", grpo(1), grpo(2)),
        Case("generation_batch_size", grpo(8, generation_batch_size=12), grpo(8, generation_batch_size=16)),
        Case("per_device_eval_batch_size", grpo(8, 1, per_device_eval_batch_size=4, eval_strategy="steps"),
             grpo(8, 1, per_device_eval_batch_size=4, num_generations_eval=4, eval_strategy="steps")),
        Case("per_device_eval_batch_size", grpo(8, 1, per_device_eval_batch_size=4, eval_strategy="steps"),
             grpo(8, 1, per_device_eval_batch_size=4)),
    ],
    "kto-batch-of-one": [
        Case("per_device_train_batch_size", file(per_device_train_batch_size=1, **KTO), file(**KTO)),
        Case("per_device_train_batch_size", file(per_device_train_batch_size=1, loss_type="kto", **KTO),
             file(per_device_train_batch_size=1, loss_type="apo_zero_unpaired", **KTO)),
    ],
    "padding-free-ignored": [
        Case("padding_free", file(padding_free=True, **DPO), file(padding_free=False, **DPO)),
        Case("padding_free", file(padding_free=True, **DPO), file(padding_free=True, **SFT)),
    ],
    "value-not-allowed": [
        value("eval_strategy", "step", "steps"),
        value("save_strategy", "epochs", "best"),
        value("eval_strategy", False, "no"),
        value("lr_scheduler_type", "cosin", "cosine"),
        value("optim", "adamw_8bits", "adamw_8bit"),
        value("optim", "adamw_apex_fused", "adamw_torch_fused"),
        value("hub_strategy", "all", None),
    ],
    "best-model-strategies": [
        Case("load_best_model_at_end", file(load_best_model_at_end=True), file(**BEST)),
        Case("load_best_model_at_end", file(**BEST, save_strategy="epoch"), file(**BEST, save_strategy="best")),
        Case("load_best_model_at_end", file(**BEST, save_strategy="no"),
             file(load_best_model_at_end=True, evaluation_strategy="steps")),
    ],
    "best-model-steps": [
        Case("save_steps", file(**BEST, eval_steps=200), file(**BEST, eval_steps=250)),
        Case("save_steps", file(**BEST, eval_steps=50, save_steps=75), file(eval_steps=50, save_steps=75)),
        Case("save_steps", file(**BEST, eval_steps=0.1, save_steps=100), file(**BEST, eval_steps=0.1, save_steps=0.3)),
        Case("save_steps", file(**BEST, logging_steps=300), file(**BEST, save_steps=120, **SFT)),
    ],
    "steps-refused": [
        Case("logging_steps", file(logging_steps=0), file(logging_steps=0, logging_strategy="epoch")),
        value("save_steps", 2.5, 0.5),
        Case("eval_steps", file(eval_strategy="steps", eval_steps=2.5), file(eval_strategy="epoch", eval_steps=2.5)),
        value("warmup_steps", -1, 0.1),
        value("torch_empty_cache_steps", 0, None),
    ],
    "schedule-needs-evaluation": Case("lr_scheduler_type", file(lr_scheduler_type="reduce_lr_on_plateau"),
                                      file(lr_scheduler_type="reduce_lr_on_plateau", eval_strategy="epoch")),
    "optimizer-not-installed": [
        # Neither package is among memkit's extras of the development environment.
        Case("optim", Subject(arguments={"optim": "schedule_free_radam"}, here=True),
             Subject(arguments={"optim": "schedule_free_radam"})),
        Case("optim", Subject(arguments={"optim": "grokadamw"}, here=True),
             Subject(ds(2), {"optim": "adamw_torch"}, here=True)),
    ],
}  # fmt: skip
