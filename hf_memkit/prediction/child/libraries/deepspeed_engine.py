"""DeepSpeed in a user's script: the training is traced without its engine, and what the engine does to the model is
done before. What it holds is computed by the process that asks (`prediction/split_states.py`).
`TrainingArguments(deepspeed=…)` keeps its field, and accelerate sees nothing of it. What `accelerate launch` has
chosen comes into the same field."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from hf_memkit.catalog.library_versions import is_on, names_of
from hf_memkit.prediction.traced_training import Engine

_BY_LAUNCHER = "ACCELERATE_USE_DEEPSPEED"
"""By which `accelerate launch` says that its variables hold a DeepSpeed config."""

_HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


def without_engines() -> None:
    """Replaces how `TrainingArguments` takes a DeepSpeed JSON (transformers 5.23.0: training_args.py,
    `__post_init__`)."""
    from transformers import TrainingArguments

    original = TrainingArguments.__post_init__
    by_launcher = is_on(os.environ.pop(_BY_LAUNCHER, None))
    # The engine computes in its weights' type, without the autocast that this asks for elsewhere.
    launchers = os.environ.pop("ACCELERATE_MIXED_PRECISION", "no") if by_launcher else "no"

    def post_init(self: Any) -> None:
        given, halves = self.deepspeed, {name: getattr(self, name) for name in _HALF}
        if not given and by_launcher:
            asked = next((name for name, wanted in halves.items() if wanted), None)
            given = _launchers_config(asked or launchers, by_arguments=asked is not None)
        if not given:
            return original(self)  # type: ignore[no-any-return]
        self.deepspeed = self.memkit_engine = None
        for name in halves:  # the engine's weights are in 16 bits; there is no autocast
            setattr(self, name, False)
        original(self)
        config = given if isinstance(given, Mapping) else json.loads(Path(given).read_text(encoding="utf-8"))
        self.deepspeed, self.memkit_engine = given, dict(config)
        for name, value in halves.items():
            object.__setattr__(self, name, value)
        return None

    TrainingArguments.__post_init__ = post_init


def _launchers_config(precision: str, *, by_arguments: bool) -> dict[str, Any]:
    """The config that `accelerate launch` has put into variables (transformers 5.23.0: training_args.py,
    `__post_init__`). A precision that the arguments ask for is `"auto"` in it, so that it follows them in plans."""
    from accelerate.utils.dataclasses import DeepSpeedPlugin

    plugin = DeepSpeedPlugin()
    missing = [name for name in _HALF if name not in plugin.deepspeed_config]
    plugin.set_mixed_precision(precision)
    return {**plugin.deepspeed_config, **({name: {"enabled": "auto"} for name in missing} if by_arguments else {})}


def traced_engine(trainer: Any) -> Engine | None:
    """What the ledger of an engine is computed from. None: there is no engine."""
    if getattr(trainer.args, "memkit_engine", None) is None:
        return None
    config = _resolved(trainer)
    decayed = set(trainer.get_decay_parameter_names(trainer.model))
    rows = [(each.requires_grad, each.numel(), name in decayed) for name, each in trainer.model.named_parameters()]
    return Engine(
        config=config,
        written=trainer.args.memkit_engine,
        trained=tuple(row[1:] for row in rows if row[0]),
        frozen=tuple(row[1:] for row in rows if not row[0]),
        linear_elements=_in_linear_layers(trainer),
    )


def _in_linear_layers(trainer: Any) -> int:
    """Elements of what linear layers hold from forward to backward, the output layer's aside, which backward begins
    with. With activation checkpointing that is one layer's at a time."""
    if any(getattr(trainer.args, name, False) for name in names_of("activation_checkpointing")):
        return 0
    output = trainer.model.get_output_embeddings() if hasattr(trainer.model, "get_output_embeddings") else None
    linears = [each for each in trainer.model.modules() if isinstance(each, torch.nn.Linear) and each is not output]
    return sum(each.weight.numel() for each in linears)


def _resolved(trainer: Any) -> dict[str, Any]:
    """The config with Trainer's values in place of "auto"; ValueError: some contradict those of the arguments."""
    from transformers.integrations import deepspeed

    arguments = trainer.args
    found = deepspeed.HfTrainerDeepSpeedConfig(copy.deepcopy(arguments.memkit_engine))
    deepspeed.unset_hf_deepspeed_config()  # which making it has set, for all models that are made from then on
    found.trainer_config_process(arguments)
    found.trainer_config_finalize(arguments, trainer.model, max(1, arguments.max_steps))
    return dict(found.config)


def as_the_engine_has_it(trainer: Any) -> torch.dtype | None:
    """Weights in the engine's dtype, which batches get as well, and an optimizer without states; returns the dtype,
    None where weights stay as they are."""
    arguments = trainer.args
    config = getattr(arguments, "memkit_engine", None)
    if config is None:
        return None
    arguments.optim = "sgd"
    trainer.optimizer = trainer.lr_scheduler = None
    for name, dtype in _HALF.items():
        wanted = config.get(name, {}).get("enabled", False)
        if wanted is True or (wanted == "auto" and getattr(arguments, name)):
            trainer.model.to(dtype)
            return dtype
    return None
