"""What ZeRO stage 3 holds. Lines are those of deepspeed 0.19.8: runtime/zero/stage3.py, where no file is named."""

from __future__ import annotations

from hf_memkit.ledger import Row
from hf_memkit.models import ModelFacts
from hf_memkit.terms import Place
from hf_memkit.zero.settings import ZeroSettings
from hf_memkit.zero.split import ROUNDING_SOURCE, Split, page_locked, split, sub_groups
from hf_memkit.zero.stage_3_nvme import is_swapped, swapped_parameter_rows, swapped_state_rows
from hf_memkit.zero.terms import Term

__all__ = ["stage_3_rows"]

_SOURCE = "deepspeed 0.19.8: runtime/zero/stage3.py"
_COORDINATOR = "deepspeed 0.19.8: runtime/zero/partitioned_param_coordinator.py"
_PARTITION = "deepspeed 0.19.8: runtime/zero/partition_parameters.py"


def stage_3_rows(
    settings: ZeroSettings, trained: ModelFacts, frozen: ModelFacts | None, *, gpus: int, processes: int
) -> tuple[Row, ...]:
    """Rows of one card and of one machine with `gpus` processes; some are of 0 bytes."""
    parts = split(trained, processes)
    return (
        *_parameters(settings, trained, parts, frozen, gpus=gpus),
        *_gradients(settings, trained, parts, gpus=gpus),
        *_states(settings, parts, gpus=gpus),
        *_rounding(settings, parts, gpus=gpus),
    )


def _parameters(
    settings: ZeroSettings, trained: ModelFacts, parts: Split, frozen: ModelFacts | None, *, gpus: int
) -> list[Row]:
    element, share = settings.element_bytes, parts.share
    offload = settings.parameters
    of_both = (trained,) if frozen is None else (trained, frozen)
    elements, largest = sum(each.parameters for each in of_both), max(each.largest_parameter for each in of_both)
    persistent = sum(size for each in of_both for size in each.sizes if size <= settings.persistent_elements)
    rows = []
    if offload.device == "none":
        rows.append(Term.WEIGHT_PARTITION.row("device", element * share, f"{_SOURCE} 972: lp_param_buffer"))
    frozen_parts = None if frozen is None else split(frozen, parts.processes)
    if frozen_parts is not None:
        place: Place = "device" if offload.device == "none" else "pinned" if offload.pin_memory else "host"
        count = 1 if offload.device == "none" else gpus
        shares = [share for group in frozen_parts.shares for share in group]
        kept = [each for each in shares if offload.device != "nvme" or not is_swapped(settings, element * each)]
        rows.append(
            Term.FROZEN_WEIGHT_PARTITION.row(
                place, count * element * sum(kept), f"{_PARTITION}: ds_tensor; only what is trained is flattened"
            )
        )
    # One process that keeps its weights on the card gathers nothing: its partition is the parameter.
    gathers = parts.processes > 1 or offload.device != "none"
    if gathers:
        # The module that computes is gathered whatever the limit is.
        live = min(elements, max(settings.live_elements, largest))
        rows += [
            Term.SMALL_PARAMETERS.row(
                "device", element * persistent, f"{_COORDINATOR}: stage3_param_persistence_threshold"
            ),
            Term.LIVE_PARAMETERS.row(
                "device", element * live, f"{_COORDINATOR} 453: stage3_max_live_parameters, prefetched ones included"
            ),
        ]
    if parts.processes > 1 and not settings.sequential:
        bucket = min(elements, max(settings.prefetch_elements, largest))
        rows.append(
            Term.ALL_GATHER_BUFFER.row(
                "device",
                element * bucket,
                f"{_PARTITION} 1343, 795: gathered flat, then copied out; stage3_prefetch_bucket_size",
            )
        )
    secondary = min(settings.secondary_partition, parts.processes)
    if settings.secondary_partition > 1:
        rows.append(
            Term.SECONDARY_PARTITION.row(
                "device", element * elements // secondary, f"{_PARTITION}: zero_hpz_partition_size"
            )
        )
    if offload.device == "cpu":
        rows.append(
            Term.WEIGHT_PARTITION.row(
                "pinned", gpus * element * share, f"{_SOURCE} 906: page-locked whatever pin_memory says"
            )
        )
    elif offload.device == "nvme":
        rows += swapped_parameter_rows(settings, trained, parts, frozen, frozen_parts, gpus=gpus)
    return rows


def _gradients(settings: ZeroSettings, trained: ModelFacts, parts: Split, *, gpus: int) -> list[Row]:
    element = settings.element_bytes
    partition = settings.accumulator_bytes * parts.share
    term, source = Term.FLAT_GRADIENT_PARTITION, f"{_SOURCE} 791, 4 bytes with grad_accum_dtype fp32"
    rows = [
        Term.LARGEST_GRADIENT.row(
            "device", element * trained.largest_parameter, f"{_SOURCE}: a gradient before it is reduced", "backward"
        ),
        Term.GRADIENT_BUCKET.row(
            "device",
            settings.buckets * element * settings.bucket_elements,
            f"{_SOURCE} 782: reduce_bucket_size, held from the start",
        ),
    ]
    if settings.optimizer.device == "none":
        return [*rows, term.row("device", partition, source)]
    place: Place = "pinned" if settings.optimizer.pin_memory else "host"
    return [*rows, term.row(place, gpus * partition, source)]


def _states(settings: ZeroSettings, parts: Split, *, gpus: int) -> list[Row]:
    """Master weights, moments and fp32 gradients, of the sub-groups on the card, in RAM and on disk."""
    master, moments = settings.master_bytes, 2 * settings.moment_bytes
    groups = [sum(parts.shares[g][i] for g, i in group) for group in sub_groups(parts, settings.sub_group_elements)]
    offload = settings.optimizer
    if offload.device == "none":
        return [
            # In fp32 too: DeepSpeed would take the weights themselves, but compares a torch.device with a string.
            Term.MASTER_WEIGHTS.row("device", master * sum(groups), f"{_SOURCE} 1166"),
            Term.MOMENTS.row("device", moments * sum(groups), "Adam: exp_avg and exp_avg_sq"),
            Term.FLATTENED_GRADIENTS.row(
                "device", settings.accumulator_bytes * max(groups), f"{_SOURCE} 2686: of one sub-group", "optimizer"
            ),
            Term.CONVERTED_GRADIENTS.row(
                "device",
                master * max(groups) if settings.accumulator_bytes != master else 0,
                f"{_SOURCE} 2687: of one sub-group",
                "optimizer",
            ),
        ]
    first = int((1 - offload.ratio) * len(groups)) if not settings.swaps_optimizer else 0
    on_card, offloaded = sum(groups[:first]), groups[first:]
    rows = [
        Term.STATES_KEPT_BY_RATIO.row(
            "device", (master + moments + master) * on_card, f"{_SOURCE} 1105: the first (1 - ratio) of the sub-groups"
        ),
    ]
    place: Place = "pinned" if offload.pin_memory else "host"
    if settings.swaps_optimizer:
        rows += swapped_state_rows(settings, parts, gpus=gpus)
        offloaded = [size for size in offloaded if not is_swapped(settings, master * size)]
    total = sum(offloaded)
    return [
        *rows,
        Term.FP32_MASTER_WEIGHTS.row("host", gpus * master * total, f"{_SOURCE} 1156"),
        Term.FP32_MOMENTS.row("host", gpus * moments * total, "DeepSpeedCPUAdam: two"),
        Term.FP32_GRADIENTS.row(place, gpus * master * total, f"{_SOURCE} 1338: a buffer a sub-group"),
    ]


def _rounding(settings: ZeroSettings, parts: Split, *, gpus: int) -> list[Row]:
    """What torch's pinned allocator adds. Swap buffers are locked by DeepSpeed itself, to the byte."""
    blocks = []
    if settings.optimizer.device != "none" and settings.optimizer.pin_memory:
        blocks.append(settings.accumulator_bytes * parts.share)
        if not settings.swaps_optimizer:
            groups = sub_groups(parts, settings.sub_group_elements)
            blocks += [settings.master_bytes * sum(parts.shares[g][i] for g, i in group) for group in groups]
    if settings.parameters.device == "cpu":
        blocks += [settings.element_bytes * sum(shares) for shares in parts.shares]
    wasted = sum(page_locked(block) - block for block in blocks)
    return [Term.PINNED_ROUNDING.row("pinned", gpus * wasted, ROUNDING_SOURCE)]
