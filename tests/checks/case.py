"""What the tables of cases share: models, machines, and configs to start from."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from typing import Any

from hf_memkit.catalog.hardware import Machine, gpu_of_size, named_gpu
from hf_memkit.catalog.models import ModelFacts
from hf_memkit.checks import Subject
from hf_memkit.common.units import GIB
from tests.checks.configs import ADAMW, ds

ZERO = "zero_optimization"
OPTIMIZER, PARAM = f"{ZERO}.offload_optimizer", f"{ZERO}.offload_param"
CPU = {OPTIMIZER: {"device": "cpu"}}
NVME = {OPTIMIZER: {"device": "nvme", "nvme_path": "/data", "buffer_count": 4}}
NVME_PARAM = {
    PARAM: {"device": "nvme", "nvme_path": "/data", "buffer_count": 5, "buffer_size": 2_000_000, "max_in_cpu": 0}
}
LEAN = {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}}
ZENFLOW = {**CPU, f"{ZERO}.zenflow": {"update_interval": 4}, "optimizer": ADAMW}

SMALL = ModelFacts(
    name="small", origin="architecture", config={"model_type": "gpt2"}, parameters=4_002_000,
    largest_parameter=2_000_000, sizes=(2_000_000, 1_000_000, 1_000_000, 1_000, 1_000),
    decayed=(True, True, True, False, False), tied=0, layers=2, width=1_000, vocabulary=2_000, maximum_length=32,
)  # fmt: skip
_SHARED = shutil.disk_usage("/dev/shm").total
BEYOND_SHARED = replace(SMALL, name="beyond", parameters=_SHARED // 16 + 1)
LARGE = ModelFacts(
    name="large", origin="architecture", config={"model_type": "llama"}, parameters=8_000_000_000,
    largest_parameter=500_000_000, sizes=(500_000_000,) * 16, decayed=(True,) * 16, tied=0, layers=15, width=4096,
    vocabulary=128_000, maximum_length=8192,
)  # fmt: skip
MACHINE = Machine(gpu_of_size("16GB"), ram_bytes=64 * GIB, disk_free_bytes=200 * GIB, disk_path="/data", cpu_count=8)
ON_CPU = MACHINE.with_gpu(None)
OLD_GPU = MACHINE.with_gpu(named_gpu("T4"))


def machine(**changes: Any) -> Machine:
    return replace(MACHINE, **changes)


@dataclass(frozen=True)
class Case:
    """`key` is named in the first job and not in the second."""

    key: str
    bad: Subject
    good: Subject


Cases = dict[str, Case | list[Case]]


def keyed(key: str, bad: tuple[int, Any], good: tuple[int, Any] | int) -> Case:
    """Two DeepSpeed configs in which `key` alone differs: (stage, value); a stage: without the key."""
    (stage, wrong), (other, right) = bad, (good, {}) if isinstance(good, int) else (good[0], {key: good[1]})
    return Case(key, of(stage, {key: wrong}), of(other, right))


def value(key: str, bad: Any, good: Any, **more: Any) -> Case:
    """Two jobs with this argument alone."""
    return Case(key, Subject(arguments={key: bad}, **more), Subject(arguments={key: good}, **more))


def of(stage: int, changes: dict[str, Any] | None = None, /, **more: Any) -> Subject:
    """A subject with Trainer's arguments known and empty, unless given."""
    return Subject(ds(stage, changes), **{"arguments": {}, **more})
