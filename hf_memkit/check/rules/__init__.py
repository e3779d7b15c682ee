"""The rules, split by idea. Importing this fills the registry."""

from hf_memkit.check.rules import (
    arguments,
    batch,
    buffers,
    capacity,
    keys,
    nvme,
    offload,
    optimizers,
    precision,
    saving,
    stages,
    trainer,
    values,
    zenflow,
)

__all__ = [
    "arguments",
    "batch",
    "buffers",
    "capacity",
    "keys",
    "nvme",
    "offload",
    "optimizers",
    "precision",
    "saving",
    "stages",
    "trainer",
    "values",
    "zenflow",
]
