"""Memory of ZeRO stages 0 to 2, also with ZenFlow. Lines are of deepspeed 0.19.8: runtime/zero/stage_1_and_2.py."""

from __future__ import annotations

from collections.abc import Sequence

from hf_memkit.catalog.models import ModelFacts
from hf_memkit.common.terms import Place
from hf_memkit.deepspeed.engine_terms import Term
from hf_memkit.deepspeed.settings import ZeroSettings
from hf_memkit.deepspeed.split import Split, rounding_row, split
from hf_memkit.setup.ledger import Row

_SOURCE = "deepspeed 0.19.8: runtime/zero/stage_1_and_2.py"
_ZENFLOW = "deepspeed 0.19.8: runtime/zenflow/zenflow_utils.py"

SHARED_BYTES = 16
"""Bytes a parameter in /dev/shm: master weights, a stale copy, two buffers of gradients (zenflow_utils.py 157-164)."""


def stage_1_2_rows(
    settings: ZeroSettings,
    model: ModelFacts,
    frozen: ModelFacts | None,
    *,
    gpus: int,
    processes: int,
    accumulation: bool,
) -> tuple[Row, ...]:
    """Rows of one GPU and of one machine with `gpus` processes, some of 0 bytes. `model`: the trained parameters."""
    parts = split(model, processes)
    flat = settings.element_bytes * sum(parts.flat_groups)
    rows = [Term.FLAT_WEIGHTS.row("device", flat, f"{_SOURCE} 493: whole on every GPU")]
    if frozen is not None:
        size = settings.element_bytes * frozen.parameters
        source = "deepspeed 0.19.8: runtime/engine.py: the module is cast whole; only trained parameters are flat"
        rows.append(Term.FROZEN_WEIGHTS.row("device", size, source))
    rows += _gpu_gradients(settings, model, parts, accumulation=accumulation)
    if settings.buckets:
        size = settings.buckets * settings.bucket_elements * settings.element_bytes
        source = f"{_SOURCE} 3266: reduce_bucket_size, twice with overlap_comm, for any size of the model"
        rows.append(Term.GRADIENT_BUCKETS.row("device", size, source, "backward"))
        if parts.processes > 1:
            elements = min(max(settings.bucket_elements, model.largest_parameter), model.parameters)
            source = f"{_SOURCE} 2365: gradients that several processes own are copied to be reduced"
            rows.append(Term.FLATTENED_BUCKET.row("device", settings.element_bytes * elements, source, "backward"))
    if (settings.optimizer_type or "").lower().startswith("onebit"):
        errors = 4 * model.parameters + 4 * model.parameters // parts.processes
        source = "deepspeed 0.19.6: runtime/fp16/onebit/adam.py 179: worker_error, server_error"
        rows.append(Term.ERROR_FEEDBACK.row("device", errors, source))
    # Elements of each group's optimizer states on one process; stage 0 does not split them.
    shares = parts.flat_shares if settings.stage else parts.flat_groups
    if settings.optimizer.device == "none":
        return (*rows, *_states_on_gpu(settings, shares))
    if settings.zenflow_overlap:
        return (*rows, *_zenflow_rows(settings, model, sum(parts.flat_shares), gpus=gpus))
    # Low-precision gradients are accumulated in place; others in a buffer each for the parameters of each process.
    accumulators = _owned(model, parts, gpus) if accumulation and settings.master_bytes == 4 else ()
    return (*rows, *_states_on_host(settings, model, shares, accumulators, gpus=gpus))


def _gpu_gradients(settings: ZeroSettings, model: ModelFacts, parts: Split, *, accumulation: bool) -> list[Row]:
    element, largest = settings.element_bytes, settings.element_bytes * model.largest_parameter
    offloaded = settings.optimizer.device != "none"
    rows = []
    if settings.stage < 2:
        rows.append(Term.GRADIENTS.row("device", element * model.parameters, f"{_SOURCE} 1245: until the step"))
        if settings.accumulator_bytes != element and not offloaded:
            accumulators = settings.accumulator_bytes * model.parameters
            rows.append(Term.GRADIENT_ACCUMULATORS.row("device", accumulators, "grad_accum_dtype, not split"))
    else:
        source = f"{_SOURCE} 1449: a gradient before it is reduced"
        rows.append(Term.LARGEST_GRADIENT.row("device", largest, source, "backward"))
        if not offloaded:
            compact = settings.accumulator_bytes == 4 > element  # 1270: flat, to the element
            elements = sum(parts.flat_shares) if compact else _largest_touched(model, parts)
            share = settings.accumulator_bytes * elements
            rows.append(Term.GRADIENT_PARTITION.row("device", share, f"{_SOURCE} 1270, 2187: whole parameters"))
            if accumulation and not compact:
                source = f"{_SOURCE} 1042: from the second micro-batch on, added when it ends"
                rows.append(Term.GRADIENT_PARTITION_AGAIN.row("device", share, source, "backward"))
    if offloaded:
        source = f"{_SOURCE} 659: temp_grad_buffer_for_gpu_offload"
        rows.append(Term.OUTGOING_GRADIENT.row("device", largest, source))
        source = f"{_SOURCE} 1886: of the largest piece of a parameter that a process owns"
        # In the optimizer's phase: the embedding's, the largest, comes last, when loss and activations are freed.
        rows.append(Term.FP64_GRADIENT.row("device", 8 * _largest_piece(model, parts), source, "optimizer"))
    return rows


def _largest_touched(model: ModelFacts, parts: Split) -> int:
    """Elements of the parameters that one process owns any part of, for the process with the most."""
    elements = [0] * parts.processes
    for group, share in zip(model.groups, parts.flat_shares, strict=True):
        start = 0
        for size in group:
            for process in range(start // share, (start + size - 1) // share + 1):
                elements[process] += size
            start += size
    return max(elements)


def _largest_piece(model: ModelFacts, parts: Split) -> int:
    """Maximum elements of one parameter that one process owns."""
    largest = 0
    for group, share in zip(model.groups, parts.flat_shares, strict=True):
        start = 0
        for size in group:
            first = min(size, share - start % share)
            largest = max(largest, first, min(size - first, share))
            start += size
    return largest


def _states_on_gpu(settings: ZeroSettings, shares: Sequence[int]) -> list[Row]:
    total, largest = sum(shares), max(shares)
    rows = [Term.MOMENTS.row("device", 2 * settings.moment_bytes * total, "Adam: exp_avg and exp_avg_sq")]
    if settings.stage == 0 and settings.element_bytes == 4:  # deepspeed 0.19.8: runtime/engine.py 2313
        return rows  # the optimizer steps on the weights themselves
    rows.insert(0, Term.MASTER_WEIGHTS.row("device", settings.master_bytes * total, f"{_SOURCE} 560"))
    if settings.stage == 2 and settings.accumulator_bytes == 4 > settings.element_bytes:
        return rows  # 2904: gradients were accumulated flat, in the master's type
    source = f"{_SOURCE} 3114: of the largest parameter group"
    rows.append(Term.FLATTENED_GRADIENTS.row("device", settings.accumulator_bytes * largest, source, "optimizer"))
    if settings.accumulator_bytes != settings.master_bytes:
        source = f"{_SOURCE} 3118: of the largest parameter group"
        rows.append(Term.CONVERTED_GRADIENTS.row("device", settings.master_bytes * largest, source, "optimizer"))
    return rows


def _states_on_host(
    settings: ZeroSettings, model: ModelFacts, shares: Sequence[int], accumulators: Sequence[int], *, gpus: int
) -> list[Row]:
    place: Place = "pinned" if settings.optimizer.pin_memory else "host"
    element, master = settings.element_bytes, settings.master_bytes
    total, largest = sum(shares), model.largest_parameter
    rows = [
        Term.FP32_MASTER_WEIGHTS.row(place, gpus * master * total, f"{_SOURCE} 560"),
        Term.FP32_GRADIENTS.row(place, gpus * master * total, f"{_SOURCE} 937"),
        Term.FP32_MOMENTS.row("host", gpus * 2 * settings.moment_bytes * total, "DeepSpeedCPUAdam: two"),
        Term.STAGING.row(place, gpus * element * total, f"{_SOURCE} 567"),
        Term.HOST_ACCUMULATORS.row(
            place, element * sum(accumulators), f"{_SOURCE} 1824, with accumulation: a buffer a parameter"
        ),
        Term.INCOMING_GRADIENT.row(place, gpus * element * largest, f"{_SOURCE} 653"),
    ]
    if settings.optimizer.pin_memory:
        blocks = [size * width for size in shares for width in (master, master, element)] + [element * largest]
        rows.append(rounding_row(gpus * blocks + [element * size for size in accumulators]))
    return rows


def _owned(model: ModelFacts, parts: Split, gpus: int) -> tuple[int, ...]:
    """Elements of the parameters that overlap a process's share, for all processes of the machine with the most."""
    largest: tuple[int, ...] = ()
    for machine in range(parts.processes // gpus):
        owned = []
        for process in range(machine * gpus, (machine + 1) * gpus):
            for group, share in zip(model.groups, parts.flat_shares, strict=True):
                start = 0
                for size in group:
                    if start < (process + 1) * share and start + size > process * share:
                        owned.append(size)
                    start += size
        if sum(owned) > sum(largest):
            largest = tuple(owned)
    return largest


def _zenflow_rows(settings: ZeroSettings, model: ModelFacts, share: int, *, gpus: int) -> list[Row]:
    """Memory of ZenFlow with its step in a separate process (`overlap_step`; Lan et al. 2025, arXiv 2505.12242):
    tensors of both processes are in shared memory, /dev/shm. Rows of one GPU and of one machine with `gpus` processes,
    each with a share of `share` elements."""
    element, largest = settings.element_bytes, model.largest_parameter
    place: Place = "pinned" if settings.optimizer.pin_memory else "host"
    selected = int(2 * 4 * settings.zenflow_share * model.parameters)
    return [
        Term.SELECTED_MOMENTS.row(
            "device", selected, "deepspeed 0.19.8: ops/adam/zenflow_torch_adam.py: 8 bytes × topk_ratio"
        ),
        Term.SHARED_MASTER_WEIGHTS.row("host", gpus * 4 * share, f"{_ZENFLOW} 159"),
        Term.STALE_MASTER_WEIGHTS.row("host", gpus * 4 * share, f"{_ZENFLOW} 161"),
        Term.SHARED_GRADIENTS.row("host", gpus * 8 * share, f"{_ZENFLOW} 163"),
        Term.MOMENTS_TWICE.row("host", gpus * 16 * share, f"{_ZENFLOW} 125: in the step's process"),
        Term.STAGING.row(place, gpus * element * share, f"{_SOURCE} 567"),
        Term.INCOMING_GRADIENT.row(place, gpus * element * largest, f"{_SOURCE} 653"),
    ]
