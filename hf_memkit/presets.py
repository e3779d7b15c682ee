"""Presets: named sets of techniques.

A preset is a tuple of techniques, applied in order to an empty setup. A recipe's variants are presets with that
recipe's values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from hf_memkit.errors import InputError, did_you_mean
from hf_memkit.job import Job, process_row, shortages, weight_rows
from hf_memkit.ledger import Row
from hf_memkit.techniques import allocator, checkpointing, lora, optimizers, precision, replicas
from hf_memkit.training_setup import TrainingSetup
from hf_memkit.zero import techniques as zero

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
    loading = Row(
        "host", "weights", "16-bit weights while loading", 2 * job.model.parameters * job.gpus, "read on the CPU first"
    )  # fmt: skip
    return setup.with_rows(*weight_rows(job, job.model.parameters), loading, process_row(job.gpus))


def _process(setup: TrainingSetup, job: Job) -> TrainingSetup:
    return setup.with_rows(process_row(job.gpus))


PRESETS: Final[dict[str, Preset]] = {
    "resident": Preset(
        "all on the card: bf16 weights, 8-bit AdamW with stochastic rounding, activation checkpointing",
        (
            precision.pure_bf16,
            _all_weights_trained,
            replicas.data_parallel,
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
            replicas.data_parallel,
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
    return setup.with_problems(shortages(setup.ledger, job.machine))
