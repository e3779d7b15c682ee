"""Arguments that the installed transformers or TRL has removed, and their successors. The versions that had each field
are generated from the published wheels (`scripts/argument_fields.py`); the current fields are read from the source of
the installed libraries. Only the successors are written by hand."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final, Literal

import yaml

from hf_memkit.catalog import library_versions

_DELETE: Final = "delete the key"

_SUCCESSORS: Final[Mapping[str, str]] = {
    # Renamed: the value stays. transformers 4.57.6: training_args.py, the warnings of __post_init__; 5.14.0 for
    # warmup_ratio, whose value warmup_steps takes as a share of all steps (5.23.0: training_args.py 2154-2161).
    "evaluation_strategy": "eval_strategy: {}",
    "no_cuda": "use_cpu: {}",
    "per_gpu_eval_batch_size": "per_device_eval_batch_size: {}",
    "per_gpu_train_batch_size": "per_device_train_batch_size: {}",
    "push_to_hub_model_id": "hub_model_id: {}",
    "push_to_hub_token": "hub_token, or log in with `hf auth login`",
    "torchdynamo": "torch_compile_backend: {}",
    "warmup_ratio": "warmup_steps: {}",
    "xpu_backend": "ddp_backend: {}",
    # Moved into another argument. transformers 4.50.3 and 4.57.6: training_args.py, the same warnings.
    "adafactor": "optim: adafactor",
    "dispatch_batches": "accelerator_config: {{dispatch_batches: {}}}",
    "split_batches": "accelerator_config: {{split_batches: {}}}",
    "fsdp_min_num_params": "fsdp_config: {{min_num_params: {}}}",
    "fsdp_transformer_layer_cls_to_wrap": "fsdp_config: {{transformer_layer_cls_to_wrap: [{}]}}",
    "group_by_length": "train_sampling_strategy: group_by_length",
    "include_inputs_for_metrics": "include_for_metrics: [inputs]",
    "include_tokens_per_second": "include_num_input_tokens_seen: all",
    "push_to_hub_organization": "hub_model_id: {}/NAME",
    "sharded_ddp": "fsdp: true, or a DeepSpeed config",
    "tpu_metrics_debug": "debug: tpu_metrics_debug",
    # TRL. 0.16.1: sft_config.py 180-202, grpo_config.py 334-404; 0.15.2 and 0.28.0: dpo_config.py 400, 620-733;
    # 0.22.2: rloo_config.py 516-622; 0.23.1: model_config.py 195; 1.16.0: the fields of the same files.
    "max_seq_length": "max_length: {}",
    "num_of_sequences": "max_length, in tokens",
    "torch_dtype": "dtype: {}",
    "use_liger": "use_liger_kernel: {}",
    "use_liger_loss": "use_liger_kernel: {}",
    "max_target_length": "max_length, of prompt and completion together",
    "rpo_alpha": "loss_type: [sigmoid, sft] and loss_weights: [1.0, {}]",
    "vllm_guided_decoding_regex": "vllm_structured_outputs_regex: {}",
    "vllm_max_model_len": "vllm_max_model_length: {}",
    "vllm_device": "vllm_mode: colocate, or start `trl vllm-serve` on other GPUs",
    "wandb_log_unique_prompts": "log_unique_prompts: {}",
    "gradient_checkpointing_use_reentrant": "gradient_checkpointing_kwargs: {{use_reentrant: {}}}",
    "rloo_k": "num_generations: {}",
    "cliprange": "epsilon: {}",
    "kl_coef": "beta: {}",
    "exp_name": "run_name: {}",
    "normalize_reward": "normalize_advantages: {}",
    "num_ppo_epochs": "num_iterations: {}",
    "num_mini_batches": "steps_per_generation: {}",
    "total_episodes": "max_steps",
    "response_length": "max_completion_length: {}",
}
"""Argument → its replacement; `{}` is its value."""

_INSTEAD: Final[Mapping[str, str]] = {
    # transformers 5.23.0, by file of each.
    "fp16_backend": "PyTorch's mixed precision is the only one: fp16: true or bf16: true",  # trainer.py
    "fp16_opt_level": "PyTorch's mixed precision replaced Apex: fp16: true or bf16: true",
    "half_precision_backend": "PyTorch's mixed precision is the only one: fp16: true or bf16: true",
    "jit_mode_eval": "transformers removed TorchScript's tracing; torch_compile: true also covers evaluation",
    "logging_dir": "TensorBoard logs below output_dir; the variable TENSORBOARD_LOGGING_DIR sets another folder",
    "model_parallel": 'load the model with device_map="auto" to split it over GPUs',  # modeling_utils.py
    "mp_parameters": "Trainer no longer reads SageMaker's model parallelism from arguments",
    "overwrite_output_dir": "Trainer writes into output_dir; resume_from_checkpoint decides whether it continues",
    "past_index": "Trainer passes no past states from batch to batch",
    "ray_scope": "set the variable RAY_SCOPE",  # integrations/integration_utils.py 436
    "save_safetensors": "models are always saved as safetensors",  # modeling_utils.py, save_pretrained
    "tp_size": 'load the model with tp_plan="auto", or set parallelism_config',
    "tpu_num_cores": "the launcher sets the number of processes",
    "use_ipex": "PyTorch contains Intel's extension; torch_compile: true uses it",
    "use_legacy_prediction_loop": "Trainer has one evaluation loop",
    "use_mps_device": "Trainer uses Apple's GPU where it is available; use_cpu: true avoids it",
    # TRL, sources as above.
    "chars_per_token": "packing counts tokens: set max_length",
    "dataset_batch_size": "it has no successor",
    "is_encoder_decoder": "the trainer finds out from the model",
    "force_use_ref_model": "a reference model that is given is used",
    "generate_during_eval": "generate in a TrainerCallback",
    "label_pad_token_id": "the value is fixed",
    "max_completion_length": "max_length limits prompt and completion together",
    "max_prompt_length": "filter long prompts from the data set, or shorten them",
    "padding_value": "the tokenizer's pad token decides",
    "reference_free": "CPOTrainer is reference-free",
    "ref_model_init_kwargs": "load the reference model yourself, and pass ref_model to the trainer",
    "model_adapter_name": "only the default adapter is supported",
    "ref_adapter_name": "the trainer finds the reference adapter itself",
    "tools": "put the tools into a column of the data set",
    "use_logits_to_keep": "the trainer no longer uses it",
    "use_num_logits_to_keep": "the trainer no longer uses it",
    "base_model_attribute_name": "the trainer finds the base model itself",
    "vllm_dtype": "set --dtype of `trl vllm-serve`",
    "vllm_enable_prefix_caching": "set --enable_prefix_caching of `trl vllm-serve`",
    "truncation_mode": "sequences are cut at their end",
}
"""Argument without a successor → the current behaviour."""

EXAMPLES: Final = frozenset(
    {
        # transformers 5.23: examples/pytorch; TRL's command line (env, accelerate_config); names scripts often use
        "accelerate_config", "activation_dropout", "add_adapter", "apply_spec_augment", "attention_dropout",
        "attention_mask",
        "audio_column_name", "base_learning_rate", "block_size", "bos_token", "cache_dir", "caption_column",
        "chars_to_ignore", "config_name", "config_overrides", "ctc_loss_reduction", "ctc_zero_infinity",
        "data_dir", "dataset", "dataset_config", "dataset_config_name", "dataset_name", "do_lower_case",
        "do_reduce_labels", "do_regression", "doc_stride", "dtype", "encoder_stride", "env", "eval_metrics",
        "eval_split_name", "feat_proj_dropout", "feature_extractor_name", "final_dropout", "forced_bos_token",
        "forced_decoder_ids", "freeze_feature_encoder", "freeze_feature_extractor", "freeze_text_model",
        "freeze_vision_model", "hidden_dropout", "ignore_mismatched_sizes", "ignore_pad_token_for_loss",
        "image_column", "image_column_name", "image_processor_name", "image_square_size", "keep_linebreaks",
        "label_all_tokens", "label_column_name", "lang", "language", "layerdrop", "line_by_line",
        "low_cpu_mem_usage", "mask_feature_length", "mask_feature_prob", "mask_patch_size", "mask_ratio",
        "mask_time_length", "mask_time_prob", "max_answer_length", "max_duration_in_seconds",
        "max_eval_samples", "max_length", "max_length_seconds", "max_predict_samples", "max_seq_length",
        "max_source_length", "max_span_length", "max_target_length", "max_train_samples", "max_val_samples",
        "metric_name", "min_duration_in_seconds", "mlm_probability", "model_name_or_path", "model_revision",
        "model_type", "n_best_size", "norm_pix_loss", "null_score_diff_threshold", "num_beams",
        "overwrite_cache", "pad_to_max_length", "pad_token", "patch_size", "phoneme_language",
        "plm_probability", "preprocessing_num_workers", "preprocessing_only", "reduce_labels",
        "remove_columns", "remove_splits", "resize_position_embeddings", "return_entity_level_metrics",
        "shuffle_seed", "shuffle_train_dataset", "source_lang", "source_prefix", "streaming", "summary_column",
        "suppress_tokens", "target_lang", "task", "task_name", "test_dir", "test_file", "text_column",
        "text_column_delimiter", "text_column_name", "text_column_names", "token", "tokenizer_name",
        "torch_dtype", "train_dir", "train_file", "train_split_name", "train_val_split", "trust_remote_code",
        "unk_token", "use_auth_token", "use_fast", "use_fast_tokenizer", "use_lora", "val_max_target_length",
        "validation_dir", "validation_file", "validation_split_percentage", "version_2_with_negative",
        "word_delimiter_token",
        # alignment-handbook: src/alignment/configs.py; open-r1: src/open_r1/configs.py
        "benchmarks", "callbacks", "chat_template", "code_eval_scoring_mode", "code_eval_test_batch_size",
        "code_language", "code_provider", "cosine_max_len", "cosine_max_value_correct",
        "cosine_max_value_wrong", "cosine_min_value_correct", "cosine_min_value_wrong", "dataset_configs",
        "dataset_mixer", "dataset_mixture", "dataset_prompt_column", "dataset_splits", "e2b_router_url",
        "hub_model_revision", "ioi_provider", "max_completion_len", "morph_router_url",
        "overwrite_hub_revision", "parallel_code_exec_per_proc", "push_to_hub_revision",
        "repetition_max_penalty", "repetition_n_grams", "reward_funcs", "soft_punish_cache", "system_prompt",
        "wandb_entity", "wandb_project", "wandb_run_group",
    }
)  # fmt: skip
"""Arguments of well-known scripts that no class of transformers or TRL has."""


@dataclass(frozen=True, slots=True)
class Former:
    """An argument that a library had, and that the installed version lacks.

    Attributes:
        owner: the class that had it.
        library: the library of that class: transformers or TRL.
        last: the last minor version that had it.
        fix: its replacement, or to delete it, and the effect.
    """

    owner: str
    library: str
    last: str
    fix: str

    @property
    def why(self) -> str:
        return f"removed: {self.library} {self.last} was the last version in which {self.owner} had it"


def former_arguments(given: Mapping[str, Any]) -> dict[str, Former]:
    """The arguments among `given` (name → value) that the installed libraries have removed.

    Fields of TRL are reported only in files for TRL, because other scripts use their names too.

    >>> former_arguments({"warmup_ratio": 0.1, "bf16": True})["warmup_ratio"].fix
    'write warmup_steps: 0.1'
    """
    former: dict[str, Former] = {}
    gone = _last("transformers", "TrainingArguments")
    for name in given:
        if name in gone and name not in library_versions.fields():  # which reads TRL's source: half a second
            former[name] = Former("TrainingArguments", "transformers", gone[name], _fix(name, given))
    names = {str(name) for name in given}
    of_trl = {name for owner in _history()["trl"]["classes"] for name in _last("trl", owner)}
    for_unsloth = given.get("use_gradient_checkpointing") == "unsloth" or any("unsloth" in name for name in names)
    gone_from_trl = of_trl - ever_fields("transformers") - (_OF_UNSLOTH if for_unsloth else frozenset())
    for name in (name for name in given if name in gone_from_trl):
        classes = trl_in_use(names - {name})
        owner_then = next((owner for owner in classes if name in _last("trl", owner)), None)
        still_known = any(name in library_versions.trl_classes().get(owner, ()) for owner in (*classes, *_BESIDE))
        if owner_then is not None and not still_known and (name not in EXAMPLES or name in _SUCCESSORS):
            former[name] = Former(owner_then, "TRL", _last("trl", owner_then)[name], _fix(name, given))
    return former


@cache
def ever_fields(library: Literal["transformers", "trl"]) -> frozenset[str]:
    """Every name that was a field of one of the library's classes in any version."""
    return frozenset(name for spans in _history()[library]["classes"].values() for name in _names(spans))


def _plain(value: Any) -> Any:
    """A value of JSON or YAML in YAML's own types, which are all that `safe_dump` takes."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list) else value


def _fix(name: str, given: Mapping[str, Any]) -> str:
    value = given[name]
    successor = _SUCCESSORS.get(name, "")
    if not successor or value in (None, False, "", 0):
        return f"{_DELETE}: {_INSTEAD[name]}" if name in _INSTEAD else _DELETE
    if (key := successor.partition(":")[0]) in given:
        return f"{_DELETE}: {key} is set too"
    text = yaml.safe_dump(_plain(value), default_flow_style=True, width=10_000).removesuffix("...\n").strip()
    if "[{}]" in successor:
        text = text.strip("[]")
    return f"write {successor.format(text)}"


_OF_UNSLOTH: Final = frozenset({"max_seq_length"})
"""Former fields of TRL that are arguments of unsloth's FastLanguageModel.from_pretrained (unsloth's documentation)."""

_BESIDE: Final = ("ModelConfig", "ScriptArguments", "DatasetMixtureConfig", "GRPOScriptArguments")
"""Classes of TRL that are parsed together with a trainer's config."""

_ONLY_TRL: Final = frozenset(
    {
        "dataset_streaming", "dataset_test_split", "dataset_train_split", "lora_modules_to_save", "lora_task_type",
        "use_bnb_nested_quant", "use_peft",
    }
)  # fmt: skip
"""Fields of these classes that are rare in other scripts (trl 1.16.0: trainer/model_config.py, scripts/utils.py)."""

SHARED: Final = frozenset(
    {
        "alpha", "base_model", "beta", "beta1", "beta2", "cliprange", "cliprange_value", "dataset_batch_size", "delta",
        "disable_dropout", "entropy_coef", "eos_token", "epsilon", "exp_name", "gamma", "generation_kwargs",
        "gpu_memory_utilization", "is_encoder_decoder", "judge", "kl_coef", "label_smoothing", "lam",
        "loss_type", "loss_weights", "max_completion_length", "max_new_tokens", "max_prompt_length", "min_p",
        "model_init_kwargs", "num_iterations", "num_mini_batches", "num_ppo_epochs", "pad_to_multiple_of",
        "padding_value", "repetition_penalty", "request_timeout", "response_length", "reward_model_path",
        "sanity_check", "shuffle_dataset", "stop_token", "stop_token_id", "temperature", "token_budget", "tools",
        "top_k", "top_p", "total_episodes", "truncation_mode", "use_liger", "vf_coef", "whiten_rewards",
    }
)  # fmt: skip
"""Fields of TRL's trainers, in any version, whose names other scripts use too."""


def trl_in_use(names: Set[str]) -> list[str]:
    """The installed classes of TRL that a file with these names is for; none if it may not be for TRL.

    Names that other scripts use too are no evidence, except `beta` with `loss_type`. The trainers' configs with most
    of the other names (in any version) count; of these, those with most names, most current names, and stable ones.
    """
    current = library_versions.trl_classes()
    installed = [name for name in _history()["trl"]["classes"] if name in current]
    extra = [name for name in installed if name in _BESIDE]
    trainers = [name for name in installed if name not in _BESIDE]
    common = (ever_fields("transformers") | EXAMPLES).union(*map(_ever_trl, extra))
    own = names - common
    counts = {
        name: (len(own & _ever_trl(name) - SHARED), len(own & _ever_trl(name)), len(own & current[name]))
        for name in trainers
    }
    most = max(counts.values(), default=(0, 0, 0))
    if not most[0] and not names & _ONLY_TRL and not {"beta", "loss_type"} <= names:
        return []
    used = [name for name in trainers if counts[name] == most]
    used = [name for name in used if name in library_versions.stable_trl_classes()] or used
    return [*used, *(name for name in extra if names & current[name] - EXAMPLES)]


@cache
def _history() -> Mapping[str, Any]:
    return json.loads(Path(__file__).with_name("argument_fields.json").read_text())  # type: ignore[no-any-return]


def _names(spans: Mapping[str, list[str]]) -> Iterator[str]:
    return (name for names in spans.values() for name in names)


@cache
def _ever_trl(owner: str) -> frozenset[str]:
    """The fields that a class of TRL had in any version."""
    return frozenset(_names(_history()["trl"]["classes"].get(owner, {})))


@cache
def _last(library: str, owner: str) -> Mapping[str, str]:
    """Field → the last version of the class that had it; without fields of the newest version."""
    spans = _history()[library]["classes"].get(owner, {})
    return {name: span.partition("-")[2] for span, names in spans.items() for name in names if span[-1] != "-"}
