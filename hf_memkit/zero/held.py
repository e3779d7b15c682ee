"""What a live DeepSpeed engine holds, by the terms of the ledger: the other side of every formula.

Only reads attributes of deepspeed 0.19.8's ZeRO optimizers.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import Tensor

from hf_memkit.terms import Place

__all__ = ["held_bytes", "swapped_bytes"]

Held = dict[tuple[Place, str], int]


def held_bytes(engine: Any) -> Held:
    """Bytes of this process by (place, term), as `zero_ledger` names them.

    What the forward and backward pass hold only meanwhile (live parameters, single gradients) is not in it. On a CPU
    nothing is really page-locked, and device and host are the same memory: places are those that a GPU would have.
    """
    zero = engine.optimizer
    if hasattr(zero, "single_partition_of_fp32_groups"):
        return _stages_1_2(zero)
    if hasattr(zero, "fp32_partitioned_groups_flat"):
        return _stage_3(zero, engine.module)
    return {}


def swapped_bytes(folder: Path) -> dict[str, int]:
    """Bytes of ZeRO-Infinity's files under `nvme_path`, by the ledger's terms."""
    found = {"master weights and moments": 0, "gradients": 0, "weights": 0}
    for file in (folder / "zero_stage_3").rglob("*.swp"):
        size = file.stat().st_size
        if "optimizer" not in file.parts:
            found["weights"] += size
        else:
            found["gradients" if "_gradient_" in file.name else "master weights and moments"] += size
    return found


def _bytes(tensors: Iterable[Any]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors if isinstance(tensor, Tensor))


def _moments(optimizer: Any) -> int:
    """Adam's two moments, wherever they are in memory."""
    states = getattr(optimizer, "state", {}).values()
    return _bytes(state.get(name) for state in states for name in ("exp_avg", "exp_avg_sq"))


def _states(masters: list[Tensor], optimizer: Any, *, offloaded: bool, place: Place, grad_place: Place) -> Held:
    if not offloaded:
        return {
            ("device", "master weights"): _bytes(masters),
            ("device", "moments"): _moments(optimizer),
        }
    return {
        (place, "fp32 master weights"): _bytes(masters),
        (grad_place, "fp32 gradients"): _bytes(master.grad for master in masters),
        ("host", "fp32 moments"): _moments(optimizer),
    }


def _stages_1_2(zero: Any) -> Held:
    masters = zero.single_partition_of_fp32_groups
    place: Place = "pinned" if getattr(zero, "cpu_offload_pin_memory", False) else "host"
    held = {
        ("device", "weights, flat"): _bytes(zero.bit16_groups_flat),
        **_states(masters, zero.optimizer, offloaded=bool(zero.cpu_offload), place=place, grad_place=place),
    }
    if zero.cpu_offload:
        held |= {
            (place, "16-bit staging"): _bytes(zero.param_buffer_of_bit16_for_cpu_offload_groups),
            (place, "16-bit accumulators"): _bytes(zero.accumulated_grads_in_cpu.values()),
            (place, "gradient from the card"): _bytes([zero.temp_grad_buffer_for_cpu_offload]),
            ("device", "gradient on its way to the host"): _bytes([zero.temp_grad_buffer_for_gpu_offload]),
        }
    return held


def _stage_3(zero: Any, module: Any) -> Held:
    masters = zero.fp32_partitioned_groups_flat
    place: Place = "pinned" if zero.offload_optimizer_pin_memory else "host"
    held = {
        ("device", "gradient bucket"): _bytes(bucket.buffer for bucket in zero.ipg_buckets.values()),
        (place if zero.offload_optimizer else "device", "flat gradient partition"): _bytes(
            [zero.grad_partitions_flat_buffer]
        ),
        **_states(masters, zero.optimizer, offloaded=bool(zero.offload_optimizer), place="host", grad_place=place),
    }
    if not zero.offload_param:
        held["device", "weight partition"] = _bytes([getattr(zero, "lp_param_buffer", None)])
    else:
        kept = "weights kept in RAM" if zero.params_in_nvme_and_cpu else "weight partition"
        # A buffer of one element stands for a group that is on disk.
        held["pinned", kept] = _bytes(b for b in zero.param_groups_fp16_flat_cpu_memory if b.numel() > 1)
    if zero.optimizer_swapper is not None:
        held["pinned", "optimizer swap buffers"] = _bytes(zero.optimizer_swapper.swap_buffer_manager.all_buffers)
    swapper = next((p.nvme_swapper for p in module.parameters() if getattr(p, "nvme_swapper", None)), None)
    if swapper is not None:
        held["pinned", "parameter swap buffers"] = _bytes([swapper.buffers])
        held["pinned", "parameter write-back buffer"] = _bytes([swapper.partitioned_swap_buffer])
    return held
