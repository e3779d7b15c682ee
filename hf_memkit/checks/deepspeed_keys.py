"""Every key that DeepSpeed 0.19 knows, by section, with the values it accepts; and the key at a dotted path.

`scripts/deepspeed_keys.py` writes `deepspeed_0_19.json` from DeepSpeed's own classes, since importing DeepSpeed takes
seconds. The tables here have what no class declares: sections that DeepSpeed reads key by key, bounds, parameters of
optimizers, and names that it removed or that people get wrong.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, Final, Literal

from hf_memkit.checks.subject import Subject

Kind = Literal["whole", "number", "switch", "text", "list", "section", "any"]

_KINDS: Final[dict[Kind, tuple[str, Any]]] = {
    "whole": ("a whole number", int | float),
    "number": ("a number", int | float),
    "switch": ("true or false", bool),
    "text": ("text", str),
    "list": ("a list", list | tuple),
    "section": ("a section in braces", Mapping),
    "any": ("anything", object),
}
"""Kind → its name in messages, and its types."""


@dataclass(frozen=True, slots=True)
class Key:
    """Allowed values of a key.

    Attributes:
        kind: whole number, number, switch (true or false), text, list, section (a mapping), any.
        least, most: bounds, themselves allowed.
        above, below: bounds, themselves not allowed.
        choices: the only texts allowed, in lower case; empty if any text is.
        optional: `null` is allowed.
    """

    kind: Kind
    least: float | None = None
    most: float | None = None
    above: float | None = None
    below: float | None = None
    choices: tuple[str, ...] = ()
    optional: bool = False

    def type_error(self, value: Any) -> str | None:
        """The expected kind, such as "a whole number"; None if the type of `value` is right."""
        if isinstance(value, float) and not math.isfinite(value):
            return "a finite number"  # Python's JSON reads NaN, Infinity and 1e999
        wanted, types = _KINDS[self.kind]
        if value is None:
            right = self.optional or self.kind == "any"
        elif isinstance(value, bool):
            right = self.kind in ("switch", "any")
        elif self.kind == "whole" and isinstance(value, float):
            right = value.is_integer()  # JSON writes 5e8 for 500000000
        else:
            right = isinstance(value, types)
        return None if right else wanted

    def range_error(self, value: Any) -> str | None:
        """The bound that `value`, of the right type, violates, such as "at least 0"; None if in range."""
        if isinstance(value, int | float) and not isinstance(value, bool):
            if self.least is not None and value < self.least:
                return f"at least {self.least:g}"
            if self.most is not None and value > self.most:
                return f"at most {self.most:g}"
            if self.above is not None and value <= self.above:
                return f"above {self.above:g}"
            if self.below is not None and value >= self.below:
                return f"below {self.below:g}"
        if self.choices and isinstance(value, str) and value.lower() not in self.choices:
            return f"one of {', '.join(self.choices)}"
        return None


@dataclass(frozen=True, slots=True)
class Section:
    """Keys of one section.

    Attributes:
        keys: its allowed keys, by name; None if all are allowed.
        strict: DeepSpeed rejects unknown keys here. Elsewhere it ignores them.
    """

    keys: Mapping[str, Key] | None
    strict: bool


def whole(least: float | None = 0, **more: Any) -> Key:
    return Key("whole", least=least, **more)


def number(least: float | None = 0, **more: Any) -> Key:
    return Key("number", least=least, **more)


def choice(*choices: str, optional: bool = False) -> Key:
    return Key("text", choices=choices, optional=optional)


switch: Final = partial(Key, "switch")
text: Final = partial(Key, "text")
FREE: Final = Key("any")
_SECTION: Final = Key("section")
_DTYPE: Final = choice("fp16", "bf16", "fp32", "float16", "bfloat16", "float32", "half", "float", optional=True)

UNTYPED: Final[dict[str, dict[str, Key]]] = {
    # runtime/config.py 485-590
    "": {
        "train_batch_size": whole(1),
        "train_micro_batch_size_per_gpu": whole(1),
        "gradient_accumulation_steps": whole(1),
        "managed_gradient_accumulation": switch(),
        "gradient_clipping": number(),
        "steps_per_print": Key("number", above=0, optional=True),
        "dump_state": switch(),
        "disable_python_gc": switch(),
        "disable_allgather": switch(),
        "communication_data_type": choice("fp16", "bf16", "fp32", optional=True),
        "seq_parallel_communication_data_type": choice("fp16", "bf16", "fp32", optional=True),
        "prescale_gradients": switch(),
        "gradient_predivide_factor": Key("number", above=0),
        "gradient_allreduce_op": choice("mean", "sum"),
        "zero_allow_untested_optimizer": switch(),
        "zero_force_ds_cpu_optimizer": switch(),
        "wall_clock_breakdown": switch(),
        "memory_breakdown": switch(),
        "vocabulary_size": whole(1, optional=True),
        "dataloader_drop_last": switch(),
        "log_level": text(),
        "use_data_before_expert_parallelism": switch(),
        "sequence_parallel_size": whole(1),
        "datastates_ckpt": FREE,
        "allgather_size": whole(),
        **dict.fromkeys(
            (
                "zero_optimization", "bf16", "bfloat16", "fp16", "torch_autocast", "optimizer", "scheduler", "aio",
                "activation_checkpointing", "data_types", "checkpoint", "flops_profiler", "comms_logger",
                "tensorboard", "wandb", "csv_monitor", "comet", "autotuning", "pipeline", "data_efficiency",
                "hybrid_engine", "weight_quantization", "compile", "timers", "tensor_parallel", "expert_parallel",
                "inference", "msamp",
            ),
            _SECTION,
        ),
    },
    # runtime/config.py 179-205, 288-314, 325-337, 556-570
    "torch_autocast": {
        "enabled": switch(), "dtype": _DTYPE, "lower_precision_safe_modules": Key("list", optional=True),
    },
    "optimizer": {"type": text(), "params": _SECTION, "legacy_fusion": switch()},
    "scheduler": {"type": text(), "params": _SECTION},
    "data_types": {
        "grad_accum_dtype": _DTYPE, "param_dtype": _DTYPE, "buffer_dtype": _DTYPE, "keep_in_fp32_modules": FREE,
    },
    # runtime/config.py 545-555, runtime/model_checkpointing/config.py 60
    "checkpoint": {
        "tag_validation": choice("warn", "ignore", "fail"), "load_universal": switch(),
        "use_node_local_storage": switch(), "parallel_write": _SECTION, "checkpoint_serialization": switch(),
        "writer": Key("section", optional=True),
    },
    # profiling/config.py 29-50
    "flops_profiler": {
        "enabled": switch(), "recompute_fwd_factor": number(), "profile_step": whole(),
        "module_depth": Key("whole", least=-1), "top_modules": whole(1), "detailed": switch(),
        "output_file": text(optional=True),
    },
    # utils/config.py 27
    "timers": {"throughput": _SECTION},
}  # fmt: skip
"""Section → its keys, all in deepspeed 0.19.8. Unknown ones are ignored there."""

BOUNDS: Final[dict[str, Key]] = {
    "zero_optimization.stage3_module_granularity_threshold": whole(),
    # None is the default; lists and one name are both taken (runtime/zero/leaf_module_config.py 21)
    "zero_optimization.leaf_module": Key("section", optional=True),
    **{f"zero_optimization.leaf_module.{name}": FREE for name in ("classes", "names", "name_suffixes")},
    # runtime/zenflow/zenflow_config.py 12-80
    "zero_optimization.zenflow.select_strategy": choice("auto", "step", "epoch"),
    "zero_optimization.zenflow.select_interval": whole(1),
    "zero_optimization.zenflow.update_interval": whole(1),
    "zero_optimization.zenflow.full_warm_up_rounds": whole(),
    "zero_optimization.zenflow.steps_per_epoch": whole(optional=True),
    # runtime/precision_config.py 101
    "fp16.loss_scale": number(),
    "fp16.initial_scale_power": whole(),
    "fp16.loss_scale_window": whole(1),
    "fp16.hysteresis": whole(),
    "fp16.min_loss_scale": whole(1),
    "compile.free_activation_threshold": whole(),
    # runtime/swap_tensor/aio_config.py 20-43
    "aio.block_size": whole(1),
    "aio.queue_depth": whole(1),
    "aio.intra_op_parallelism": whole(1),
    "activation_checkpointing.number_checkpoints": whole(1, optional=True),
}
"""Keys whose bounds DeepSpeed's class does not declare."""

TORCH_OPTIMIZERS: Final = (
    "ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "LBFGS", "Muon", "NAdam", "RAdam",
    "RMSprop", "Rprop", "SGD", "SparseAdam",
)  # fmt: skip
"""deepspeed 0.19.8: runtime/engine.py 1986, any class of torch.optim by its exact name."""

REMOVED_OPTIMIZERS: Final = ("OneBitAdam", "ZeroOneAdam", "OneBitLamb")
"""In deepspeed up to 0.19.6: runtime/fp16/onebit/."""

CASE_MATTERS: Final = (*TORCH_OPTIMIZERS, *REMOVED_OPTIMIZERS)

TORCH_SCHEDULERS: Final = (
    "ChainedScheduler", "ConstantLR", "CosineAnnealingLR", "CosineAnnealingWarmRestarts", "CyclicLR", "ExponentialLR",
    "LambdaLR", "LinearLR", "MultiStepLR", "MultiplicativeLR", "OneCycleLR", "PolynomialLR", "ReduceLROnPlateau",
    "SequentialLR", "StepLR",
)  # fmt: skip
"""deepspeed 0.19.8: runtime/engine.py 1929, any class of torch.optim.lr_scheduler by its exact name."""

_ADAM: Final = {
    "lr": number(), "betas": Key("list"), "eps": number(), "weight_decay": number(), "bias_correction": switch(),
    "amsgrad": switch(), "torch_adam": switch(), "adam_w_mode": switch(), "fp32_optimizer_states": switch(),
    "foreach": switch(optional=True), "set_grad_none": switch(),
}  # fmt: skip
_ONEBIT: Final = {
    "lr": number(), "betas": Key("list"), "eps": number(), "weight_decay": number(), "bias_correction": switch(),
    "amsgrad": switch(), "eps_inside_sqrt": switch(), "max_grad_norm": number(), "cuda_aware": switch(),
    "comm_backend_name": choice("nccl", "mpi", "hccl", "compressed"), "freeze_step": whole(),
}  # fmt: skip
OPTIMIZER_PARAMS: Final = {
    "adam": _ADAM,
    "adamw": _ADAM,
    "onebitadam": _ONEBIT,
    "onebitlamb": _ONEBIT
    | {name: number() for name in ("max_coeff", "min_coeff", "coeff_beta", "factor_max", "factor_min")}
    | {"factor_threshold": number()},
}
"""Parameters of optimizers that take a fixed list (deepspeed 0.19.8: ops/adam/; 0.19.6: runtime/fp16/onebit/)."""

REMOVED: Final[dict[str, str]] = {
    "nebula": "checkpoints go to local disk",
    "compression_training": "the model would train uncompressed",
    "amp": "use bf16 or fp16 instead",
    "quantize_training": "the model would train unquantized",
    "sparse_gradients": "gradients of embeddings are reduced dense",
    "eigenvalue": "it was part of quantize_training",
    "sparse_attention": "choose the attention of the model instead",
    "elasticity": "set the batch sizes instead",
    "graph_harvesting": "no replacement",
    "curriculum_learning": "now data_efficiency.data_sampling.curriculum_learning",
    "progressive_layer_drop": "no replacement",
    "zero_optimization.mics_shard_size": "DeepSpeed removed MiCS; zero_hpz_partition_size is the nearest",
    "zero_optimization.mics_hierarchical_params_gather": "DeepSpeed removed MiCS",
    "zero_optimization.zeropp_loco_param": "zero_quantized_gradients works without it",
}
"""Keys that DeepSpeed removed and rejects (deepspeed 0.19.8: runtime/config.py 67-130) → a note for the fix."""

RENAMED: Final[dict[str, str]] = {
    "aio.thread_count": "intra_op_parallelism",
    "activation_checkpointing.partitioned_activations": "partition_activations",
    "activation_checkpointing.num_checkpoints": "number_checkpoints",
    "activation_checkpointing.checkpoint_in_cpu": "cpu_checkpointing",
    "activation_checkpointing.contiguous_checkpointing": "contiguous_memory_optimization",
    "train_micro_batch_size": "train_micro_batch_size_per_gpu",
}
"""Frequent wrong name → the name in the same section. The first is a former name of aio's key; the second is in
DeepSpeed's own comment (runtime/activation_checkpointing/config.py 17)."""

_GENERATED: Final[dict[str, Any]] = json.loads(Path(__file__).with_name("deepspeed_0_19.json").read_text())

SCHEDULERS: Final[dict[str, list[str]]] = _GENERATED["schedulers"]
"""DeepSpeed's own schedulers → their parameters."""

OPTIMIZERS: Final = (*_GENERATED["optimizers"], *CASE_MATTERS)
"""Names that DeepSpeed accepts or accepted; its own, which come first, in upper or lower case."""

_ALIASES: Final = {"bfloat16": "bf16"}


def _sections() -> dict[str, Section]:
    sections = {name: Section(keys, strict=False) for name, keys in UNTYPED.items()}
    for name, section in _GENERATED["sections"].items():
        keys = {}
        for key, fields in section["keys"].items():
            fields["choices"] = tuple(fields.get("choices", ()))
            keys[key] = BOUNDS.get(f"{name}.{key}") or Key(**fields)
        sections[name] = Section(keys, strict=section["strict"])
    return sections


SECTIONS: Final = _sections()
"""Sections whose keys are checked, by dotted path. Other sections are not checked."""


def section_name(path: str) -> str:
    """`zero_optimization.offload_param` of `zero_optimization.offload_param.device`; empty for the top level."""
    return path.rpartition(".")[0]


def section_at(subject: Subject, name: str) -> Section | None:
    """The section of that name; None if its keys are not known. Two depend on the key `type` next to them."""
    if name == "optimizer.params":
        return Section(OPTIMIZER_PARAMS.get(str(subject.at("optimizer.type")).lower()), strict=True)
    if name == "scheduler.params":
        names = SCHEDULERS.get(str(subject.at("scheduler.type")))
        return Section(dict.fromkeys(names, FREE) if names else None, strict=True)
    return SECTIONS.get(_ALIASES.get(name, name))


def key_at(subject: Subject, path: str) -> Key | None:
    """The allowed values of the key at a dotted path; None if the section, or the key in it, is unknown."""
    section = section_at(subject, section_name(path))
    name = path.rpartition(".")[2]
    if section is None or section.keys is None:
        return None
    if section_name(path) == "zero_optimization" and f"stage3_{name}" in section.keys:
        name = f"stage3_{name}"  # deepspeed takes both names: runtime/config_utils.py 109, populate_by_name
    return section.keys.get(name)


@cache
def places_of(name: str) -> tuple[str, ...]:
    """Every dotted path with a known key of this name, the shortest first; empty for words such as `enabled`."""
    if name in ("enabled", "type", "params", "dtype", "device"):
        return ()
    paths = [f"{section}.{name}".lstrip(".") for section, known in SECTIONS.items() if name in (known.keys or {})]
    return tuple(sorted(paths, key=len))
