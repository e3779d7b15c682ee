"""Files that `memkit check` does not check: their tool, and the file to give instead."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final

from hf_memkit.catalog.argument_values import misspelt
from hf_memkit.catalog.former_arguments import ever_fields
from hf_memkit.catalog.library_versions import accelerate_keys, argument_types, fields
from hf_memkit.common.commands import command


@dataclass(frozen=True, slots=True)
class Other:
    """A file of another kind.

    Attributes:
        kind: its kind and its reader; a clause.
        advice: the file to give, a sentence.
    """

    kind: str
    advice: str

    def __str__(self) -> str:
        return f"{self.kind}. {self.advice}"


LLAMA_FACTORY: Final = "a config of LLaMA-Factory, which reads it with the libraries that it pins"

_SHELL: Final = frozenset({".sh", ".bash", ".zsh", ".sbatch", ".slurm", ".pbs"})
_LAUNCH: Final = re.compile(r"^\s*(?:[A-Z_]+=\S+ )*(?:torchrun|deepspeed|accelerate launch|srun|python3?|trl) ", re.M)
_NAMED: Final = re.compile(
    r"(?:\s--(?:deepspeed|deepspeed_config|deepspeed_config_file|config_file|config)[\s=\\]+|\.py[ \t]+)"
    r"[\"']?([\w./~-]+\.(?:json|ya?ml))\b"
)
"""A config in a command: after its option, or directly after the script, as for HfArgumentParser."""

_MODEL: Final = "To check for this model, give its folder: memkit check args.yaml --model FOLDER"
_ARGUMENTS: Final = "Give a DeepSpeed JSON, or a YAML or JSON file of TrainingArguments"

_TOOLS: Final = (
    ("a config of AutoTrain", "task base_model project_name", ""),
    (
        "a config of axolotl", "base_model",
        "micro_batch_size sequence_len datasets val_set_size adapter sample_packing lora_model_dir "
        "dataset_prepared_path pretraining_dataset",
    ),
    (LLAMA_FACTORY, "finetuning_type", ""),
    (LLAMA_FACTORY, "stage", "template cutoff_len dataset_dir lora_target dataset preprocessing_num_workers"),
    (LLAMA_FACTORY, "template", "cutoff_len infer_backend export_dir adapter_name_or_path quantization_bit"),
    (LLAMA_FACTORY, "model model_class", "dist_config train_dataset kernel_config sample_backend"),
    ("a config of ms-swift", "model", "tuner_type train_type rlhf_type sft_type split_dataset_ratio"),
    ("a config of ms-swift", "dataset", "tuner_type train_type rlhf_type sft_type"),
    ("a config of ms-swift", "sft_type", "model_type model_id_or_path"),
    (
        "a config of ms-swift", "model dataset",
        "attn_impl freeze_vit load_from_cache_file lora_rank model_author quant_bits split_dataset_ratio system "
        "target_modules template torch_dtype",
    ),
    ("a config of verl", "actor_rollout_ref", ""),
    ("a config of NeMo-RL", "policy cluster", ""),
    ("a config of NeMo", "trainer exp_manager", ""),
    ("a config of NeMo or Lightning", "trainer model", "data exp_manager optim seed_everything"),
    ("a config of Composer", "model train_loader", ""),
    ("a config of trlx", "train model method", ""),
    ("a config of LitGPT", "checkpoint_dir train", ""),
    ("a config of Ludwig", "input_features output_features", ""),
)  # fmt: skip
"""Kind of file, keys that it has, and keys of which it has at least one, from the tools' own examples."""

_UNSLOTH: Final = frozenset({"model", "data", "training", "lora", "logging"})
_UNSLOTH_TRAINING: Final = frozenset({
    "training_type", "max_seq_length", "load_in_4bit", "output_dir", "num_epochs", "learning_rate", "batch_size",
    "gradient_accumulation_steps", "warmup_steps", "max_steps", "save_steps", "weight_decay", "random_seed",
    "packing", "train_on_completions", "gradient_checkpointing",
})  # fmt: skip
"""All keys of a config of unsloth's command line, and of its section `training` (unsloth_cli/config.py). Scripts have
sections of these names too, with other keys."""

_SAVED: Final = (
    ("an adapter's config, of PEFT", "peft_type", ""),
    ("a tokenizer's config", "added_tokens_decoder", ""),
    (
        "a tokenizer's config", "tokenizer_class",
        "model_max_length clean_up_tokenization_spaces bos_token eos_token unk_token chat_template",
    ),
    (
        "a model's config", "model_type",
        "architectures hidden_size num_hidden_layers n_embd n_layer d_model text_config vocab_size",
    ),
    ("a model's config", "architectures", "transformers_version hidden_size vocab_size"),
    ("a model's generation config", "_from_model_config", ""),
    (
        "a model's generation config", "transformers_version",
        "eos_token_id bos_token_id pad_token_id do_sample temperature max_new_tokens",
    ),
    ("the state of a Trainer's run", "log_history global_step", ""),
    ("an index of a model's weights", "weight_map", ""),
    ("a processor's config", "image_processor_type", ""),
    ("a processor's config", "feature_extractor_type", ""),
    ("a notebook", "cells nbformat", ""),
    ("a manifest of Kubernetes", "apiVersion kind", ""),
    ("a sweep of Weights & Biases", "method parameters", ""),
)  # fmt: skip
"""Kind of file, keys that it has, and keys of which it has at least one, for files that libraries write. A file with a
key of `_OF_TRAINING` is none of them."""

_OF_TRAINING: Final = {"learning_rate", "max_steps", "num_train_epochs", "output_dir", "per_device_train_batch_size"}
"""A file of a script's arguments has at least one of these."""

_GENERATION: Final = frozenset({
    "bos_token_id", "do_sample", "eos_token_id", "max_length", "max_new_tokens", "num_beams", "pad_token_id",
    "repetition_penalty", "temperature", "top_k", "top_p",
})  # fmt: skip
"""Keys of a generation config (transformers 5.23.0: generation/configuration_utils.py)."""

_MARKS: Final = {
    "_component_": "a config of torchtune",
    "_target_": "a config of Hydra or NeMo AutoModel",
    "class_path": "a config of Lightning",
}
"""Keys inside sections that show the tool."""

FSDP_SETTINGS: Final = frozenset({
    "activation_checkpointing", "activation_checkpointing_offload", "auto_wrap_policy", "backward_prefetch",
    "backward_prefetch_policy", "cpu_offload", "cpu_ram_efficient_loading", "forward_prefetch", "ignored_modules",
    "limit_all_gathers", "min_num_params", "mixed_precision_policy", "offload_params", "reshard_after_forward",
    "sharding_strategy", "state_dict_type", "sync_module_states", "transformer_layer_cls_to_wrap", "use_orig_params",
    "version", "xla", "xla_fsdp_grad_ckpt", "xla_fsdp_settings", "xla_fsdp_v2",
})  # fmt: skip
"""Settings of FSDP, without `fsdp_` (transformers 5.23.0: training_args.py, `_process_fsdp_args`; accelerate 1.15.0:
utils/dataclasses.py, `FullyShardedDataParallelPlugin`)."""


def other_script(path: Path, text: str) -> Other | None:
    """Kind of a file that is neither JSON nor YAML, by its name or text."""
    suffix = path.suffix.lower()
    if suffix == ".py":
        return Other("a Python script", f"Predict it: {command('memkit', 'predict', path, '--', 'ARGUMENTS')}")
    launches = suffix not in (".json", ".yaml", ".yml") and _LAUNCH.search(text)
    if suffix in _SHELL or text.startswith("#!") or launches:
        named = list(dict.fromkeys(_NAMED.findall(text)))[:3]
        first = f"Check the files that it names: {command('memkit', 'check', *named)}" if named else ""
        write = "Write its arguments as YAML, a line each (--bf16 true becomes bf16: true), and check that file"
        return Other("a shell script, not a config", first or write)
    if suffix in (".toml", ".ini", ".cfg"):
        return Other(f"a {suffix[1:].upper()} file", _ARGUMENTS)
    return None


def other_tool(path: Path, content: Mapping[str, Any]) -> Other | None:
    """The tool of this config, if not Trainer, TRL, DeepSpeed or memkit."""
    keys = {str(key) for key in content}
    if is_accelerate(content):
        if content.get("compute_environment") == "AMAZON_SAGEMAKER":
            return Other("a config of `accelerate launch` for SageMaker", _ARGUMENTS)
        return None
    training = content.get("training")
    if isinstance(training, Mapping) and len(keys) > 1 and keys <= _UNSLOTH and training.keys() <= _UNSLOTH_TRAINING:
        return Other("a config of unsloth's command line", _deepspeed_json_of("", path, content))
    if kind := _kind_by_keys(keys, _TOOLS):
        return Other(kind, _deepspeed_json_of(kind, path, content))
    if kind := "" if keys & _OF_TRAINING else _kind_by_keys(keys, _SAVED):
        return Other(kind, _MODEL if kind == "a model's config" else _ARGUMENTS)
    marks = {key for value in content.values() for key in _keys_inside(value)}
    for mark, kind in _MARKS.items():
        if mark in marks or mark in keys:
            return Other(kind, _ARGUMENTS)
    if len(keys) > 1 and keys <= _GENERATION:
        return Other("a model's generation config", _ARGUMENTS)
    return None


def nothing_known(content: Mapping[str, Any]) -> Other | None:
    """Description of a file without any key that is, or is similar to, an argument of Trainer or TRL, or of a script's
    own file with a section of TrainingArguments."""
    names = [str(key) for key in content]
    known = fields() | ever_fields("transformers")
    # The section with the most fields of TrainingArguments that is no argument itself, and their number.
    sections = [(str(key), value) for key, value in content.items() if isinstance(value, Mapping)]
    counts = [(key, len(_of_trainer(value))) for key, value in sections if key not in fields()]
    section, count = max(counts, key=lambda entry: entry[1], default=("", 0))
    instead = f"Give the content of {section!r} as a separate file" if count else _ARGUMENTS
    if count > 1 and not _of_trainer(content):
        return Other(f"a script's own config: all fields of TrainingArguments are in its section {section!r}", instead)
    if not names or any(name in known or misspelt(name) for name in names):
        return None
    shown = ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
    kind = f"nothing to check: no key is one of TrainingArguments or TRL, and this is no DeepSpeed JSON ({shown})"
    return Other(kind, instead)


def _of_trainer(content: Mapping[Any, Any]) -> set[str]:
    """The keys of any version's TrainingArguments, without names that a script may have beside such a section."""
    fields_of_trainer = argument_types().keys() | ever_fields("transformers")
    return {str(key) for key in content if key in fields_of_trainer} - {"output_dir", "project", "run_name", "seed"}


def _kind_by_keys(keys: set[str], signs: Iterable[tuple[str, str, str]]) -> str:
    """The first kind of file with these keys; empty if none."""
    for kind, needed, alternatives in signs:
        if keys.issuperset(needed.split()) and (not alternatives or not keys.isdisjoint(alternatives.split())):
            return kind
    return ""


def is_accelerate(content: Mapping[Any, Any]) -> bool:
    """Whether it is accelerate's YAML: it has a key that only accelerate has, or accelerate's keys only."""
    keys = {str(key) for key in content}
    if keys & {"compute_environment", "distributed_type", "deepspeed_config", "megatron_lm_config"}:
        return True
    return keys <= accelerate_keys() and bool(keys - fields())


def is_fsdp(content: Mapping[Any, Any]) -> bool:
    """Whether it is the JSON that `fsdp_config` names: most keys are FSDP's or similar, and none is an argument."""
    keys = {str(key) for key in content}
    if {"version"} <= keys <= {"activation_checkpointing", "version"}:
        return True
    keys -= {"activation_checkpointing", "version"}  # an argument, and a key of many tools
    similar = [key for key in keys if key.startswith("fsdp_") or get_close_matches(key, FSDP_SETTINGS, 1, 0.85)]
    return 2 * len(similar) > len(keys) and not keys & fields()


def _deepspeed_json_of(kind: str, path: Path, content: Mapping[str, Any]) -> str:
    """The part of another tool's config that memkit can check: the DeepSpeed JSON that it names."""
    value = content.get("deepspeed")
    named = value if isinstance(value, str) and value.endswith(".json") else ""
    if kind == LLAMA_FACTORY:
        return f"Check a DeepSpeed JSON against it: {command('memkit', 'check', named or 'ds.json', '--args', path)}"
    if named:
        return f"Check the DeepSpeed JSON that it names: {command('memkit', 'check', named)}"
    return "memkit checks only Trainer's and TRL's argument files and DeepSpeed JSON"


def _keys_inside(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield str(key)
            yield from _keys_inside(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _keys_inside(inner)
