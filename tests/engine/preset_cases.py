"""What is trained to prove the presets: each case is one real training, one after the other in one process."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from hf_memkit.deepspeed.presets import load, preset_index

STEPS: Final = 4
CHECKPOINT: Final = 2


@dataclass(frozen=True)
class Case:
    """One training.

    Attributes:
        name: of the case.
        preset: the DeepSpeed preset; None: plain Trainer.
        bf16: otherwise fp32.
        accumulation: micro-batches a step.
        clips: gradients are clipped: DeepSpeed computes their norm in another order, in the last bits.
        recomputes: with activation checkpointing.
        lora: only adapters are trained.
        saves: with checkpoints and a saved model.
        resumes: goes on from the checkpoint of step 2 in a second training.
        plain: plain Trainer's case with the same batches in one process.
        exhaustive: trained with `--exhaustive` only.
    """

    name: str
    preset: str | None = None
    bf16: bool = False
    accumulation: int = 1
    clips: bool = False
    recomputes: bool = False
    lora: bool = False
    saves: bool = False
    resumes: bool = False
    plain: str = "plain"
    exhaustive: bool = False


BETWEEN: Final = ("zero3-lowest-memory", "zero3-offload-optimizer", "zero3-infinity-optimizer")
"""Presets with nothing that others have not: without `--exhaustive` they train in fp32, in one process."""


def on_cpu() -> list[str]:
    """The presets that a CPU can run."""
    return [name for name, info in preset_index().items() if info.not_on_cpu is None]


def not_on_cpu() -> list[str]:
    return [name for name, info in preset_index().items() if info.not_on_cpu is not None]


OTHER_ALGORITHM: Final = ("zero2-zenflow",)
"""Not the same losses by design."""

BF16_ONLY: Final = ("zero2-lean",)


def _same_losses() -> list[str]:
    return [name for name in on_cpu() if name not in OTHER_ALGORITHM + BF16_ONLY]


def one_process() -> list[Case]:
    """Plain Trainer first: DeepSpeed leaves a process group behind that it would join."""
    cases = [
        Case("plain", saves=True),
        Case("plain-x2", accumulation=2, clips=True),
        Case("plain-x4", accumulation=4, saves=True),
        Case("plain-bf16-x2", bf16=True, accumulation=2),
        Case("plain-lora", lora=True),
    ]
    for preset in _same_losses():
        cases.append(Case(preset, preset, saves=True, resumes=preset not in BETWEEN))
        cases.append(_bf16(preset))
    cases += [_bf16(preset) for preset in BF16_ONLY]
    for preset in ("zero2-offload", "zero3", "zero3-infinity"):
        cases.append(Case(f"{preset}-x2", preset, accumulation=2, clips=True, plain="plain-x2"))
        again = preset == "zero3"  # the others, recomputed and with adapters, go through the same two stages
        cases.append(Case(f"{preset}-recomputed", preset, recomputes=True, exhaustive=again))
        cases.append(Case(f"{preset}-lora", preset, lora=True, plain="plain-lora", exhaustive=again))
    return cases + [Case(preset, preset, bf16=True) for preset in OTHER_ALGORITHM]


def two_processes() -> list[Case]:
    resumed = ("zero2-offload", "zero3-offload")
    cases = [
        Case(
            preset, preset, accumulation=2, saves=True, resumes=preset in resumed, plain="plain-x4",
            exhaustive=preset in BETWEEN,
        )
        for preset in _same_losses()
    ]  # fmt: skip
    return cases + [Case(preset, preset, bf16=True, plain="plain-bf16-x2") for preset in BF16_ONLY]


def _bf16(preset: str) -> Case:
    return Case(
        f"{preset}-bf16-x2", preset, bf16=True, accumulation=2, plain="plain-bf16-x2",
        exhaustive=preset in BETWEEN,
    )  # fmt: skip


def small_config(preset: str, nvme_path: str) -> dict[str, Any]:
    """The preset with every buffer cut down to the tiny model, so that there are several buckets and sub-groups."""
    config = copy.deepcopy(load(preset))
    zero = config.get("zero_optimization", {})
    for section, key, value in _SMALL:
        part: dict[str, Any] = zero.get(section, {}) if section else zero
        if key in part:
            part[key] = min(part[key], value) if isinstance(part[key], int) else value
    for section in ("offload_optimizer", "offload_param"):
        if zero.get(section, {}).get("device") == "nvme":
            zero[section]["nvme_path"] = nvme_path
    return config


_SMALL: Final = (
    ("", "reduce_bucket_size", 300_000),
    ("", "allgather_bucket_size", 300_000),
    ("", "sub_group_size", 700_000),
    ("", "stage3_prefetch_bucket_size", 200_000),
    ("", "stage3_param_persistence_threshold", 1_000),
    ("", "stage3_max_live_parameters", 1_200_000),
    ("", "stage3_max_reuse_distance", 1_200_000),
    ("offload_param", "buffer_size", 600_000),
)


def with_precision(config: Mapping[str, Any], *, bf16: bool) -> dict[str, Any]:
    """`config` as Trainer fills it, for the ledger."""
    filled = copy.deepcopy(dict(config))
    for name, wanted in (("bf16", bf16), ("fp16", False)):
        if filled.get(name, {}).get("enabled") == "auto":
            filled[name]["enabled"] = wanted
    return filled
