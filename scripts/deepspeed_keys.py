#!/usr/bin/env python3
"""Writes what the installed DeepSpeed knows of its config into hf_memkit/checks; with --check only compares.

`memkit check` reads that file instead of DeepSpeed, whose import takes seconds. What DeepSpeed's classes do not say is
in hf_memkit/checks/deepspeed_keys.py.
"""

from __future__ import annotations

import inspect
import os
import pydoc
import sys
import typing
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import pydantic
from deepspeed.runtime import config, lr_schedules
from deepspeed.runtime.activation_checkpointing.config import ACT_CHKPT_DEFAULT
from deepspeed.runtime.swap_tensor.aio_config import AIO_DEFAULT_DICT
from docs_blocks import ROOT, compact_json, write

TARGET = ROOT / "hf_memkit" / "checks" / "deepspeed_0_19.json"

MODELS = {
    "zero_optimization": "runtime.zero.config.DeepSpeedZeroConfig",
    "zero_optimization.offload_optimizer": "runtime.zero.offload_config.DeepSpeedZeroOffloadOptimizerConfig",
    "zero_optimization.offload_param": "runtime.zero.offload_config.DeepSpeedZeroOffloadParamConfig",
    "zero_optimization.zenflow": "runtime.zenflow.zenflow_config.ZenFlowConfig",
    "zero_optimization.leaf_module": "runtime.zero.leaf_module_config.DeepSpeedZeroLeafModuleConfig",
    "bf16": "runtime.precision_config.DeepSpeedBF16Config",
    "fp16": "runtime.precision_config.DeepSpeedFP16Config",
    "comms_logger": "comm.config.CommsLoggerConfig",
    "tensorboard": "monitor.config.TensorBoardConfig",
    "csv_monitor": "monitor.config.CSVConfig",
    "wandb": "monitor.config.WandbConfig",
    "timers.throughput": "utils.config.DeepSpeedThroughputTimerConfig",
    "compile": "compile.config.CompileConfig",
}
"""Section → its class in DeepSpeed."""

DEFAULTS: dict[str, Mapping[str, Any]] = {"aio": AIO_DEFAULT_DICT, "activation_checkpointing": ACT_CHKPT_DEFAULT}
"""Sections that have no class: their keys with their defaults."""

KINDS: dict[type, str] = {bool: "switch", int: "whole", float: "number", str: "text", Path: "text", list: "list"}
BOUNDS = {"Ge": "least", "Le": "most", "Gt": "above", "Lt": "below"}
"""Classes of annotated_types → our names."""


def described(annotation: Any) -> dict[str, Any]:
    """The fields of `hf_memkit.checks.deepspeed_keys.Key` that a type says."""
    arms = typing.get_args(annotation)
    if len(arms) == 2 and arms[1] is type(None):
        return {**described(arms[0]), "optional": True}
    kind = typing.get_origin(annotation) or annotation
    if not isinstance(kind, type):
        return {"kind": "any"}
    if issubclass(kind, pydantic.BaseModel):
        return {"kind": "section"}
    if issubclass(kind, Enum):
        values = [each.value for each in kind]
        if issubclass(kind, int):
            return {"kind": "whole", "least": min(values), "most": max(values)}
        return {"kind": "text", "choices": values}
    return {"kind": KINDS.get(kind, "any")}


def keys_of(model: type[pydantic.BaseModel]) -> dict[str, dict[str, Any]]:
    """Key → what it may hold."""
    found = {}
    for name, field in model.model_fields.items():
        key = described(field.annotation)
        for bound in field.metadata:
            kind = type(bound).__name__
            if kind in BOUNDS:
                key[BOUNDS[kind]] = getattr(bound, kind.lower())
        found[field.alias or name] = key
    return found


def top_level() -> list[str]:
    """The keys that DeepSpeed asks for when it reads a config of one key."""
    read = set()

    class Recorder(dict[str, Any]):
        def get(self, key: str, default: Any = None) -> Any:
            read.add(key)
            return dict.get(self, key, default)

        def __contains__(self, key: object) -> bool:
            read.add(str(key))
            return dict.__contains__(self, key)

        def keys(self) -> Any:
            return self

    config.DeepSpeedConfig(Recorder({"train_batch_size": 1}))
    return sorted(read)


def content() -> dict[str, Any]:
    """What the file holds."""
    package = Path(deepspeed.__file__).parent
    sections: dict[str, Any] = {}
    for name, place in MODELS.items():
        model = pydoc.locate(f"deepspeed.{place}")
        path = Path(inspect.getfile(model)).relative_to(package)
        sections[name] = {
            "source": f"{path} {inspect.getsourcelines(model)[1]}",
            "strict": model.model_config.get("extra") == "forbid",
            "keys": keys_of(model),
        }
    for name, defaults in DEFAULTS.items():
        keys = {key: {"kind": KINDS.get(type(value), "any")} for key, value in defaults.items()}
        sections[name] = {"strict": False, "keys": keys}
    return {
        "deepspeed": deepspeed.__version__.split("+")[0],
        "sections": sections,
        "top_level": top_level(),
        "removed": [
            *config._REMOVED_TOP_LEVEL_CONFIG_KEYS,
            *(f"zero_optimization.{key}" for key in config._REMOVED_ZERO_CONFIG_KEYS),
        ],
        "optimizers": config.DEEPSPEED_OPTIMIZERS,
        "schedulers": {
            name: list(inspect.signature(getattr(lr_schedules, name)).parameters)[1:]
            for name in lr_schedules.VALID_LR_SCHEDULES
        },
    }


if __name__ == "__main__":
    sys.exit(not write(TARGET, compact_json(content(), sections=True), check="--check" in sys.argv))
