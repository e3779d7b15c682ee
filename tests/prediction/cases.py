"""Small setups to trace, and the worker that traces them: started once for all tests of a process."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from hf_memkit.catalog.models import ModelFacts, describe
from hf_memkit.prediction.setup_as_script import SETUP_SCRIPT, SetupJob, trace_setup
from hf_memkit.prediction.trace.request import ScriptRequest
from hf_memkit.prediction.trace.trace import Trace
from hf_memkit.prediction.traced_training import TracedTraining
from hf_memkit.prediction.worker import Worker
from hf_memkit.setup.setup import Setup

GPT2: dict[str, Any] = {
    "model_type": "gpt2", "n_embd": 64, "n_layer": 3, "n_head": 4, "vocab_size": 1000, "n_positions": 128,
}  # fmt: skip

LLAMA: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 172, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 1000,
}  # fmt: skip

LENGTH = 64


def facts(config: dict[str, Any]) -> ModelFacts:
    return describe(f"no-such-{config['model_type']}", config, use_hub=False)


def small_setup(config: dict[str, Any] | None = None, **arguments: Any) -> Setup:
    """Trainer's defaults for a small model; `arguments` are fields of TrainingArguments."""
    setup = Setup("trainer-defaults").put("model.name", "small", "a test's")
    setup = setup.put("model.origin", "architecture", "a test's").put("model.architecture", config or GPT2, "a test's")
    for name, value in {"per_device_train_batch_size": 2, **arguments}.items():
        setup = setup.put(f"arguments.{name}", value, "a test's")
    return setup


def training(config: dict[str, Any] | None = None, **arguments: Any) -> SetupJob:
    return SetupJob(small_setup(config, **arguments), LENGTH)


def traced(worker: Worker, asked: SetupJob, **fields: Any) -> Trace:
    """Its trace; `fields` are those of a `ScriptRequest`, such as the device."""
    return traced_training(worker, asked, **fields).of_steps()["worst"]


def traced_training(worker: Worker, asked: SetupJob, **fields: Any) -> TracedTraining:
    """The same with what else the child tells of it."""
    request = ScriptRequest(SETUP_SCRIPT, str(Path.cwd()), dict(os.environ), **fields)
    return trace_setup(worker, asked, request)


def without_saving(setup: Setup) -> Setup:
    return setup.put("arguments.save_strategy", "no", "a test's")
