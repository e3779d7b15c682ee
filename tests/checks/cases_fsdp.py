"""Cases of the rules about FSDP: in Trainer's arguments, in accelerate's YAML, and in both."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hf_memkit.checks import Subject
from tests.checks.case import SMALL, Case, Cases

BART = replace(
    SMALL, module_classes=frozenset({"BartForCausalLM", "BartDecoderLayer"}),
    layer_classes=("BartDecoderLayer", "BartEncoderLayer"),
)  # fmt: skip


def args(fsdp: Any = True, model: Any = None, **settings: Any) -> Subject:
    """Trainer's arguments with these settings in fsdp_config."""
    return Subject(arguments={"fsdp": fsdp, "fsdp_config": settings}, model=model)


def args_4bit(**quantization: Any) -> Subject:
    """FSDP, and a model in 4 bits."""
    return replace(args(), settings={"model.quantization": {"load_in_4bit": True, **quantization},
                                     "adapter.r": 8})  # fmt: skip


def acc(arguments: dict[str, Any] | None = None, **settings: Any) -> Subject:
    """accelerate's YAML with these settings in fsdp_config."""
    content = {"distributed_type": "FSDP", "fsdp_config": {f"fsdp_{name}": value for name, value in settings.items()}}
    return Subject(launcher=content, launcher_file="acc.yaml", arguments=arguments)


def both(key: str, bad: dict[str, Any], good: dict[str, Any]) -> list[Case]:
    """The same settings in each of the two places."""
    return [
        Case(f"fsdp_config.{key}", args(**bad), args(**good)),
        Case(f"fsdp_config.fsdp_{key}", acc(**{"version": 2, **bad}), acc(**{"version": 2, **good})),
    ]


def other(arguments: dict[str, Any], without: dict[str, Any], **settings: Any) -> list[Case]:
    """A job with these arguments beside FSDP's, and a job without them, by each of the two places."""
    key = next(iter(arguments))
    of_args = {"fsdp": True, "fsdp_config": settings}
    return [
        Case(key, Subject(arguments={**arguments, **of_args}), Subject(arguments={**without, **of_args})),
        Case(key, acc(arguments, version=2, **settings), acc(without, version=2, **settings)),
    ]


SHARDED = {"state_dict_type": "SHARDED_STATE_DICT"}
WRAPPED = {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}
CLASSES = "transformer_layer_cls_to_wrap"

ON = {"activation_checkpointing": True}

CASES: Cases = {
    "fsdp-wrong-value": [
        *(Case("fsdp", args(words), args(right)) for words, right in (
            ("hybrid_shard auto_wrap", "full_shard auto_wrap"), ("FULL_SHARD", "shard_grad_op offload"),
            ("full_shard,auto_wrap", ["full_shard", "auto_wrap"]), ("true", True), ("no_shard", ""),
        )),
        Case("fsdp", args("full_shrad", version=1), args("hybrid_shard", version=1)),
        *both("state_dict_type", {"state_dict_type": "LOCAL_STATE_DICT"}, {"state_dict_type": "full_state_dict"}),
        *both("reshard_after_forward", {"reshard_after_forward": "FULL_SHARD"}, {"reshard_after_forward": "false"}),
        *both("activation_checkpointing", {"activation_checkpointing": None}, {"activation_checkpointing": "True"}),
        *both("auto_wrap_policy", {"auto_wrap_policy": "AUTO"}, {"auto_wrap_policy": "NO_WRAP"}),
        *both("version", {"version": 3}, {"version": "2"}),
        *both("min_num_params", {"auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": 1e8},
              {"auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": 100}),
        Case("fsdp_config.auto_wrap_policy", args(auto_wrap_policy="no_wrap"), args(auto_wrap_policy="NO_WRAP")),
        Case("fsdp_config.cpu_offload", args(cpu_offload="false"), args(cpu_offload=False)),
        Case("fsdp_config.reshard_after_forward", args(version=1, reshard_after_forward=True),
             args(version=1, reshard_after_forward="full_shard")),
        Case("fsdp_config.fsdp_sharding_strategy", acc(sharding_strategy="HYBRID"), acc(sharding_strategy=1)),
        Case("fsdp_config.fsdp_activation_checkpointing_offload",
             acc(version=2, activation_checkpointing_offload=True),
             acc(version=2, activation_checkpointing_offload=True, activation_checkpointing=True)),
        Case("fsdp_config.fsdp_sync_module_states", acc(version=2, sync_module_states=False),
             acc(version=2, sync_module_states=True)),
        Case("fsdp_config.fsdp_sync_module_states", acc(version=1, sync_module_states=False),
             acc(version=1, sync_module_states=False, cpu_ram_efficient_loading=False)),
    ],
    "fsdp-key-unread": [
        *both("forward_prefetch", {"forward_prefetch": True}, {}),
        *both("transformer_layers_cls_to_wrap", {"transformer_layers_cls_to_wrap": "X"}, {CLASSES: "X", **WRAPPED}),
        *both("min_num_params", {**WRAPPED, "min_num_params": 100},
              {"auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": 100}),
        Case("fsdp_config.fsdp_sharding_strategy", acc(version=2, sharding_strategy=2), acc(sharding_strategy=2)),
        Case("fsdp_config.fsdp_backward_prefetch_policy", acc(backward_prefetch_policy="BACKWARD_PRE"),
             acc(backward_prefetch="BACKWARD_PRE")),
        Case("fsdp_config.fsdp_reshard_after_forward", acc(version=1, reshard_after_forward="SHARD_GRAD_OP"),
             acc(version=1, reshard_after_forward="FULL_SHARD")),
        Case("fsdp", args("hybrid_shard", version=1), args("full_shard", version=1)),
        Case("fsdp_config", acc({"fsdp": True}, version=2), acc({"fsdp": True}, offload_params=True)),
        Case("fsdp_config", acc({"fsdp": True, "fsdp_config": {"version": 2}}, version=2, reshard_after_forward=False),
             acc({"fsdp": True, "fsdp_config": {"reshard_after_forward": False}}, reshard_after_forward=False)),
        Case("fsdp_config.fsdp_offload_params", args(fsdp_offload_params=True), args(fsdp_cpu_offload=True)),
        Case("fsdp_config.activation_checkpointing_offload", args(activation_checkpointing_offload=True),
             acc(activation_checkpointing_offload=True)),
        Case("fsdp_config.use_orig_params", args(use_orig_params="true"), args(version=1, use_orig_params="true")),
    ],
    "fsdp-config-without-fsdp": [
        Case("fsdp_config", args("", cpu_offload=True), args("", min_num_params=0, xla=False)),
        Case("fsdp_config", acc({"fsdp_config": {"cpu_offload": True}}), acc({})),
    ],
    "fsdp-unwrapped": [
        *both("auto_wrap_policy", {"auto_wrap_policy": "NO_WRAP"}, WRAPPED),
        *both("auto_wrap_policy", {"auto_wrap_policy": "NO_WRAP", "activation_checkpointing": True}, WRAPPED),
        Case("fsdp_config.fsdp_auto_wrap_policy", acc(version=2), acc(version=2, auto_wrap_policy="SIZE_BASED_WRAP")),
        Case("fsdp_config.auto_wrap_policy", args(auto_wrap_policy="SIZE_BASED_WRAP"), args()),
    ],
    "fsdp-wrap-class": [
        *both(CLASSES, {**WRAPPED, CLASSES: "LLaMADecoderLayer"}, {**WRAPPED, CLASSES: "LlamaDecoderLayer,T5Block"}),
        *both(CLASSES, {**WRAPPED, CLASSES: "T5Block, LlamaDecoderLayer"}, WRAPPED),
        Case(f"fsdp_config.{CLASSES}", args(**{CLASSES: ["Own"]}), args(**{CLASSES: ["GPT2Block"]})),
        *both(CLASSES, {**WRAPPED, CLASSES: []}, {**WRAPPED, CLASSES: None}),
        Case(f"fsdp_{CLASSES}", Subject(arguments={"fsdp": "full_shard", f"fsdp_{CLASSES}": "LLaMADecoderLayer"}),
             Subject(arguments={"fsdp": "full_shard", f"fsdp_{CLASSES}": "LlamaDecoderLayer"})),
        Case(f"fsdp_config.fsdp_{CLASSES}", acc(**WRAPPED, **{CLASSES: ["GPT2Block"]}),
             acc(**WRAPPED, **{CLASSES: "GPT2Block"})),
        Case(f"fsdp_config.{CLASSES}", args(model=BART, **{CLASSES: "GPT2Block"}),
             args(model=BART, **{CLASSES: "BartDecoderLayer"})),
        Case(f"fsdp_config.{CLASSES}", args(model=BART), args(model=SMALL)),
        Case(f"fsdp_config.{CLASSES}", args(model=replace(BART, layer_classes=())),
             args(model=replace(BART, layer_classes=("BartDecoderLayer",)))),
    ],
    "fsdp-saves-no-weights": [
        *both("state_dict_type", SHARDED, {"state_dict_type": "FULL_STATE_DICT"}),
        Case("fsdp_config.fsdp_state_dict_type", acc(version=2), acc(version=1)),
        Case("save_only_model", acc({"save_only_model": True}, version=2),
             acc({"save_only_model": True}, version=2, state_dict_type="FULL_STATE_DICT")),
    ],
    "fsdp-saves-empty-adapter": [
        *(Case(key, replace(bad, arguments={**(bad.arguments or {}), **adapters}),
               replace(good, arguments={**(good.arguments or {}), **also}))
          for key, bad, good in (
              ("fsdp_config.activation_checkpointing", args(**ON), args(activation_checkpointing=False)),
              ("fsdp_config.fsdp_activation_checkpointing", acc(version=2, **ON), acc(version=1, **ON)))
          for adapters, also in (({"use_peft": True}, {"use_peft": True}), ({"use_lora": True}, {}))),
        Case("fsdp_config.activation_checkpointing", replace(args(**ON), settings={"adapter.r": 8}), args(**ON)),
    ],
    "fsdp-liger-adapters": [
        *other({"use_liger_kernel": True, "use_peft": True}, {"use_liger_kernel": True}),
        *other({"use_liger_kernel": True, "use_lora": True},
               {"use_liger_kernel": True, "use_lora": True,
                "liger_kernel_config": {"fused_linear_cross_entropy": False}}),
    ],
    "fsdp-optimizer": [
        *other({"optim": "adamw_bnb_8bit"}, {"optim": "adamw_torch_8bit"}),
        *other({"optim": "paged_lion_32bit"}, {"optim": "adamw_torch_fused"}),
        *other({"optim": "adafactor"}, {"optim": "galore_adamw"}),
    ],
    "fsdp-for-tpus": [
        Case("fsdp_config.xla", args(xla=True), args(xla=False)),
        Case("fsdp_config.fsdp_xla", args(fsdp_xla="true"), args(fsdp=None, fsdp_xla="true")),
    ],
    "fsdp-whole-4bit": [
        *other({"bnb_4bit_quant_storage": "uint8", "load_in_4bit": True},
               {"bnb_4bit_quant_storage": "bfloat16", "load_in_4bit": True}),
        Case("model.quantization.bnb_4bit_quant_storage", args_4bit(), args_4bit(bnb_4bit_quant_storage="bfloat16")),
    ],
    "fsdp-deprecated": [
        Case("fsdp", args("full_shard auto_wrap"), args()),
        Case("fsdp_config.version", args(version=1), args(version=2)),
        Case("fsdp_config.fsdp_version", acc(), acc(version=1)),
    ],
}  # fmt: skip
