"""The frozen table of keys against the installed DeepSpeed, transformers and torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from hf_memkit.check.known_keys import SECTIONS
from hf_memkit.check.names import DEEPSPEED_OPTIMIZERS, REMOVED, SCHEDULERS, TORCH_OPTIMIZERS, TORCH_SCHEDULERS
from tests.conftest import ROOT

_ASK = r"""
import inspect, json, torch
from deepspeed.compile.config import CompileConfig
from deepspeed.comm.config import CommsLoggerConfig
from deepspeed.monitor.config import CSVConfig, TensorBoardConfig, WandbConfig
from deepspeed.runtime import config as c, lr_schedules
from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
from deepspeed.runtime.swap_tensor.aio_config import AIO_DEFAULT_DICT
from deepspeed.runtime.activation_checkpointing.config import ACT_CHKPT_DEFAULT
from deepspeed.runtime.zenflow.zenflow_config import ZenFlowConfig
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from deepspeed.runtime.zero.leaf_module_config import DeepSpeedZeroLeafModuleConfig
from deepspeed.runtime.zero.offload_config import DeepSpeedZeroOffloadOptimizerConfig, DeepSpeedZeroOffloadParamConfig
from deepspeed.utils.config import DeepSpeedThroughputTimerConfig

def fields(model):
    return [field.alias or name for name, field in model.model_fields.items()]

read = set()
class Recorder(dict):
    def get(self, key, default=None):
        read.add(key)
        return dict.get(self, key, default)
    def __contains__(self, key):
        read.add(key)
        return dict.__contains__(self, key)
    def keys(self):
        return self

c.DeepSpeedConfig(Recorder({"train_batch_size": 1}))
z = "zero_optimization"
print("ANSWER " + json.dumps({
    "read": sorted(read),
    "sections": {
        z: fields(DeepSpeedZeroConfig),
        z + ".offload_optimizer": fields(DeepSpeedZeroOffloadOptimizerConfig),
        z + ".offload_param": fields(DeepSpeedZeroOffloadParamConfig),
        z + ".zenflow": fields(ZenFlowConfig),
        z + ".leaf_module": fields(DeepSpeedZeroLeafModuleConfig),
        "bf16": fields(DeepSpeedBF16Config), "fp16": fields(DeepSpeedFP16Config), "compile": fields(CompileConfig),
        "comms_logger": fields(CommsLoggerConfig), "tensorboard": fields(TensorBoardConfig),
        "csv_monitor": fields(CSVConfig), "wandb": fields(WandbConfig),
        "timers.throughput": fields(DeepSpeedThroughputTimerConfig),
        "aio": list(AIO_DEFAULT_DICT), "activation_checkpointing": list(ACT_CHKPT_DEFAULT),
    },
    "removed": list(c._REMOVED_TOP_LEVEL_CONFIG_KEYS) + [z + "." + key for key in c._REMOVED_ZERO_CONFIG_KEYS],
    "optimizers": c.DEEPSPEED_OPTIMIZERS,
    "torch_optimizers": [n for n, k in vars(torch.optim).items() if isinstance(k, type) and n != "Optimizer"],
    "torch_schedulers": [n for n, k in vars(torch.optim.lr_scheduler).items() if isinstance(k, type)
                         and issubclass(k, torch.optim.lr_scheduler.LRScheduler) and not n.startswith("_")],
    "schedulers": {n: list(inspect.signature(getattr(lr_schedules, n)).parameters)[1:]
                   for n in lr_schedules.VALID_LR_SCHEDULES},
}))
"""


@pytest.fixture(scope="module")
def installed() -> dict[str, Any]:
    environment = {**os.environ, "DS_ACCELERATOR": "cpu"}
    command = [sys.executable, "-c", _ASK]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=True)
    line = next(line for line in done.stdout.splitlines() if line.startswith("ANSWER "))
    answer: dict[str, Any] = json.loads(line.removeprefix("ANSWER "))
    return answer


def test_sections_have_the_keys_of_the_installed_classes(installed: dict[str, Any]) -> None:
    ours = {name: sorted(SECTIONS[name].keys or ()) for name in installed["sections"]}
    assert ours == {name: sorted(keys) for name, keys in installed["sections"].items()}


def test_the_top_level_is_what_deepspeed_reads(installed: dict[str, Any]) -> None:
    ours = set(SECTIONS[""].keys or ())
    # "bfloat16" has a rule of its own; transformers and accelerate read the first two; the third is read where
    # torch.distributed has started; the fourth only where "zero_optimization" is a mere true.
    assert set(installed["read"]) - set(REMOVED) <= ours
    others = {"inference", "msamp", "sequence_parallel_size", "allgather_size", "bfloat16"}
    assert ours - set(installed["read"]) <= others


def test_removed_keys_optimizers_and_schedulers_are_the_installed_ones(installed: dict[str, Any]) -> None:
    assert set(REMOVED) == set(installed["removed"])
    assert set(DEEPSPEED_OPTIMIZERS) == set(installed["optimizers"])
    assert set(TORCH_OPTIMIZERS) <= set(installed["torch_optimizers"])
    assert set(TORCH_SCHEDULERS) <= set(installed["torch_schedulers"])
    assert {name: sorted(keys) for name, keys in SCHEDULERS.items()} == {
        name: sorted(keys) for name, keys in installed["schedulers"].items()
    }
