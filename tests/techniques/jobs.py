"""Jobs that techniques are applied to."""

from __future__ import annotations

from typing import Any

from hf_memkit.catalog.hardware import Machine, gpu_of_size
from hf_memkit.catalog.models import describe
from hf_memkit.common.units import GIB
from hf_memkit.setup.job import Job

MACHINE = Machine(gpu_of_size("16GB"), ram_bytes=64 * GIB, disk_free_bytes=200 * GIB, disk_path="/data", cpu_count=8)


def gpt2_job(model: str | None = "gpt2", **changes: Any) -> Job:
    """GPT-2 small (or another built-in architecture, or none) on a 16 GB GPU, four sequences of 512 tokens."""
    facts = None if model is None else describe(model, use_hub=False, use_built_in=True)
    values: dict[str, Any] = {
        "model": facts, "machine": MACHINE, "micro_batch_size": 4, "sequence_length": 512, "nvme_path": "/data",
    }  # fmt: skip
    return Job(**{**values, **changes})
