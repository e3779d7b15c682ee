"""Presets: named sets of techniques.

A preset is a tuple of techniques, applied in order to an empty setup. A recipe's variants are presets with that
recipe's values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from hf_memkit.errors import InputError, did_you_mean
from hf_memkit.job import Job, process_row, weight_rows
from hf_memkit.ledger import Row
from hf_memkit.techniques import allocator, checkpointing, lora, optimizers, precision
from hf_memkit.training_setup import TrainingSetup
from hf_memkit.units import format_gib
from hf_memkit.zero import presets as zero

__all__ = ["PRESETS", "Preset", "apply_preset", "find_preset"]

Technique = Callable[[TrainingSetup, Job], TrainingSetup]


@dataclass(frozen=True, slots=True)
class Preset:
    """A named set of techniques.

    Attributes:
        summary: one line.
        techniques: applied in this order.
        checkpoint_bytes_per_parameter: what one checkpoint takes on disk (weights, optimizer states and, with
            DeepSpeed, its own copy of the weights).
        packages: what must be installed beyond the core dependencies.
        values: names and types of what a recipe's variant may give to the techniques.
    """

    summary: str
    techniques: tuple[Technique, ...]
    checkpoint_bytes_per_parameter: float
    packages: tuple[str, ...] = ()
    values: Mapping[str, type] = field(default_factory=dict)


def _all_weights_trained(setup: TrainingSetup, job: Job) -> TrainingSetup:
    """Ledger of full training with everything on the card."""
    loading = Row("host", "weights", "16-bit weights while loading", 2 * job.model.parameters, "read on the CPU first")
    return setup.with_rows(*weight_rows(job, job.model.parameters), loading, process_row())


def _process(setup: TrainingSetup, job: Job) -> TrainingSetup:
    return setup.with_rows(process_row())


PRESETS: Final[dict[str, Preset]] = {
    "resident": Preset(
        "all on the card: bf16 weights, 8-bit AdamW with stochastic rounding, activation checkpointing",
        (
            precision.pure_bf16,
            _all_weights_trained,
            optimizers.adamw_8bit_stochastic,
            checkpointing.every_layer,
            allocator.expandable_segments,
        ),
        checkpoint_bytes_per_parameter=2 + 2.04,
        packages=("torchao",),
    ),
    "offload": Preset(
        "ZeRO-2 with the optimizer in RAM (ZeRO-Offload), activation checkpointing",
        (
            precision.half_weights_in_deepspeed,
            zero.zero2_offload,
            checkpointing.every_layer,
            allocator.expandable_segments,
        ),
        checkpoint_bytes_per_parameter=2 + 2 + 12,
    ),
    "infinity": Preset(
        "ZeRO-3 with optimizer and parameters on NVMe (ZeRO-Infinity), activation checkpointing",
        (
            precision.half_weights_in_deepspeed,
            zero.zero3_infinity,
            checkpointing.every_layer,
            allocator.expandable_segments,
        ),
        checkpoint_bytes_per_parameter=2 + 2 + 12,
    ),
    "lora": Preset(
        "LoRA adapters only, frozen 16-bit weights, activation checkpointing",
        (
            precision.autocast_over_half_weights,
            lora.lora,
            checkpointing.every_layer,
            allocator.expandable_segments,
            _process,
        ),
        checkpoint_bytes_per_parameter=0.2,  # adapters only
        values={"rank": int, "alpha": int, "dropout": float},
    ),
}


def find_preset(name: str) -> Preset:
    """The preset called `name`.

    Raises:
        InputError: there is none.
    """
    if name not in PRESETS:
        raise InputError(f"unknown preset {name!r}{did_you_mean(name, PRESETS)}; known: {', '.join(PRESETS)}")
    return PRESETS[name]


def apply_preset(name: str, job: Job) -> TrainingSetup:
    """The preset resolved for `job`. What the machine lacks for it is in the setup's `problems`.

    Raises:
        InputError: there is no such preset.
    """
    setup = TrainingSetup(preset=name)
    for technique in find_preset(name).techniques:
        setup = technique(setup, job)
    return setup.with_problems(_shortages(setup, job))


def _shortages(setup: TrainingSetup, job: Job) -> list[str]:
    """One line for each of card, RAM and disk that has less than the ledger asks for."""
    machine, gpu = job.machine, job.machine.gpu
    found = []
    device_bytes = setup.ledger.total_bytes("device")
    if gpu is not None and device_bytes > gpu.usable_bytes:
        found.append(
            f"needs {format_gib(device_bytes)} on the card by formula; {gpu.name} leaves "
            f"{format_gib(gpu.usable_bytes)} after its context"
        )
    ram_bytes = setup.ledger.total_bytes("host", "pinned")
    if ram_bytes > machine.ram_bytes:
        found.append(
            f"needs {format_gib(ram_bytes)} of RAM by formula; this machine has {format_gib(machine.ram_bytes)}"
        )
    disk_bytes = setup.ledger.total_bytes("disk")
    if disk_bytes > machine.disk_free_bytes:
        found.append(
            f"needs {format_gib(disk_bytes)} of disk by formula; {machine.disk_path} has "
            f"{format_gib(machine.disk_free_bytes)} free"
        )
    return found
