"""Facts about a script in its argument file, besides the fields of TrainingArguments."""

from __future__ import annotations

from typing import Final

from hf_memkit.checks.fsdp_settings import fsdp_of
from hf_memkit.checks.subject import Subject

TRL_NAMES: Final = (
    # trl/trainer/model_config.py
    "use_peft", "lora_r", "lora_alpha", "lora_dropout", "lora_target_modules", "lora_target_parameters",
    "lora_modules_to_save", "lora_task_type", "use_rslora", "use_dora", "load_in_4bit", "load_in_8bit",
    "bnb_4bit_quant_type", "bnb_4bit_quant_storage", "use_bnb_nested_quant",
    # trl/trainer/sft_config.py
    "model_init_kwargs", "chat_template_path", "dataset_text_field", "dataset_kwargs", "dataset_num_proc",
    "max_length", "truncation_mode", "packing", "packing_strategy", "eval_packing", "padding_free",
    "completion_only_loss", "assistant_only_loss", "activation_offloading",
    # trl/trainer/grpo_config.py
    "num_generations", "max_completion_length",
    # trl/scripts/utils.py
    "dataset_train_split", "dataset_test_split", "dataset_streaming",
)  # fmt: skip
"""Names that TRL's configs have and TrainingArguments has not (trl 1.16.0)."""

TEXT_NAMES: Final = (
    *TRL_NAMES, "block_size", "max_seq_length", "pad_to_max_length", "mlm_probability", "line_by_line",
    "max_source_length", "max_target_length", "text_column", "text_column_name", "predict_with_generate",
    "generation_max_length", "generation_num_beams",
)  # fmt: skip
"""Names of TRL and of transformers' examples for text that TrainingArguments has not; the models take `input_ids`
(transformers 5.23.0: examples/pytorch/language-modeling, text-classification, summarization)."""

_OTHER_MEDIA: Final = ("image", "pixel", "vision", "video", "audio", "speech")

_ADAPTER_WORDS: Final = ("lora", "peft", "adapter")


def _has(subject: Subject, names: tuple[str, ...]) -> bool:
    return any(name in (subject.arguments or {}) for name in names)


def is_for_trl(subject: Subject) -> bool:
    """Whether an argument is one of TRL's, so that TRL's defaults may override Trainer's."""
    return _has(subject, TRL_NAMES)


def is_for_text(subject: Subject) -> bool:
    """Whether the model is for text: it is known (memkit knows only language models), or an argument is for text."""
    return subject.model is not None or _has(subject, TEXT_NAMES)


def is_for_other_media(subject: Subject) -> bool:
    """Whether an argument's name is one of images or sound."""
    return any(word in str(name) for name in subject.arguments or {} for word in _OTHER_MEDIA)


def trains_adapters(subject: Subject) -> bool:
    """Whether a setup adds adapters, or an argument does, such as `use_lora: true`."""
    true = [name.lower() for name, value in (subject.arguments or {}).items() if value is True]
    named = any(word in name for name in true for word in _ADAPTER_WORDS)
    return named or subject.has_setting("adapter")


def trains_loaded_weights(subject: Subject) -> bool:
    """Whether the loaded weights train in their own dtype: without adapters, 4 or 8 bits, or an fp32 copy.

    DeepSpeed keeps one, and accelerate makes trainable weights fp32 for FSDP where mixed precision is on (accelerate
    1.15.0: accelerator.py 1999-2037, utils/fsdp_utils.py 813-820).
    """
    quantised = subject.has_setting("model.quantization") or subject.on("load_in_4bit") or subject.on("load_in_8bit")
    # TRL switches bf16 on where neither is said (trl 1.16.0: trainer/base_config.py).
    mixed = subject.mixed or (is_for_trl(subject) and subject.argument("bf16") is None)
    mixed = mixed or (subject.launcher or {}).get("mixed_precision") in ("bf16", "fp16")
    copied = subject.config is not None or subject.argument("deepspeed") or (fsdp_of(subject) is not None and mixed)
    return not (trains_adapters(subject) or quantised or copied)
