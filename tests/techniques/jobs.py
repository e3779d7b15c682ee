"""Jobs that techniques are applied to."""

from __future__ import annotations

from typing import Any

from hf_memkit.hardware import Machine, gpu_of_size
from hf_memkit.job import Job
from hf_memkit.models import describe
from hf_memkit.units import GIB

MACHINE = Machine(gpu_of_size("16GB"), ram_bytes=64 * GIB, disk_free_bytes=200 * GIB, disk_path="/data", cpu_count=8)


def gpt2_job(model: str | None = "gpt2", **changes: Any) -> Job:
    """GPT-2 small (or another built-in architecture, or none) on a 16 GB GPU, four sequences of 512 tokens."""
    facts = None if model is None else describe(model, use_hub=False, use_built_in=True)
    values: dict[str, Any] = {
        "model": facts, "machine": MACHINE, "micro_batch_size": 4, "sequence_length": 512, "nvme_path": "/data",
    }  # fmt: skip
    return Job(**{**values, **changes})
