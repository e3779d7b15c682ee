"""What several processes change in a setup: CPU threads, and notes on the memory of each GPU and machine."""

from __future__ import annotations

from typing import Final

from hf_memkit.setup.job import Job
from hf_memkit.setup.setup import Setup

_PLACE: Final = {"cpu": "in RAM", "nvme": "on disk", "none": "on the GPU"}


def threads_per_process(cpu_count: int, gpus: int) -> int:
    """CPU threads for each process of a machine. torchrun's default, one, makes an offloaded optimizer slow."""
    return max(1, cpu_count // gpus)


def share_among_processes(setup: Setup, job: Job) -> Setup:
    """The setup for `job.gpus` processes on each of `job.nodes` machines; unchanged for one process."""
    if job.processes == 1:
        return setup
    cores = job.machine.cpu_count
    threads = threads_per_process(cores, job.gpus)
    setup = setup.put(
        "environment.OMP_NUM_THREADS", str(threads), f"{cores} CPU threads shared by {job.gpus} processes on a machine"
    )
    setup = setup.with_notes(_memory_note(setup, job.processes))
    if job.gpus > 1:
        one = f"one machine with its {job.gpus} processes"
        setup = setup.with_notes(f"RAM and disk are counted for {one}, the GPU for one of them.")
    if job.nodes > 1:
        where = f"The output folder must be one that all {job.nodes} machines see"
        setup = setup.with_notes(f"{where}: each process saves its part of the checkpoints there.")
    return setup


def _memory_note(setup: Setup, processes: int) -> str:
    zero = setup.get("deepspeed.config", {}).get("zero_optimization", {})
    stage = zero.get("stage", 0)
    part = f"1/{processes}"
    if setup.get("arguments.fsdp"):
        place = "in RAM" if setup["arguments.fsdp_config"].get("cpu_offload") else "on the GPU"
        held = f"{part} of the weights, gradients and optimizer states {place}"
        return f"{processes} processes, one GPU each, hold: {held} (FSDP2); each trains on {part} of the batch."
    if stage == 0:
        return (
            f"{processes} processes, one GPU each: every GPU holds all weights, gradients and optimizer states, and "
            f"trains on {part} of the batch (DistributedDataParallel)."
        )
    states = _PLACE[zero.get("offload_optimizer", {}).get("device", "none")]
    weights = _PLACE[zero.get("offload_param", {}).get("device", "none")]
    held = {
        1: f"all weights and gradients on the GPU, and {part} of the optimizer states {states}",
        2: f"all weights on the GPU, and {part} of the gradients and optimizer states {states}",
        3: f"{part} of the weights {weights}, and {part} of the gradients and optimizer states {states}",
    }[stage]
    return f"{processes} processes, one GPU each, hold: {held} (ZeRO-{stage}); each trains on {part} of the batch."
