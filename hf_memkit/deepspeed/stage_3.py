"""Memory of ZeRO stage 3; with ZeRO-Infinity also on disk, and in the page-locked buffers between disk and RAM.

Numbers in sources are lines of deepspeed 0.19.8: runtime/zero/stage3.py, unless another file is named."""

from __future__ import annotations

from typing import Final

from hf_memkit.catalog.models import ModelFacts
from hf_memkit.common.terms import Place
from hf_memkit.common.units import MIB
from hf_memkit.deepspeed.engine_terms import Term
from hf_memkit.deepspeed.settings import ZeroSettings
from hf_memkit.deepspeed.split import Split, aligned, rounding_row, split, sub_groups
from hf_memkit.setup.ledger import Row

_SOURCE = "deepspeed 0.19.8: runtime/zero/stage3.py"
_COORDINATOR = "deepspeed 0.19.8: runtime/zero/partitioned_param_coordinator.py"
_SWAP = "deepspeed 0.19.8: runtime/swap_tensor"
_PARTITION = "deepspeed 0.19.8: runtime/zero/partition_parameters.py"


def stage_3_rows(
    settings: ZeroSettings,
    trained: ModelFacts,
    frozen: ModelFacts | None,
    *,
    gpus: int,
    processes: int,
    linear_elements: int = 0,
) -> tuple[Row, ...]:
    """Rows of memory; some have 0 bytes. `device` rows are of one GPU, `host`, `pinned` and `disk` rows of one machine
    with `gpus` processes. `linear_elements`: elements of the weights of linear layers."""
    parts = split(trained, processes)
    rows = [
        *_parameters(settings, trained, parts, frozen, gpus=gpus, linear_elements=linear_elements),
        *_gradients(settings, trained, parts, gpus=gpus),
        *_states(settings, parts, gpus=gpus),
        _rounding(settings, parts, gpus=gpus),
    ]
    if settings.gathers_to_save:  # rank 0 gathers the trained weights; with adapters only these
        source = "deepspeed 0.19.8: runtime/engine.py 5631, _zero3_consolidated_16bit_state_dict"
        rows.append(Term.SAVED_WEIGHTS.row("host", settings.element_bytes * trained.parameters, source, "save"))
    return tuple(rows)


def _parameters(
    settings: ZeroSettings,
    trained: ModelFacts,
    parts: Split,
    frozen: ModelFacts | None,
    *,
    gpus: int,
    linear_elements: int,
) -> list[Row]:
    element_bytes = settings.element_bytes
    offload = settings.parameters
    models = (trained,) if frozen is None else (trained, frozen)
    elements = sum(item.parameters for item in models)
    largest = max(item.largest_parameter for item in models)
    persistent = sum(size for item in models for size in item.sizes if size <= settings.persistent_elements)
    rows = []
    if offload.device == "none":
        source = f"{_SOURCE} 972: lp_param_buffer"
        rows.append(Term.WEIGHT_PARTITION.row("device", element_bytes * parts.share, source))
    frozen_parts = None if frozen is None else split(frozen, parts.processes)
    if frozen_parts is not None:
        place: Place = "device"
        count = 1
        if offload.device != "none":
            place = "pinned" if offload.pin_memory else "host"
            count = gpus
        shares = [share for group in frozen_parts.shares for share in group]
        kept = [item for item in shares if offload.device != "nvme" or not is_swapped(settings, element_bytes * item)]
        source = f"{_PARTITION}: ds_tensor; only trained parameters are flattened"
        rows.append(Term.FROZEN_WEIGHT_PARTITION.row(place, count * element_bytes * sum(kept), source))
    # One process that keeps its weights on the GPU gathers nothing: its partition is the parameter.
    gathers = parts.processes > 1 or offload.device != "none"
    if gathers:
        # At least the largest parameter is gathered, even above the limit.
        live = min(elements, max(settings.live_elements, largest))
        source = f"{_COORDINATOR}: stage3_param_persistence_threshold"
        rows.append(Term.SMALL_PARAMETERS.row("device", element_bytes * persistent, source))
        source = f"{_COORDINATOR} 453: stage3_max_live_parameters, prefetched ones included"
        rows.append(Term.LIVE_PARAMETERS.row("device", element_bytes * live, source))
    if gathers and not settings.memory_efficient_linears:
        # torch's linear layer saves the transposed weight, a view that keeps the gathered weight.
        source = "deepspeed 0.19.8: runtime/zero/linear.py: memory_efficient_linear"
        rows.append(Term.HELD_WEIGHTS.row("device", element_bytes * linear_elements, source))
    if parts.processes > 1 and not settings.sequential:
        bucket = min(elements, max(settings.prefetch_elements, largest))
        source = f"{_PARTITION} 1343, 795: gathered flat, then copied out; stage3_prefetch_bucket_size"
        rows.append(Term.ALL_GATHER_BUFFER.row("device", element_bytes * bucket, source))
    if settings.secondary_partition > 1:
        size = element_bytes * elements // min(settings.secondary_partition, parts.processes)
        rows.append(Term.SECONDARY_PARTITION.row("device", size, f"{_PARTITION}: zero_hpz_partition_size"))
    if offload.device == "cpu":
        source = f"{_SOURCE} 906: page-locked, also without pin_memory"
        rows.append(Term.WEIGHT_PARTITION.row("pinned", gpus * element_bytes * parts.share, source))
    elif offload.device == "nvme":
        rows += _swapped_parameters(settings, trained, parts, frozen, frozen_parts, gpus=gpus)
    return rows


def _gradients(settings: ZeroSettings, trained: ModelFacts, parts: Split, *, gpus: int) -> list[Row]:
    element_bytes = settings.element_bytes
    partition = settings.accumulator_bytes * parts.share
    bucket = element_bytes * settings.bucket_elements
    place: Place = "device"
    if settings.optimizer.device != "none":
        place, partition = "pinned" if settings.optimizer.pin_memory else "host", gpus * partition
    largest = element_bytes * trained.largest_parameter
    return [
        Term.LARGEST_GRADIENT.row("device", largest, f"{_SOURCE}: a gradient before it is reduced", "backward"),
        Term.GRADIENT_BUCKET.row(
            "device", settings.buckets * bucket, f"{_SOURCE} 782: reduce_bucket_size, held from the start"
        ),
        Term.FLAT_GRADIENT_PARTITION.row(place, partition, f"{_SOURCE} 791, 4 bytes with grad_accum_dtype fp32"),
    ]


def _states(settings: ZeroSettings, parts: Split, *, gpus: int) -> list[Row]:
    """Master weights, moments and fp32 gradients, of the sub-groups on the GPU, in RAM and on disk."""
    master_bytes, moments_bytes = settings.master_bytes, 2 * settings.moment_bytes
    groups = [sum(parts.shares[g][i] for g, i in group) for group in sub_groups(parts, settings.sub_group_elements)]
    offload = settings.optimizer
    if offload.device == "none":
        converted = master_bytes * max(groups) if settings.accumulator_bytes != master_bytes else 0
        return [
            # Also when training in fp32: DeepSpeed means to reuse the weights then, but its check compares a
            # torch.device with a string, so it always copies.
            Term.MASTER_WEIGHTS.row("device", master_bytes * sum(groups), f"{_SOURCE} 1166"),
            Term.MOMENTS.row("device", moments_bytes * sum(groups), "Adam: exp_avg and exp_avg_sq"),
            Term.FLATTENED_GRADIENTS.row(
                "device", settings.accumulator_bytes * max(groups), f"{_SOURCE} 2686: of one sub-group", "optimizer"
            ),
            Term.CONVERTED_GRADIENTS.row("device", converted, f"{_SOURCE} 2687: of one sub-group", "optimizer"),
        ]
    first = int((1 - offload.ratio) * len(groups)) if not settings.swaps_optimizer else 0
    on_gpu, offloaded = (2 * master_bytes + moments_bytes) * sum(groups[:first]), groups[first:]
    source = f"{_SOURCE} 1105: the first (1 - ratio) of the sub-groups"
    rows = [Term.STATES_KEPT_BY_RATIO.row("device", on_gpu, source)]
    place: Place = "pinned" if offload.pin_memory else "host"
    if settings.swaps_optimizer:
        rows += _swapped_states(settings, parts, gpus=gpus)
        offloaded = [size for size in offloaded if not is_swapped(settings, master_bytes * size)]
    total = sum(offloaded)
    return [
        *rows,
        Term.FP32_MASTER_WEIGHTS.row("host", gpus * master_bytes * total, f"{_SOURCE} 1156"),
        Term.FP32_MOMENTS.row("host", gpus * moments_bytes * total, "DeepSpeedCPUAdam: two"),
        Term.FP32_GRADIENTS.row(place, gpus * master_bytes * total, f"{_SOURCE} 1338: a buffer a sub-group"),
    ]


def _rounding(settings: ZeroSettings, parts: Split, *, gpus: int) -> Row:
    """Rounding by torch's pinned allocator, which allocates these buffers; DeepSpeed locks the swap buffers itself."""
    blocks = []
    if settings.optimizer.device != "none" and settings.optimizer.pin_memory:
        blocks.append(settings.accumulator_bytes * parts.share)
        if not settings.swaps_optimizer:
            groups = sub_groups(parts, settings.sub_group_elements)
            blocks += [settings.master_bytes * sum(parts.shares[g][i] for g, i in group) for group in groups]
    if settings.parameters.device == "cpu":
        blocks += [settings.element_bytes * sum(shares) for shares in parts.shares]
    return rounding_row(gpus * blocks)  # each process allocates its own list of blocks


SWAP_BUFFERS: Final = (Term.OPTIMIZER_SWAP_BUFFERS, Term.PARAMETER_SWAP_BUFFERS, Term.PARAMETER_WRITE_BACK_BUFFER)
"""Terms of the page-locked buffers that DeepSpeed locks itself, with mlock (csrc/pin_memory/page_alloc.cpp)."""

_MIN_SWAPPED_BYTES: Final = 1 << 20  # MIN_AIO_BYTES, runtime/swap_tensor/utils.py
_ALIGNED_BYTES: Final = 1024  # AIO_ALIGNED_BYTES, there too


def is_swapped(settings: ZeroSettings, size_bytes: int) -> bool:
    """Whether a tensor of this size goes to disk: smaller ones stay in RAM."""
    return size_bytes >= max(_MIN_SWAPPED_BYTES, settings.aio_block_bytes)


def _below_limit(settings: ZeroSettings) -> str:
    """`"below 1 MiB"`: the size of tensors that stay in RAM."""
    return f"below {max(_MIN_SWAPPED_BYTES, settings.aio_block_bytes) / MIB:g} MiB"


def _aligned(settings: ZeroSettings, elements: int, element_bytes: int) -> int:
    """Bytes on disk or in a swap buffer of a tensor with so many elements (`_io_aligned_numel` rounds them up)."""
    return element_bytes * aligned(elements, _ALIGNED_BYTES * settings.aio_parallelism // element_bytes)


def _swapped_parameters(
    settings: ZeroSettings,
    model: ModelFacts,
    parts: Split,
    frozen: ModelFacts | None,
    frozen_parts: Split | None,
    *,
    gpus: int,
) -> list[Row]:
    """Rows of `offload_param` on NVMe, of one machine. `model`: the trained parameters."""
    element_bytes, offload = settings.element_bytes, settings.parameters
    kept = min(offload.max_in_cpu, parts.share)
    sizes = [share for shares in parts.shares for share in shares]
    tied = -(-model.tied // parts.processes)
    frozen_shares = [share for shares in frozen_parts.shares for share in shares] if frozen_parts is not None else []
    frozen_shares += [-(-frozen.tied // parts.processes)] if frozen is not None else []
    written = [size for size in (*sizes, tied, *frozen_shares) if is_swapped(settings, element_bytes * size)]
    on_disk = sum(_aligned(settings, size, element_bytes) for size in written)
    small = sum(element_bytes * size for size in sizes if not is_swapped(settings, element_bytes * size))
    buffers = offload.buffer_count * _aligned(settings, offload.buffer_elements, element_bytes)
    # The write-back buffer has room for whole parameters, not for their shares.
    groups = sub_groups(parts, settings.sub_group_elements)
    largest = max(groups, key=lambda group: sum(parts.shares[g][i] for g, i in group))
    write_back = 0
    if kept < parts.share:
        write_back = sum(_aligned(settings, model.groups[g][i], element_bytes) for g, i in largest)
    swapper, whole = f"{_SWAP}/partitioned_param_swapper.py", "the largest sub-group's whole parameters"
    twice = "tied ones twice, because they are split before they are tied"
    small_place: Place = "pinned" if offload.pin_memory else "host"
    return [
        Term.WEIGHTS_IN_RAM.row(
            "pinned", gpus * element_bytes * kept, "deepspeed 0.19.8: runtime/zero/stage3.py 899: max_in_cpu"
        ),
        Term.SMALL_WEIGHTS.row(small_place, gpus * small, f"{_SWAP}/utils.py: {_below_limit(settings)}"),
        Term.PARAMETER_SWAP_BUFFERS.row("pinned", gpus * buffers, f"{swapper} 122: buffer_count × buffer_size"),
        Term.PARAMETER_WRITE_BACK_BUFFER.row("pinned", gpus * write_back, f"{swapper} 393: {whole}"),
        Term.WEIGHTS.row("disk", gpus * on_disk, f"{swapper}; {twice}"),
    ]


def _swapped_states(settings: ZeroSettings, parts: Split, *, gpus: int) -> list[Row]:
    """Rows of `offload_optimizer` on NVMe, of one machine: the sub-groups large enough for the disk."""
    master_bytes, moments_bytes = settings.master_bytes, 2 * settings.moment_bytes
    by_group = [[parts.shares[g][i] for g, i in group] for group in sub_groups(parts, settings.sub_group_elements)]
    swapped = [group for group in by_group if is_swapped(settings, master_bytes * sum(group))]
    buffers = settings.optimizer.buffer_count * _aligned(settings, max(map(sum, by_group)), master_bytes)
    state_bytes = master_bytes + moments_bytes
    states = sum(_aligned(settings, sum(group), master_bytes) * state_bytes // master_bytes for group in swapped)
    gradients = [share for group in swapped for share in group]
    small = sum(share for share in gradients if not is_swapped(settings, master_bytes * share))
    # Without a conversion, small gradients are parts of the flat gradient partition.
    copied = small if settings.accumulator_bytes != master_bytes else 0
    buffers_source = f"{_SWAP}/utils.py 192: buffer_count × the largest sub-group × {master_bytes} bytes"
    small_source = f"{_SWAP}/optimizer_utils.py: {_below_limit(settings)} a parameter"
    return [
        Term.OPTIMIZER_SWAP_BUFFERS.row("pinned", gpus * buffers, buffers_source),
        Term.SMALL_GRADIENTS.row("host", gpus * master_bytes * copied, small_source, "backward"),
        Term.STATES.row("disk", gpus * states, f"{_SWAP}/optimizer_utils.py"),
        Term.GRADIENTS.row("disk", gpus * master_bytes * (sum(gradients) - small), f"{_SWAP}/optimizer_utils.py 104"),
    ]
