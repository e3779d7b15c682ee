"""DeepSpeed presets as techniques: sized for the job, with their ledger and the optimizer that goes with them."""

from __future__ import annotations

from hf_memkit.job import PROCESS_BYTES, Job, process_row
from hf_memkit.technique import technique
from hf_memkit.training_setup import TrainingSetup
from hf_memkit.units import GB, format_size
from hf_memkit.zero.presets import load
from hf_memkit.zero.sizing import size_preset

__all__ = ["zero2_offload", "zero3_infinity"]

_WHY_ADAMW = (
    "accelerate swaps it for DeepSpeedCPUAdam (accelerate:utils/deepspeed.py), which steps on the CPU and keeps "
    "Trainer's groups without weight decay, as an optimizer in the JSON would not"
)


@technique(
    "zero2-offload",
    family="offload",
    slot="engine",
    saves="the gradients and all optimizer states on the card: 16-bit weights and two buckets stay",
    costs="about 20 bytes a parameter of RAM (18 without accumulation), an AdamW step on the CPU, and the transfers",
    not_when="the machine has little RAM",
)
def zero2_offload(setup: TrainingSetup, job: Job) -> TrainingSetup:
    """ZeRO-2 with the optimizer on the CPU (ZeRO-Offload, Ren et al. 2021, arXiv 2101.06840).

    Saves the gradients and all optimizer states on the card: 16-bit weights and two buckets stay. Costs about 20 bytes
    a parameter of RAM (18 without accumulation) and the time of an AdamW step on the CPU and of the transfers. Not for
    machines with little RAM; large accumulation makes the slow step rarer.
    """
    setup = _with_preset(setup, job, "zero2-offload", "optimizer states and gradients live in RAM, not on the card")
    if job.model is None:
        return setup
    held = setup.ledger.total_bytes("host", "pinned") - job.gpus * PROCESS_BYTES
    return setup.with_notes(
        f"ZeRO-Offload keeps gradients and optimizer states in RAM: {format_size(held)} by formula with their "
        f"buffers, besides what the processes take"
    )


@technique(
    "zero3-infinity",
    family="offload",
    slot="engine",
    saves="nearly everything on the card and in RAM: buckets, live parameters and staging buffers stay",
    costs="about 18 bytes a parameter of disk, 12 of them written at every step (an SSD wears), and much time",
    not_when="card or RAM hold the states",
)
def zero3_infinity(setup: TrainingSetup, job: Job) -> TrainingSetup:
    """ZeRO-3 with optimizer states and parameters on NVMe (ZeRO-Infinity, Rajbhandari et al. 2021, arXiv 2104.07857).

    Saves nearly everything on the card and in RAM: buckets, live parameters and staging buffers stay. Costs about 18
    bytes a parameter of disk, 12 bytes a parameter written at every step (an SSD wears), and much time. Only where
    neither card nor RAM holds the states.
    """
    setup = _with_preset(setup, job, "zero3-infinity", "states and weights live on disk, pieces of them elsewhere")
    if job.model is None:
        return setup
    written = 12 * job.model.parameters / job.nodes
    return setup.with_notes(
        f"About {written / GB:.1f} GB are written to {job.nvme_path} at every optimizer step (12 bytes a parameter, "
        f"by formula): count that against the disk's endurance, and every step waits for it."
    )


def _with_preset(setup: TrainingSetup, job: Job, name: str, why: str) -> TrainingSetup:
    if job.model is None:
        setup = setup.put("deepspeed.preset", name, why)
        setup = setup.put("deepspeed.config", load(name), f"ds_configs/{name}.json, its constants: no model was named")
        return setup.put("arguments.optim", "adamw_torch", _WHY_ADAMW)
    sized = size_preset(
        name, job.model, job.machine, nvme_path=job.nvme_path, gpus=job.gpus, nodes=job.nodes,
        accumulation=job.accumulation > 1,
    )  # fmt: skip
    setup = setup.put("deepspeed.preset", name, why)
    setup = setup.put("deepspeed.config", sized.config, f"ds_configs/{name}.json, sized")
    choices = [choice.to_json() for choice in sized.choices]
    setup = setup.put("deepspeed.sizes", choices, "what was computed for this model and machine, and why")
    setup = setup.put("arguments.optim", "adamw_torch", _WHY_ADAMW)
    return setup.with_rows(*sized.ledger.rows, process_row(job.gpus)).with_notes(*sized.notes)
