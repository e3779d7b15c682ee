"""Translates the arguments of other tools to the names of TrainingArguments.

Knows the names of axolotl, LLaMA-Factory, ms-swift, unsloth, torchtune, NeMo, litgpt, OpenRLHF and diffusers' scripts,
at the top level of a file or one level below.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from hf_memkit.catalog.library_versions import current_name
from hf_memkit.measuring.out_of_memory.run_view import RunView, mapping

LENGTHS: Final = (
    "max_length", "max_seq_length", "max_seq_len", "block_size", "cutoff_len", "model_max_length", "sequence_len",
    "seq_length", "seq_len", "max_len", "sequence_length",
)  # fmt: skip
"""Names of the maximum sequence length, in tokens."""

PIXELS: Final = ("max_pixels", "image_max_pixels", "max_pixel")
"""Names of the maximum image size, in pixels."""

MAP_PROCESSES: Final = ("preprocessing_num_workers", "dataset_num_proc", "dataset_processes", "num_proc")
"""Names of the number of processes that preprocess rows (`num_proc` of datasets' `map`)."""

_NAMES: Final[dict[str, tuple[str, ...]]] = {
    "per_device_train_batch_size": (
        "micro_batch_size", "per_device_batch_size", "batch_size_per_device", "batch_size_per_gpu", "train_batch_size",
        "micro_train_batch_size", "train_bs", "batch_size", "bs",
    ),
    "per_device_eval_batch_size": ("eval_batch_size", "micro_eval_batch_size", "val_batch_size"),
    "gradient_accumulation_steps": ("grad_accumulation_steps", "grad_accum_steps", "accumulate_grad_batches"),
    "dataloader_num_workers": ("num_workers", "dataloader_workers"),
    "optim": ("optimizer", "optimizer_name", "optim_type"),
    "activation_checkpointing": (
        "use_gradient_checkpointing", "enable_activation_checkpointing", "use_activation_checkpointing",
        "grad_checkpointing",
    ),
    "attn_implementation": ("attn_impl", "attention_implementation"),
    "use_liger_kernel": (
        "enable_liger_kernel", "use_liger", "liger_kernel", "liger_fused_linear_cross_entropy", "cut_cross_entropy",
    ),
    "dtype": ("torch_dtype", "model_dtype"),
    "model_name_or_path": ("base_model", "model_name", "model_id", "pretrained_model_name_or_path", "model_path",
                           "model"),
    "resume_from_checkpoint": ("resume",),
}  # fmt: skip
"""Current name of an argument → its names in other tools, the clearest first: `batch_size` may be that of all GPUs."""

_VAGUE: Final = ("batch_size", "bs", "num_workers", "model", "optimizer", "resume")
"""Names that belong to the training only at the top level of a file, or in a section with "train" in its name."""

_SECTIONS: Final = ("deepspeed", "fsdp_config", "accelerator_config")
"""Arguments whose value is a section."""


def job_of(arguments: Mapping[str, Any]) -> RunView:
    """A job from a user's arguments. Arguments that are not set stay unknown: a script may have other defaults."""
    given = dict(_flat(arguments))
    values = {current_name(name): value for name, value in given.items()}
    names = {current_name(name): name for name in given if current_name(name) != name}
    for field, others in _NAMES.items():
        other = next((name for name in others if name in given), None)
        if field not in values and other is not None:
            values[field], names[field] = given[other], other
    values |= _derive(given, values)
    engine = "DeepSpeedEngine" if values.get("deepspeed") else ""
    size = mapping(values.get("deepspeed")).get("train_micro_batch_size_per_gpu")
    if isinstance(size, int) and "per_device_train_batch_size" not in values:
        values["per_device_train_batch_size"] = size
        names["per_device_train_batch_size"] = "train_micro_batch_size_per_gpu"
    return RunView({"arguments": values, "engine": engine}, {}, names=names)


def _flat(arguments: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The arguments of the top level, which takes precedence, and of the level below."""
    for name, value in arguments.items():
        if not isinstance(value, Mapping) or name in _SECTIONS:
            yield str(name), value
    for name, value in arguments.items():
        if isinstance(value, Mapping) and name not in _SECTIONS and not name.endswith("_kwargs"):
            of_training = "train" in str(name).lower()
            yield from (
                (str(inner), each) for inner, each in value.items()
                if inner not in arguments and (of_training or inner not in _VAGUE)
            )  # fmt: skip


def _derive(given: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of transformers that switches of other tools mean."""
    derived: dict[str, Any] = {}
    kinds = {str(given.get(name)).lower() for name in ("adapter", "finetuning_type", "train_type", "tuner_type")}
    if kinds & {"lora", "qlora", "dora"} or given.get("use_lora"):
        derived["use_peft"] = True
    bits = next((given[name] for name in ("quantization_bit", "quant_bits") if name in given), None)
    if "qlora" in kinds or bits == 4:
        derived["load_in_4bit"] = True
    if bits == 8:
        derived["load_in_8bit"] = True
    if given.get("use_8bit_adam") and "optim" not in values:
        derived["optim"] = "adamw_bnb_8bit"
    flash = any(
        given.get(name) in (True, "fa2", "fa3") for name in ("flash_attention", "use_flash_attn", "flash_attn")
    )
    if flash and "attn_implementation" not in values:
        derived["attn_implementation"] = "flash_attention_2"
    if (given.get("sdp_attention") or given.get("flash_attn") == "sdpa") and "attn_implementation" not in values:
        derived["attn_implementation"] = "sdpa"
    # LLaMA-Factory and axolotl load the weights in the compute dtype (LLaMA-Factory: model/patcher.py, patch_config;
    # axolotl: loaders/model.py, _set_quantization_config).
    if "dtype" not in values and ("base_model" in given or "finetuning_type" in given):
        for name, dtype in (("bf16", "bfloat16"), ("bfloat16", "bfloat16"), ("fp16", "float16")):
            if given.get(name) not in (None, False):
                derived.setdefault("dtype", dtype)
    if given.get("fsdp_config") and not values.get("fsdp"):
        derived["fsdp"] = True
    return derived
