"""Traces a script that uses DeepSpeed without its engine, after changing the model as the engine would.

The asking process computes the engine's own memory (`prediction/split_states.py`). `TrainingArguments(deepspeed=…)`
keeps its field, but accelerate does not see it. A config from `accelerate launch` is put into the same field.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hf_memkit.catalog.library_versions import is_on, names_of
from hf_memkit.common.errors import Unmodelled
from hf_memkit.prediction.traced_training import Engine

_LAUNCHER_VARIABLE = "ACCELERATE_USE_DEEPSPEED"  # set by `accelerate launch` if its variables hold a DeepSpeed config

_HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


def disable_deepspeed() -> None:
    """Replaces how `TrainingArguments` handles a DeepSpeed JSON (transformers 5.23.0: training_args.py,
    `__post_init__`)."""
    from transformers import TrainingArguments

    original = TrainingArguments.__post_init__
    by_launcher = is_on(os.environ.pop(_LAUNCHER_VARIABLE, None))
    # The engine computes in its weights' dtype, without the autocast that this variable would enable.
    launcher_precision = os.environ.pop("ACCELERATE_MIXED_PRECISION", "no") if by_launcher else "no"

    def post_init(self: Any) -> None:
        given, halves = self.deepspeed, {name: getattr(self, name) for name in _HALF}
        if not given and by_launcher:
            wanted = next((name for name, enabled in halves.items() if enabled), None)
            given = _launchers_config(wanted or launcher_precision, by_arguments=wanted is not None)
        if not given:
            return original(self)  # type: ignore[no-any-return]
        self.deepspeed = self.memkit_engine = None
        for name in halves:  # the engine has 16-bit weights and no autocast
            setattr(self, name, False)
        original(self)
        config = given if isinstance(given, Mapping) else json.loads(Path(given).read_text(encoding="utf-8"))
        self.deepspeed, self.memkit_engine = given, dict(config)
        for name, value in halves.items():
            object.__setattr__(self, name, value)
        return None

    TrainingArguments.__post_init__ = post_init


def _launchers_config(precision: str, *, by_arguments: bool) -> dict[str, Any]:
    """The config in the variables of `accelerate launch` (transformers 5.23.0: training_args.py, `__post_init__`).
    `by_arguments`: the arguments set the precision; it is `"auto"` in the config, so that it follows them in plans."""
    from accelerate.utils.dataclasses import DeepSpeedPlugin

    plugin = DeepSpeedPlugin()
    missing = [name for name in _HALF if name not in plugin.deepspeed_config]
    plugin.set_mixed_precision(precision)
    return {**plugin.deepspeed_config, **({name: {"enabled": "auto"} for name in missing} if by_arguments else {})}


def traced_engine(trainer: Any) -> Engine | None:
    """The engine's inputs from which its memory is computed; None without an engine. Raises ValueError if a value of
    the config contradicts the arguments."""
    from transformers.integrations import deepspeed

    arguments = trainer.args
    if getattr(arguments, "memkit_engine", None) is None:
        return None
    config = deepspeed.HfTrainerDeepSpeedConfig(copy.deepcopy(arguments.memkit_engine))
    deepspeed.unset_hf_deepspeed_config()  # creating it sets it for all models that are created from then on
    config.trainer_config_process(arguments)
    config.trainer_config_finalize(arguments, trainer.model, max(1, arguments.max_steps))
    decayed = set(trainer.get_decay_parameter_names(trainer.model))
    rows = [(p.requires_grad, p.numel(), name in decayed) for name, p in trainer.model.named_parameters()]
    return Engine(
        config=dict(config.config),
        written=arguments.memkit_engine,
        trained=tuple(row[1:] for row in rows if row[0]),
        frozen=tuple(row[1:] for row in rows if not row[0]),
        linear_elements=_in_linear_layers(trainer),
    )


def _in_linear_layers(trainer: Any) -> int:
    """Elements of the weights that linear layers keep from forward to backward, without the output layer. Backward
    begins with the output layer. With activation checkpointing it is one layer's at a time: 0."""
    if any(getattr(trainer.args, name, False) for name in names_of("activation_checkpointing")):
        return 0
    output = trainer.model.get_output_embeddings() if hasattr(trainer.model, "get_output_embeddings") else None
    linears = [
        module for module in trainer.model.modules() if isinstance(module, torch.nn.Linear) and module is not output
    ]
    return sum(module.weight.numel() for module in linears)


def apply_engine_dtype(trainer: Any) -> torch.dtype | None:
    """Casts weights to the engine's dtype and uses an optimizer without states. Returns the dtype, which batches get
    as well; None if the weights keep theirs."""
    arguments = trainer.args
    config = getattr(arguments, "memkit_engine", None)
    if config is None:
        return None
    if arguments.torch_compile:
        prepare_compiling(trainer.model, config)
    arguments.optim = "sgd"
    trainer.optimizer = trainer.lr_scheduler = None
    for name, dtype in _HALF.items():
        wanted = config.get(name, {}).get("enabled", False)
        if wanted is True or (wanted == "auto" and getattr(arguments, name)):
            trainer.model.to(dtype)
            return dtype
    return None


def prepare_compiling(model: nn.Module, config: Mapping[str, Any]) -> None:
    """Lets the model be compiled as in an engine with this config. Raises Unmodelled if that cannot be traced."""
    if config.get("compile", {}).get("deepcompile") is True:
        raise Unmodelled(
            "compile.deepcompile=true in the DeepSpeed JSON: DeepSpeed changes the compiled graph, which is not "
            "traced. Set it to false, or omit torch_compile"
        )
    torch._dynamo.config.optimize_ddp = False  # the engine has no DistributedDataParallel, which splits graphs
    if config.get("zero_optimization", {}).get("stage") == 3:
        _end_graphs_at_modules(model)


def _end_graphs_at_modules(model: nn.Module) -> None:
    """Adds hooks that end the compiled graph at every module, as those of stage 3 do, which gather and release weights
    (deepspeed 0.19.8: runtime/zero/parameter_offload.py, `_register_deepspeed_module`)."""
    keep_dynamo_out: Any = torch.compiler.disable
    for module in model.modules():
        module.register_forward_pre_hook(keep_dynamo_out(lambda module, args: None))
        module.register_forward_hook(keep_dynamo_out(lambda module, args, output: None))
