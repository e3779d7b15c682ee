"""DeepSpeed presets as techniques: sized for the job, with their ledger and optimizer.

Their rows stand in `hf_memkit/setup/techniques/offload.py`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from hf_memkit.catalog.adapter_layers import adapter_tensors
from hf_memkit.common.units import GB, format_size
from hf_memkit.deepspeed.presets import load
from hf_memkit.deepspeed.sizing import size_preset
from hf_memkit.setup.job import PROCESS_BYTES, process_row
from hf_memkit.setup.setup import Setup
from hf_memkit.setup.techniques.registry import applies

_PCIE_GB_S: Final = 32.0  # in one direction (PCI-SIG: PCI Express 4.0, 16 GT/s a lane, 16 lanes)

_DISK_GB_S: Final = 8.0  # in one direction, 4 lanes: the maximum of an NVMe disk of that generation

_WHY_CPU_ADAM: Final = (
    "accelerate swaps it for DeepSpeedCPUAdam (accelerate:utils/deepspeed.py), which steps on the CPU and keeps "
    "Trainer's groups without weight decay, as an optimizer in the JSON would not"
)

_WHY_TRAINERS: Final = (
    "Trainer's, which keeps its groups without weight decay, as an optimizer in the JSON would not; it steps on "
    "DeepSpeed's fp32 master weights"
)


@applies("zero2-offload")
def zero2_offload(setup: Setup) -> Setup:
    """ZeRO-2 with the optimizer on the CPU (ZeRO-Offload, Ren et al. 2021, arXiv 2101.06840): about 20 bytes a
    parameter of RAM (18 without accumulation). Large accumulation makes the slow step rarer."""
    job = setup.resolved_for
    setup = _with_preset(setup, "zero2-offload", "optimizer states and gradients live in RAM, not on the GPU")
    if job.model is None:
        return setup
    held = setup.ledger.total_bytes("host", "pinned") - job.gpus * PROCESS_BYTES
    return setup.with_notes(
        f"ZeRO-Offload keeps gradients and optimizer states in RAM: {format_size(held)} by formula with their "
        f"buffers, in addition to the processes' RAM"
    )


@applies("zero3")
def zero3(setup: Setup) -> Setup:
    """ZeRO-3: everything is split between the GPUs (Rajbhandari et al. 2020, arXiv 1910.02054). With adapters the
    frozen weights are split too, and gradients and states belong to the adapters."""
    if setup.resolved_for.processes == 1:
        setup = setup.with_notes("ZeRO-3 on one GPU splits nothing. Give several (--gpus), or choose another engine.")
    return _with_preset(setup, "zero3", "weights, gradients and optimizer states are split between the GPUs")


@applies("zero3-offload")
def zero3_offload(setup: Setup) -> Setup:
    """ZeRO-3 with weights, gradients and optimizer states in RAM (Rajbhandari et al. 2021, arXiv 2104.07857): about 20
    bytes a parameter. All weights cross the bus in every forward and backward; with `zero2-offload` once a step."""
    setup = _with_preset(setup, "zero3-offload", "weights and states live in RAM, the layers in use on the GPU")
    return setup if setup.resolved_for.model is None else setup.with_notes(_minimum_step_time(setup))


@applies("zero3-infinity")
def zero3_infinity(setup: Setup) -> Setup:
    """ZeRO-3 with optimizer states and parameters on NVMe (ZeRO-Infinity, Rajbhandari et al. 2021, arXiv 2104.07857):
    about 18 bytes a parameter of disk, 12 of them written at every step (an SSD wears)."""
    job = setup.resolved_for
    setup = _with_preset(setup, "zero3-infinity", "states and weights live on disk, pieces of them elsewhere")
    if job.model is None:
        return setup
    written = 12 * job.model.parameters / job.nodes
    return setup.with_notes(
        f"About {written / GB:.1f} GB are written to {job.nvme_path} at every optimizer step (12 bytes a parameter, "
        f"by formula): the disk wears, and each step waits for it at least {written / GB / _DISK_GB_S:.1f} s at "
        f"{_DISK_GB_S:.0f} GB/s, the published bandwidth of PCIe 4.0 × 4. To measure the disk: "
        f"`memkit doctor --nvme-path DIR`."
    )


def _minimum_step_time(setup: Setup) -> str:
    """Minimum time of a step's transfers over the bus, computed and not measured. A micro-batch reads the weights in
    forward and in backward. Weights that may stay gathered (`stage3_max_live_parameters`) count as never moved."""
    job = setup.resolved_for
    assert job.model is not None
    live = int(setup["deepspeed.config"]["zero_optimization"]["stage3_max_live_parameters"])
    moved = 2 * 2 * max(0, job.model.parameters - live) / job.processes * job.accumulation
    return (
        f"A step takes at least {moved / GB / _PCIE_GB_S:.1f} s, by formula and not measured: {moved / GB:.0f} GB of "
        f"weights go from RAM to each GPU (16 bits, twice in each of {job.accumulation} micro-batches), at "
        f"{_PCIE_GB_S:.0f} GB/s, the published bandwidth of PCIe 4.0 × 16; the AdamW step on the CPU comes on top."
    )


def _why_adamw(config: Mapping[str, Any]) -> str:
    offloaded = "offload_optimizer" in config["zero_optimization"]
    return _WHY_CPU_ADAM if offloaded else _WHY_TRAINERS


def _with_preset(setup: Setup, name: str, why: str) -> Setup:
    job = setup.resolved_for
    if job.model is None:
        setup = setup.put("deepspeed.preset", name, why)
        config = load(name, job.nvme_path)
        setup = setup.put("deepspeed.config", config, f"ds_configs/{name}.json, its constants: no model was named")
        return setup.put("arguments.optim", "adamw_torch", _why_adamw(config))
    sized = size_preset(
        name, job.model, job.machine, nvme_path=job.nvme_path, gpus=job.gpus, nodes=job.nodes,
        accumulation=job.accumulation > 1, adapters=adapter_tensors(job.model, setup.section("adapter")),
    )  # fmt: skip
    setup = setup.put("deepspeed.preset", name, why)
    setup = setup.put("deepspeed.config", sized.config, f"ds_configs/{name}.json, sized")
    choices = [choice.to_json() for choice in sized.choices]
    setup = setup.put("deepspeed.sizes", choices, "sizes computed for this model and machine, with reasons")
    setup = setup.put("arguments.optim", "adamw_torch", _why_adamw(sized.config))
    return setup.with_rows(*sized.ledger.rows, process_row(job.gpus)).with_notes(*sized.notes)
