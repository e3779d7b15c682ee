"""What the script gave Trainer, for rules about known mistakes."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any, Final

from transformers import PretrainedConfig, TrainingArguments

from hf_memkit.common.as_json import as_json
from hf_memkit.common.secrets import masked_value
from hf_memkit.components.resuming import restores_all_weights
from hf_memkit.prediction.child.example_inputs import base_model
from hf_memkit.prediction.child.training.plan_facts import makes_optimizer
from hf_memkit.prediction.traced_training import GivenSettings
from hf_memkit.setup.live_arguments import creation_record

_MAY_BE_FILES: Final = ("deepspeed", "fsdp_config")


def given_settings(trainer: Any) -> GivenSettings | None:
    """What the script gave; None if nobody saw the creation of its arguments."""
    arguments, model = trainer.args, trainer.model
    record = creation_record(arguments)
    if record is None:
        return None

    def value(name: str) -> Any:
        now = getattr(arguments, name, None)
        is_edited = type(now) not in (dict, list) and now != record.after_init.get(name)
        is_derived = name in ("bf16", "fp16")  # by TRL's configs, or from the launcher's precision
        return now if is_edited or is_derived else record.given.get(name)

    values = given_arguments(type(arguments), value)
    files = {}
    for name in _MAY_BE_FILES:
        text = values.get(name)
        if isinstance(text, str) and text:
            del values[name]
            with contextlib.suppress(OSError, ValueError):  # the script has left the folder, or removed the file
                if not text.lstrip().startswith("{"):
                    files[name], text = text, Path(text).read_text(encoding="utf-8")
                values[name] = json.loads(text)
    own_optimizer = makes_optimizer(trainer)
    if own_optimizer:
        values = {name: each for name, each in values.items() if not name.startswith("optim")}

    config = getattr(base_model(model), "config", None)
    described = config.to_diff_dict() if isinstance(config, PretrainedConfig) else {}
    quantization = described.pop("quantization_config", None) or {}
    adapter = next(iter(getattr(model, "peft_config", {}).values()), None)
    settings: dict[str, Any] = {}
    if restores_all_weights(trainer):
        settings["trainer.restores_all_weights"] = True
    if loaded_from := getattr(base_model(model), "name_or_path", None):
        settings["model.name"] = loaded_from
    if adapter is not None:
        targets = getattr(adapter, "target_modules", None)
        settings["adapter.peft_type"] = _plain(adapter.peft_type)
        settings["adapter.target_modules"] = sorted(targets) if isinstance(targets, set) else targets
    if quantization.get("quant_method") == "bitsandbytes":
        settings["model.quantization"] = quantization
    if attention := getattr(config, "_attn_implementation", None):
        settings["model.attn_implementation"] = attention
    settings, described = as_json([settings, described], default=str, skipkeys=True)
    return GivenSettings(values, files, settings, described, own_optimizer)


def given_arguments(kind: type, value: Callable[[str], Any]) -> dict[str, Any]:
    """The fields of a class of TrainingArguments whose values differ from a default, the class's or Trainer's, and are
    JSON; without secrets, because traces are kept on disk. `value`: returns that of a field."""
    of_trainer: Mapping[str, Any] = {field.name: _default(field) for field in fields(TrainingArguments)}
    values = {}
    for field in fields(kind):
        given = _plain(value(field.name))
        if given != of_trainer.get(field.name) or given != _default(field):
            with contextlib.suppress(TypeError):
                values[field.name] = masked_value(field.name, as_json(given))
    return values


def _default(field: Field[Any]) -> Any:
    return _plain(field.default if field.default_factory is MISSING else field.default_factory())


def _plain(value: Any) -> Any:
    return getattr(value, "value", value)
