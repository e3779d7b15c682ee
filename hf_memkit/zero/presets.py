"""DeepSpeed presets as techniques: the JSON of `ds_configs/`, sized for one model and machine, with its ledger."""

from __future__ import annotations

import json
from typing import Any

from hf_memkit import resources
from hf_memkit.job import Job, process_row
from hf_memkit.ledger import Row
from hf_memkit.terms import Place
from hf_memkit.training_setup import TrainingSetup
from hf_memkit.units import GB, format_gib

__all__ = ["load", "zero2_offload", "zero3_infinity"]

_STAGE12 = "deepspeed 0.19.8: runtime/zero/stage_1_and_2.py"
_STAGE3 = "deepspeed 0.19.8: runtime/zero/stage3.py"


def load(name: str) -> dict[str, Any]:
    """The DeepSpeed preset `name` as it stands in `ds_configs/`.

    Raises:
        InputError: there is no such preset.
    """
    config: dict[str, Any] = json.loads(resources.find("ds_configs", name).read_text(encoding="utf-8"))
    return config


def _power_of_two(size_bytes: int) -> int:
    """What torch's pinned allocator takes for a block (torch:aten/src/ATen/core/CachingHostAllocator.h)."""
    return 1 << (size_bytes - 1).bit_length()


def _with_config(setup: TrainingSetup, name: str, config: dict[str, Any], why: str) -> TrainingSetup:
    return setup.put("deepspeed.preset", name, why).put("deepspeed.config", config, f"ds_configs/{name}.json, sized")


def zero2_offload(setup: TrainingSetup, job: Job) -> TrainingSetup:
    """ZeRO-2 with the optimizer on the CPU (ZeRO-Offload, Ren et al. 2021, arXiv 2101.06840).

    Saves the gradients and all optimizer states on the card: 16-bit weights and two buckets stay. Costs 20 bytes a
    parameter of RAM (18 without accumulation) and the time of an AdamW step on the CPU and of the transfers. Not for
    machines with little RAM; large accumulation makes the slow step rarer.
    """
    config = load("zero2-offload")
    zero = config["zero_optimization"]
    n = job.model.parameters
    pinned_bytes = _power_of_two(4 * n) * 2 + _power_of_two(2 * n)
    pageable_bytes = 10 * n + process_row().size_bytes
    pin = pinned_bytes + pageable_bytes <= job.machine.ram_bytes
    zero["offload_optimizer"]["pin_memory"] = pin
    place: Place = "pinned" if pin else "host"
    size = _power_of_two if pin else int
    bucket_bytes = 2 * int(zero["reduce_bucket_size"]) * (2 if zero["overlap_comm"] else 1)
    setup = (
        _with_config(setup, "zero2-offload", config, "optimizer states and gradients live in RAM, not on the card")
        .put(
            "arguments.optim",
            "adamw_torch",
            "accelerate swaps it for DeepSpeedCPUAdam (accelerate:utils/deepspeed.py), which steps on the CPU and "
            "keeps Trainer's groups without weight decay, as an optimizer in the JSON would not",
        )
        .with_rows(
            Row(
                "device",
                "weights",
                "16-bit weights",
                2 * n,
                "2 bytes a parameter, ZeRO-2 does not split them on one card",
            ),
            Row(
                "device", "gradients", "largest gradient", 2 * job.model.largest_parameter, f"{_STAGE12}, extra large"
            ),
            Row(
                "device",
                "buffers",
                "gradient buckets",
                bucket_bytes,
                f"{_STAGE12}: reduce_bucket_size × 2, twice with overlap_comm",
            ),
            Row(place, "optimizer", "fp32 master weights", size(4 * n), f"{_STAGE12} 564-576"),
            Row(place, "gradients", "fp32 gradients", size(4 * n), f"{_STAGE12} 564-576"),
            Row("host", "optimizer", "fp32 moments", 8 * n, "DeepSpeedCPUAdam, 2 × 4 bytes"),
            Row(place, "buffers", "16-bit staging", size(2 * n), f"{_STAGE12} 940"),
            Row("host", "gradients", "16-bit accumulators", 2 * n, f"{_STAGE12} 1825, with accumulation"),
            process_row(),
        )
    )
    with_pinning = format_gib(pinned_bytes + pageable_bytes)
    return setup.with_notes(
        f"ZeRO-Offload keeps 20 bytes a parameter in RAM (18 without accumulation): {format_gib(20 * n)}",
        f"pin_memory is on: blocks of page-locked RAM round up to powers of two, {with_pinning} in all"
        if pin
        else f"pin_memory is off: with its rounding to powers of two it would take {with_pinning} of RAM; "
        f"transfers are slower without it",
    )


def zero3_infinity(setup: TrainingSetup, job: Job) -> TrainingSetup:
    """ZeRO-3 with optimizer states and parameters on NVMe (ZeRO-Infinity, Rajbhandari et al. 2021, arXiv 2104.07857).

    Saves nearly everything on the card and in RAM: buckets, live parameters and staging buffers stay. Costs about 18
    bytes a parameter of disk, 12 bytes a parameter written at every step (an SSD wears), and much time. Only where
    neither card nor RAM holds the states.
    """
    config = load("zero3-infinity")
    zero = config["zero_optimization"]
    n, largest = job.model.parameters, job.model.largest_parameter
    for part in ("offload_optimizer", "offload_param"):
        zero[part]["nvme_path"] = job.nvme_path
    buffer_size = max(int(zero["offload_param"]["buffer_size"]), largest)
    zero["offload_param"]["buffer_size"] = buffer_size
    sub_group = max(min(int(zero["sub_group_size"]), n), largest)
    zero["sub_group_size"] = sub_group
    live = max(int(zero["stage3_max_live_parameters"]), 2 * largest)
    zero["stage3_max_live_parameters"] = zero["stage3_max_reuse_distance"] = live
    threshold = int(zero["stage3_param_persistence_threshold"])
    persistent = sum(size for size in job.model.sizes if size <= threshold)
    optimizer_buffers = 4 * sub_group * int(zero["offload_optimizer"]["buffer_count"])
    parameter_buffers = 2 * buffer_size * int(zero["offload_param"]["buffer_count"])
    return (
        _with_config(
            setup, "zero3-infinity", config, "states and weights live on disk, pieces of them in RAM and on the card"
        )
        .put("arguments.optim", "adamw_torch", "accelerate swaps it for DeepSpeedCPUAdam, which steps on the CPU")
        .with_rows(
            Row(
                "device",
                "weights",
                "small parameters, never split",
                2 * persistent,
                f"{_STAGE3}: stage3_param_persistence_threshold",
            ),
            Row("device", "buffers", "live parameters", 2 * live, f"{_STAGE3}: stage3_max_live_parameters × 2"),
            Row(
                "device",
                "buffers",
                "prefetched parameters",
                2 * int(zero["stage3_prefetch_bucket_size"]),
                f"{_STAGE3}: stage3_prefetch_bucket_size × 2",
            ),
            Row(
                "device",
                "buffers",
                "gradient bucket",
                2 * int(zero["reduce_bucket_size"]),
                f"{_STAGE3}: reduce_bucket_size × 2",
            ),
            Row(
                "pinned",
                "gradients",
                "flat 16-bit gradient partition",
                _power_of_two(2 * n),
                f"{_STAGE3} 791, rounded to a power of two",
            ),
            Row(
                "pinned",
                "buffers",
                "optimizer swap buffers",
                _power_of_two(optimizer_buffers),
                "buffer_count × 4 bytes × sub_group_size, rounded",
            ),
            Row(
                "pinned",
                "buffers",
                "parameter swap buffers",
                _power_of_two(parameter_buffers),
                "buffer_count × 2 bytes × buffer_size, rounded",
            ),
            process_row(),
            Row("disk", "optimizer", "fp32 master weights and moments", 12 * n, "12 bytes a parameter"),
            Row("disk", "gradients", "fp32 gradients", 4 * n, "4 bytes a parameter"),
            Row("disk", "weights", "16-bit weights", 2 * n, "2 bytes a parameter"),
        )
        .with_notes(
            f"About {12 * n / GB:.1f} GB are written to {job.nvme_path} at every optimizer step (12 bytes a "
            f"parameter, by formula): count that against the disk's endurance, and every step waits for it."
        )
    )
