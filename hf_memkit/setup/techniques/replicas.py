"""Several GPUs that each hold everything, and average their gradients: DistributedDataParallel, through Trainer."""

from __future__ import annotations

from hf_memkit.setup.setup import Setup
from hf_memkit.setup.techniques.registry import technique


@technique(
    "data-parallel",
    saves="time, and no memory: every GPU holds everything, and buckets with a copy of the gradients",
    costs="gradient buckets as large as the gradients on every GPU",
    not_when="one GPU does not hold the job: split it with ZeRO instead",
    gpu_only="it saves no memory, and what it adds is the communication library's as much as torch's",
)
def data_parallel(setup: Setup) -> Setup:
    """Trainer's DistributedDataParallel, one process per GPU. No effect with one process, DeepSpeed or FSDP."""
    if setup.resolved_for.processes == 1 or "deepspeed.config" in setup or "arguments.fsdp" in setup:
        return setup
    return setup.put(
        "arguments.ddp_find_unused_parameters", False,
        "every trained parameter takes part in every step: searching the graph for others would cost time",
    )  # fmt: skip
