"""Tensors of a live DeepSpeed engine by the ledger's terms (`Term`), to compare with its formulas. Only reads
attributes of deepspeed 0.19.8's ZeRO optimizers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.nn import Module

from hf_memkit.common.terms import Place
from hf_memkit.deepspeed.engine_terms import Term

Tensors = dict[tuple[Place, Term], Any]  # (place, term) → tensors, in any nesting of lists and dictionaries


def engine_tensors(zero: Any, module: Module) -> dict[tuple[Place, Term], list[Tensor]]:
    """The tensors of DeepSpeed's optimizer and the model by (place, term) as in `zero_ledger`; empty for other
    optimizers. Tensors that exist only during forward and backward (live parameters, single gradients) are not
    included. On a CPU nothing is really page-locked: places are those of a GPU run."""
    parameters = list(module.parameters())
    tensors: Tensors = {}
    if hasattr(zero, "single_partition_of_fp32_groups"):
        tensors = _stages_1_2(zero, parameters)
    elif hasattr(zero, "fp32_partitioned_groups_flat"):
        tensors = _stage_3(zero, parameters)
    return {term: list(_flat(nested)) for term, nested in tensors.items()}


def swapped_bytes(folder: Path, rank: int | None = None) -> dict[Term, int]:
    """Bytes of ZeRO-Infinity's files under `nvme_path`, by the ledger's terms: of one process, or of all."""
    sizes = {Term.STATES: 0, Term.GRADIENTS: 0, Term.WEIGHTS: 0}
    for file in folder.glob(f"zero_stage_3/*/rank{'*' if rank is None else rank}/*.swp"):
        size = file.stat().st_size
        if file.parent.parent.name != "optimizer":
            sizes[Term.WEIGHTS] += size
        else:
            sizes[Term.GRADIENTS if "_gradient_" in file.name else Term.STATES] += size
    return sizes


def _flat(tensors: Any) -> Iterator[Tensor]:
    if isinstance(tensors, Tensor):
        yield tensors
    elif isinstance(tensors, Mapping):
        yield from _flat(tensors.values())
    elif isinstance(tensors, Iterable):
        for item in tensors:
            yield from _flat(item)


def _moments(optimizer: Any) -> list[Tensor]:
    """Adam's two moments, in any place of memory."""
    return [state[name] for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq") if name in state]


def _stages_1_2(zero: Any, parameters: list[Any]) -> Tensors:
    masters = zero.single_partition_of_fp32_groups
    tensors: Tensors = {
        ("device", Term.FLAT_WEIGHTS): zero.bit16_groups_flat,
        ("device", Term.FROZEN_WEIGHTS): [parameter for parameter in parameters if not parameter.requires_grad],
        ("device", Term.GRADIENT_BUCKETS): [bucket.buffer for bucket in zero.ipg_buckets.values()],
    }
    if not zero.cpu_offload:
        if zero.partition_gradients:
            tensors["device", Term.GRADIENT_PARTITION] = [zero.averaged_gradients, zero.all_grad_tensors]
        tensors["device", Term.MASTER_WEIGHTS] = masters
        tensors["device", Term.MOMENTS] = _moments(zero.optimizer)
        return tensors
    place: Place = "pinned" if zero.cpu_offload_pin_memory else "host"
    tensors |= {
        ("device", Term.OUTGOING_GRADIENT): zero.temp_grad_buffer_for_gpu_offload,
        (place, Term.STAGING): zero.param_buffer_of_bit16_for_cpu_offload_groups,
        (place, Term.HOST_ACCUMULATORS): zero.accumulated_grads_in_cpu,
        (place, Term.INCOMING_GRADIENT): zero.temp_grad_buffer_for_cpu_offload,
    }
    if hasattr(masters[0], "overlap_grad"):  # ZenFlow; its moments lie in another process
        return tensors | {
            ("host", Term.SHARED_MASTER_WEIGHTS): masters,
            ("host", Term.STALE_MASTER_WEIGHTS): [getattr(master, "stale_param", ()) for master in masters],
            ("host", Term.SHARED_GRADIENTS): [master.overlap_grad for master in masters],
        }
    return tensors | {
        (place, Term.FP32_MASTER_WEIGHTS): masters,
        (place, Term.FP32_GRADIENTS): [master.grad for master in masters if master.grad is not None],
        ("host", Term.FP32_MOMENTS): _moments(zero.optimizer),
    }


def _stage_3(zero: Any, parameters: list[Any]) -> Tensors:
    masters, moments = zero.fp32_partitioned_groups_flat, _moments(zero.optimizer)
    place: Place = "pinned" if zero.offload_optimizer_pin_memory else "host"
    tensors = _stage_3_weights(zero, parameters)
    tensors["device", Term.GRADIENT_BUCKET] = [bucket.buffer for bucket in zero.ipg_buckets.values()]
    if not zero.offload_optimizer:
        tensors["device", Term.FLAT_GRADIENT_PARTITION] = zero.grad_partitions_flat_buffer
        return tensors | {("device", Term.MASTER_WEIGHTS): masters, ("device", Term.MOMENTS): moments}
    tensors[place, Term.FLAT_GRADIENT_PARTITION] = zero.grad_partitions_flat_buffer
    if zero.swap_optimizer:
        # Before the states: in a step, states from disk lie in these buffers.
        swapper = zero.optimizer_swapper
        tensors["pinned", Term.OPTIMIZER_SWAP_BUFFERS] = swapper.swap_buffer_manager.all_buffers
        pieces = [info.unswapped_gradients for info in swapper.swap_params_info.values()]
        tensors["host", Term.SMALL_GRADIENTS] = pieces
    return tensors | {
        ("host", Term.FP32_MASTER_WEIGHTS): masters,
        ("host", Term.FP32_MOMENTS): moments,
        (place, Term.FP32_GRADIENTS): [master.grad for master in masters if master.grad is not None],
    }


def _stage_3_weights(zero: Any, parameters: list[Any]) -> Tensors:
    frozen = [parameter.ds_tensor for parameter in parameters if not parameter.requires_grad]
    if not zero.offload_param:
        return {
            ("device", Term.FROZEN_WEIGHT_PARTITION): frozen,
            ("device", Term.WEIGHT_PARTITION): zero.lp_param_buffer,
        }
    place: Place = "pinned" if zero.offload_param_pin_memory else "host"
    tensors: Tensors = {(place, Term.FROZEN_WEIGHT_PARTITION): frozen}
    # A buffer of one element represents a group that is on disk.
    flat = [buffer for buffer in zero.param_groups_fp16_flat_cpu_memory if buffer.numel() > 1]
    if not zero.params_in_nvme_and_cpu:
        return tensors | {("pinned", Term.WEIGHT_PARTITION): flat}
    swapper = parameters[0].nvme_swapper
    return tensors | {
        ("pinned", Term.PARAMETER_SWAP_BUFFERS): swapper.buffers,
        ("pinned", Term.PARAMETER_WRITE_BACK_BUFFER): swapper.partitioned_swap_buffer,
        ("pinned", Term.WEIGHTS_IN_RAM): flat,
        (place, Term.SMALL_WEIGHTS): [
            parameter.ds_tensor for parameter in parameters if not swapper.swappable_tensor(param=parameter)
        ],
    }
