"""Functions for rows of the catalogue, by the row's name, where the row's data are not enough.

`WHEN`: whether advice proposes the row. `ADAPTED`: the row as a change to a job without records. `ESTIMATES`: the row
as a change with its saving, from a record.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

from hf_memkit.catalog.library_versions import is_on, name_in_version
from hf_memkit.catalog.liger_support import LIGER_OPTIONS
from hf_memkit.catalog.optimizers import OPTIMIZERS, find_optimizer, paged_form
from hf_memkit.common.terms import Category
from hf_memkit.common.units import GIB
from hf_memkit.measuring.out_of_memory.change import Change
from hf_memkit.measuring.out_of_memory.device_tools import allocator_variable, tools_of
from hf_memkit.measuring.out_of_memory.failed_job import FailedJob
from hf_memkit.measuring.out_of_memory.other_names import LENGTHS, MAP_PROCESSES, PIXELS
from hf_memkit.measuring.out_of_memory.run_view import ACTIVATION_PHASES, STATES_PHASES, RunView
from hf_memkit.setup.techniques.registry import CATALOGUE

Adapt = Callable[[FailedJob, Change], Change | None]

_STATES_BYTES: Final = OPTIMIZERS["adamw_torch"].states.bytes_a_parameter
_EIGHT_BIT_BYTES: Final = OPTIMIZERS["adamw_bnb_8bit"].states.bytes_a_parameter

_OFFLOADED_BYTES: Final = 20
"""Maximum bytes of RAM a parameter with ZeRO-Offload: fp32 weight, gradient and two moments, 16-bit copy, accumulated
16-bit gradient (deepspeed 0.19.8: runtime/zero/stage_1_and_2.py; `memkit ds show zero2-offload --model …`)."""

_FIRST: Final = 1e6
"""GiB, so that a change that removes the cause at almost no cost comes before all others."""

_ONE_ARRAY: Final = 16 * GIB
"""A larger single request is itself the cause: it takes half of a small machine's RAM."""

_SYNC: Final = ", and set accelerator_config: {gradient_accumulation_kwargs: {sync_each_batch: true}}"
_MOST_MAPS: Final = 8
"""Maximum processes of a `map` to propose: each holds its rows and a copy of the tokenizer."""


def _small_states(failed: FailedJob) -> bool:
    return find_optimizer(failed.job.optim).bits == 8 or failed.trace.library in ("bitsandbytes", "torchao")


def _shows_offload(failed: FailedJob) -> bool:
    """Whether offloaded states may fill RAM."""
    if failed.offloads_to_disk or failed.resumes or failed.uses("offload"):
        return failed.uses("offload") and not failed.offloads_to_disk and not failed.resumes
    unreadable = failed.uses("DeepSpeed") and isinstance(failed.argument("deepspeed"), str)
    no_deepspeed = failed.platform == "Windows" or failed.message.form in ("windows-commit", "notebook")
    return not no_deepspeed and (unreadable or not failed.job.arguments)


def _trains(failed: FailedJob) -> bool:
    return failed.trace.phase != "evaluate"


def _is_new(failed: FailedJob) -> bool:
    return not failed.resumes


def _may_have_liger(failed: FailedJob) -> bool:
    kind = failed.trace.model_type or failed.job.run.get("model_type")
    return _trains(failed) and (kind in LIGER_OPTIONS or (kind is None and not failed.ranked))


WHEN: Final[Mapping[str, Callable[[FailedJob], object]]] = {
    "liger": _may_have_liger,
    "chunked-loss": _trains,
    "newer-trl": _trains,
    "adamw-fused": lambda failed: failed.job.optim in ("", "adamw_torch"),
    # Other optimizers (Adafactor, LOMO, SGD) hold less than 8-bit AdamW, or are another algorithm.
    "adamw-8bit": lambda failed: (
        _is_new(failed)
        and not _small_states(failed)
        and (failed.job.optim or "adamw").lower().startswith("adamw")
    ),
    # Managed memory fails on Windows and WSL2.
    "paged-adamw-8bit": lambda failed: (
        _is_new(failed) and _small_states(failed) and failed.platform not in ("Windows", "WSL2")
    ),
    "unpaged-states": _is_new,
    "lora": _is_new,
    "zero2-offload": _is_new,
    "zero3-offload-optimizer": _is_new,
    "zero3-infinity-optimizer": _shows_offload,
    # Frames show bitsandbytes' weights, most likely in 4 bit.
    "qlora": lambda failed: not failed.uses("quantized weights") or failed.argument("load_in_8bit"),
    "layers-over-gpus": lambda failed: failed.message.device_type != "mps",
    "zero3-offload": lambda failed: failed.message.device_type != "mps",
    "one-rank-loads": lambda failed: (
        not is_on(failed.job.fsdp_setting("cpu_ram_efficient_loading"))
        and (failed.uses("FSDP") if failed.message.memory == "device" else not failed.uses("DeepSpeed", "ZeRO-3"))
    ),
    "fsdp-reshard": lambda failed: failed.job.keeps_gathered_layers,
    "fsdp-sync-each-batch": lambda failed: failed.job.keeps_whole_gradient(),
    "pageable-states": lambda failed: failed.uses("DeepSpeed") or not failed.job.arguments,
    "fresh-optimizer": lambda failed: failed.resumes,
    "zero3-shards": lambda failed: failed.trace.library == "DeepSpeed" or failed.uses("ZeRO-3"),
    "fsdp-shards": lambda failed: (
        (failed.trace.library == "FSDP" or failed.uses("FSDP"))
        and not WHEN["zero3-shards"](failed)
        and failed.job.fsdp_setting("state_dict_type") != "sharded_state_dict"
    ),
    # transformers 5.23: trainer.py, "not compatible with FSDP state dict type"
    "save-only-model": lambda failed: failed.job.fsdp_setting("state_dict_type") != "sharded_state_dict",
    "fewer-checkpoints": lambda failed: failed.job.count("save_total_limit") not in (0, 1),
    "fewer-workers": lambda failed: (
        failed.job.count("dataloader_num_workers") != 0
        and (failed.ranked or failed.trace.phase or (failed.message.requested_bytes or 0) < _ONE_ARRAY)
    ),
    "fewer-map-processes": lambda failed: not failed.recorded,
    "smaller-map-batches": lambda failed: not failed.recorded,
    "streamed-data": lambda failed: not failed.recorded,
    "other-processes": lambda failed: tools_of(failed.message.device_type).processes,
    # Not if the remedies of the cause contain it, nor for managed memory.
    "more-ram": lambda failed: (
        not failed.message.in_cgroup and failed.message.form not in ("kubernetes-node", "bitsandbytes-managed")
    ),
    "more-ram-for-wsl": lambda failed: failed.platform in (None, "WSL2"),
}  # fmt: skip
"""Whether advice proposes a row; other rows have no condition beyond their data."""


def smaller_batch(job: RunView, most: float | None = None) -> Change | None:
    """The next smaller divisor of the micro-batch, at most `most`; None for one sample, or if it is unknown."""
    samples = job.count("per_device_train_batch_size")
    if job.argument("auto_find_batch_size") and "samples" in job.moment:
        samples = job.moment["samples"]
    if samples is None or samples < 2:
        return None
    parts = [samples // factor for factor in range(2, samples + 1) if samples % factor == 0]
    smaller = next((part for part in parts if most is None or part <= most), parts[-1])
    factor = samples // smaller
    steps = job.count("gradient_accumulation_steps")
    name = job.names.get("gradient_accumulation_steps", "gradient_accumulation_steps")
    more = f"set {name} {steps} → {steps * factor} too" if steps else f"multiply {name} by {factor}"
    reason = f"{more}, so that a step sees the same samples"
    if job.keeps_whole_gradient(factor) and not job.keeps_whole_gradient():
        reason += _SYNC
    return replace(Change.of(CATALOGUE["global-batch"]), value=smaller, reason=reason, current=samples)


def _batch(failed: FailedJob, change: Change) -> Change | None:
    if failed.samples is None:
        change = replace(change, value="smaller") if failed.larger_by > 1 else change
        return replace(change, reason=change.reason + _SYNC) if failed.uses("FSDP") else change
    if failed.samples < failed.larger_by:
        return None
    return smaller_batch(failed.job, failed.samples / failed.larger_by if failed.larger_by > 1 else None)


def _checkpointing(failed: FailedJob, change: Change) -> Change:
    if failed.uses("FSDP") and failed.uses("adapters"):
        return replace(change, reason=f"{change.reason}; Trainer's and not FSDP's, which saves an empty adapter")
    if failed.uses("FSDP"):  # transformers refuses both switches (trainer.py: "FSDP's activation_checkpointing")
        return replace(change, key="arguments.fsdp_config", value={"activation_checkpointing": True})
    if failed.uses("diffusers"):
        return replace(change, key="arguments.gradient_checkpointing")
    if failed.ranked:
        name = name_in_version("activation_checkpointing", failed.job.version("transformers"))
        return replace(change, key=f"arguments.{name}")
    return replace(change, reason=f"{change.reason} (before transformers 5.23: gradient_checkpointing)")


def _chunked_loss(failed: FailedJob, change: Change) -> Change:
    smoothed = failed.argument("label_smoothing_factor") or "…"
    options = f", label_smoothing={smoothed}" if failed.uses("label smoothing") else ""
    instead = "; it smooths labels too, so omit label_smoothing_factor, which needs all logits" if options else ""
    value = f"hf_memkit.components.chunked_loss.install(model{options})"
    return replace(change, key="model_parts.chunked_loss", value=value, reason=change.reason + instead)


def _eight_bit(failed: FailedJob, change: Change) -> Change:
    if not failed.uses("diffusers"):
        return change
    return replace(change, key="arguments.use_8bit_adam", value=True, reason=change.reason.partition(";")[0])


def _zero3(failed: FailedJob, change: Change) -> Change | None:
    in_ram = failed.message.memory == "host" and not failed.uses("DeepSpeed")
    return None if in_ram or failed.message.device_type == "mps" else change


def _workers(failed: FailedJob, change: Change) -> Change:
    workers = failed.job.count("dataloader_num_workers")
    return change if workers is None else replace(change, value=workers // 2, current=workers)


def _maps(failed: FailedJob, change: Change) -> Change:
    change = failed.under_name(change, MAP_PROCESSES)
    current = failed.job.count(change.key.rpartition(".")[2])
    return replace(change, value=_MOST_MAPS, current=current) if (current or 0) > 2 * _MOST_MAPS else change


ADAPTED: Final[Mapping[str, Adapt]] = {
    "global-batch": _batch,
    "shorter-sequences": lambda failed, change: failed.under_name(change, LENGTHS),
    "smaller-images": lambda failed, change: failed.under_name(change, PIXELS),
    "activation-checkpointing": _checkpointing,
    "chunked-loss": _chunked_loss,
    "adamw-8bit": _eight_bit,
    "adamw-fused": lambda failed, change: (
        change if (failed.trace.place, failed.trace.library) == ("optimizer step", "PyTorch") else None
    ),
    "paged-adamw-8bit": lambda failed, change: replace(change, value=paged_form(failed.job.optim)),
    "unpaged-states": lambda failed, change: replace(
        change, value=find_optimizer(failed.job.optim).unpaged or change.value
    ),
    "zero3": _zero3,
    "zero3-infinity-optimizer": lambda failed, change: (
        change
        if failed.uses("offload")
        else replace(change, reason=f"if DeepSpeed offloads states to RAM: {change.reason}")
    ),
    "smaller-model": lambda failed, change: replace(change, current=failed.argument("model_name_or_path")),
    "eval-accumulation": lambda failed, change: (
        change if failed.job.count("eval_accumulation_steps") is None else replace(change, value="half")
    ),
    "vllm-over-gpus": lambda failed, change: replace(
        change, value=2 * (failed.job.count("vllm_tensor_parallel_size") or 1)
    ),
    "shorter-answers": lambda failed, change: (
        replace(change, key="arguments.max_completion_length") if failed.uses("trl") else change
    ),
    "fewer-workers": _workers,
    "fewer-map-processes": _maps,
    "other-processes": lambda failed, change: replace(change, value=tools_of(failed.message.device_type).processes),
}


_HELD: Final = {"activations": "activations hold", "loss": "logits and loss hold", "gradients": "gradients hold",
                "optimizer": "optimizer states hold", "weights": "weights hold"}  # fmt: skip


def _up_to(change: Change, gib: float, figures: str = "") -> Change:
    """The change with its maximum saving."""
    return replace(change, at_most_gib=gib, reason=f"{change.reason}; {figures}" if figures else change.reason)


def by_share(failed: FailedJob, change: Change, frees: Mapping[Any, float]) -> Change | None:
    """The change with its share of the categories that the row frees; None if they hold nothing."""
    job = failed.job
    held = {category: job.gib(category) or 0.0 for category in frees}
    phases = ACTIVATION_PHASES if {"activations", "loss"} & {*frees} else STATES_PHASES
    most = sum(share * held[category] for category, share in frees.items())
    if job.phase not in phases or not most:
        return None
    return _up_to(change, most, ", ".join(f"{_HELD[name]} {size:.2f} GiB" for name, size in held.items() if size))


def _estimate_batch(failed: FailedJob, change: Change) -> Change | None:
    job = failed.job
    smaller = smaller_batch(job)
    if job.phase not in (*ACTIVATION_PHASES, "data") or smaller is None:
        return None
    if job.phase == "data":
        return _up_to(smaller, 2.0, "tensors computed before the model's forward grow with the samples")
    if job.activations_unknown:
        return _up_to(smaller, 2.0)
    if not (held := job.batch_gib):
        return None
    saves = held * (1 - smaller.value / smaller.current)
    basis = (
        f"measured activations and loss grow with the samples: {smaller.value} of {smaller.current} samples hold "
        f"{held - saves:.2f} of {held:.2f} GiB"
    )
    smaller = replace(smaller, saves_gib=round(saves, 2), basis=basis)
    return _up_to(smaller, saves, f"activations and loss hold {held:.2f} GiB for {smaller.current} samples")


def _estimate_length(failed: FailedJob, change: Change) -> Change | None:
    job = failed.job
    longest = job.moment.get("longest_sequence")
    held = job.batch_gib
    if job.phase not in ACTIVATION_PHASES or longest is None or longest < 2 or not held:
        return None
    saves = held * (1 - (longest // 2) / longest)
    basis = (
        f"{held:.2f} GiB of activations and loss, measured, grow at least linearly with the tokens: half the tokens "
        "save at least half"
    )
    change = replace(change, value=longest // 2, saves_gib=round(saves, 2), basis=basis)
    return _up_to(change, saves, f"the longest has {longest} tokens")


def _estimate_checkpointing(failed: FailedJob, change: Change) -> Change | None:
    change = _checkpointing(failed, change)
    if failed.job.activations_unknown:
        return _up_to(change, 1.0) if failed.job.phase in ACTIVATION_PHASES else None
    return by_share(failed, change, CATALOGUE["activation-checkpointing"].frees)


def _estimate_zeros(failed: FailedJob, change: Change) -> Change | None:
    """A loss without logits, in a compiled model: the zeros for their gradient."""
    zeros = failed.zeros_for_logits
    if zeros is None:
        return None
    basis = "the zeros that compiled code makes for the gradient of the logits: tokens × vocabulary"
    return _up_to(replace(change, saves_gib=round(zeros / GIB, 2), basis=basis), zeros / GIB)


def _estimate_autocast(failed: FailedJob, change: Change) -> Change | None:
    """Autocast halves activations and adds a 16-bit copy of the weights."""
    job = failed.job
    held = job.gib("activations")
    copies = (job.parameters or 0) * 2 / GIB
    if job.phase not in ACTIVATION_PHASES or not held or job.has_bf16 is None or not job.weights_in_fp32:
        return None
    if not copies or held / 2 <= copies or job.has_bf16 != (change.key == "arguments.bf16"):
        return None
    figures = f"activations hold {held:.2f} GiB, and these copies take {copies:.2f} GiB"
    return _up_to(change, held / 2 - copies, figures)


def _estimate_fragments(failed: FailedJob, change: Change) -> Change | None:
    job = failed.job
    settings = str(job.hardware.get("allocator_settings") or "").lower().replace(" ", "")
    is_on = "expandable_segments:true" in settings
    if job.cause != "fragmentation" or is_on != (change.key == CATALOGUE["empty-cache-steps"].key):
        return None
    if not is_on:
        change = replace(change, key=f"environment.{allocator_variable('cuda', job.version('torch'))}")
    cached = job.moment.get("fragmentation_gib")
    size = f"{cached:.2f} GiB" if cached is not None else "enough memory"
    return _up_to(change, _FIRST, f"{size} was cached")


def _estimate_eight_bit(failed: FailedJob, change: Change) -> Change | None:
    job = failed.job
    row = find_optimizer(job.optim)
    held = job.gib("optimizer") if job.phase in STATES_PHASES else None
    if job.phase == "optimizer":  # the first step may not have all states yet
        held = max(held or 0.0, job.states_gib_per(_STATES_BYTES) or 0.0)
    plain = row.algorithm == "AdamW" and row.bits == 32 and not job.optim.endswith(("_xla", "_npu_fused"))
    if not held or not plain:
        return None

    figures = f"here they take {held:.2f} GiB"
    at_most = _up_to(change, held * (1 - _EIGHT_BIT_BYTES / _STATES_BYTES), figures)
    trained = job.trainable
    embeddings = job.embedding_parameters
    measured = job.gib("optimizer")
    if embeddings is None or trained is None or not measured or embeddings > trained:
        return at_most
    if abs(measured - trained * _STATES_BYTES / GIB) > 0.02 * measured:
        return at_most  # 16-bit states, or states on other devices
    saves = (trained - embeddings) * (_STATES_BYTES - _EIGHT_BIT_BYTES) / GIB
    basis = (
        f"{held:.2f} GiB of states, measured, at 8 bytes a parameter; the {trained - embeddings:,} of {trained:,} "
        f"parameters that are not embeddings then take {_EIGHT_BIT_BYTES:.2f}"
    )
    return _up_to(replace(change, saves_gib=round(saves, 2), basis=basis), saves, figures)


def _estimate_paged(failed: FailedJob, change: Change) -> Change | None:
    row = find_optimizer(failed.job.optim)
    if (row.algorithm, row.packages, row.bits) != ("AdamW", ("bitsandbytes",), 8):
        return None
    return by_share(failed, replace(change, value=paged_form(failed.job.optim)), {"optimizer": 1.0})


def _estimate_fused(failed: FailedJob, change: Change) -> Change | None:
    job = failed.job
    weights = job.gib("weights")
    if job.phase != "optimizer" or job.optim != "adamw_torch" or not job.on_cuda:
        return None
    if not weights or not job.trainable or not job.parameters:
        return None
    copy = weights * job.trainable / job.parameters
    return _up_to(change, copy, f"here they have {copy:.2f} GiB")


def _estimate_frozen(failed: FailedJob, change: Change) -> Change | None:
    """Frozen fp32 weights in 16 bits, if only adapters are trained."""
    job = failed.job
    held = job.gib("weights")
    parameters = (job.parameters or 0) - (job.trainable or 0)
    frozen = parameters * 4 / GIB
    if not held or not job.trains_adapters or not job.weights_in_fp32 or not job.has_bf16 or frozen > held:
        return None
    if job.phase not in (*STATES_PHASES, "evaluate"):
        return None
    basis = f"{parameters:,} frozen parameters, 2 bytes each instead of 4"
    change = replace(change, saves_gib=round(frozen / 2, 2), basis=basis)
    return _up_to(change, frozen / 2, f"here they take {frozen:.2f} GiB")


def _estimate_offload(failed: FailedJob, change: Change) -> Change | None:
    job = failed.job
    held = job.model_states
    needs = job.states_gib_per(_OFFLOADED_BYTES)
    ram = job.hardware.get("ram_limit_gib") or job.hardware.get("ram_gib")
    if not held or job.phase not in STATES_PHASES or (job.deepspeed and job.stage is None):
        return None
    if needs is None or (ram and needs > ram):
        return None
    change = replace(change, cost=f"{change.cost}; here up to {needs:.1f} GiB of RAM")
    return _up_to(change, held, f"gradients and states hold {held:.2f} GiB there now")


def _estimate_split(failed: FailedJob, change: Change) -> Change | None:
    """ZeRO-2 for a job without DeepSpeed, ZeRO-3 for a job with ZeRO-2."""
    job = failed.job
    processes = job.run.get("world_size", 1)
    stage = 0 if job.stage is None and not job.deepspeed else job.stage
    held = job.gib("weights") if stage == 2 else job.model_states
    if not job.model_states or not held or processes < 2 or job.phase not in STATES_PHASES or failed.uses("adapters"):
        return None
    if stage is None or stage >= 3 or (stage == 2) != change.value.startswith("zero3"):
        return None
    return _up_to(change, held * (1 - 1 / processes), f"each of the {processes} processes now holds a full copy")


def _estimate_predictions(failed: FailedJob, change: Change) -> Change | None:
    """Smaller evaluations, in a fixed order if categories are unknown."""
    job = failed.job
    if job.phase != "evaluate":
        return None
    name = change.key.rpartition(".")[2]
    share = {"per_device_eval_batch_size": 0.75, "eval_accumulation_steps": 1.0, "prediction_loss_only": 0.0}
    most = share.get(name, 0.5) * (1.0 + (job.gib("loss") or 0.0))
    if name == "per_device_eval_batch_size":
        return _up_to(change, most) if job.count(name) is not None else None
    loss_only = job.moment.get("prediction_loss_only") is True or job.argument("prediction_loss_only")
    if loss_only or (most and job.argument("batch_eval_metrics")):
        return None
    if name == "eval_accumulation_steps" and job.argument(name) is not None:
        return None
    return _up_to(change, most, "" if most else "already so if the Trainer has no compute_metrics")


def _estimate_save(failed: FailedJob, change: Change) -> Change | None:
    job = failed.job
    if job.phase != "save":
        return None
    if change.key == CATALOGUE["save-only-model"].key:
        return _up_to(change, 1.0) if job.deepspeed or job.fsdp else None
    return _up_to(change, 2.0) if job.stage == 3 or job.fsdp else None


def _estimate_shares(failed: FailedJob, change: Change, category: Category) -> Change | None:
    """What the other GPUs hold of a category, which this one holds too in forward and backward."""
    others = failed.job.run.get("world_size", 1) - 1
    most = others * (failed.job.gib(category) or 0.0)
    return _up_to(change, most) if failed.job.phase in ACTIVATION_PHASES and most else None


_SPLIT: Final[Mapping[Category, float]] = {"weights": 1.0, "gradients": 1.0, "optimizer": 1.0}
"""What FSDP splits."""

ESTIMATES: Final[Mapping[str, Adapt]] = {
    "global-batch": _estimate_batch,
    "shorter-sequences": _estimate_length,
    "activation-checkpointing": _estimate_checkpointing,
    "chunked-loss": lambda failed, change: _estimate_zeros(failed, _chunked_loss(failed, change)),
    "sdpa-attention": lambda failed, change: (
        by_share(failed, change, CATALOGUE["sdpa-attention"].frees)
        if failed.job.run.get("attention") == "eager"
        else None
    ),
    "bf16-autocast": _estimate_autocast,
    "fp16-autocast": _estimate_autocast,
    "expandable-segments": _estimate_fragments,
    "empty-cache-steps": _estimate_fragments,
    "adamw-8bit": _estimate_eight_bit,
    "paged-adamw-8bit": _estimate_paged,
    "adamw-fused": _estimate_fused,
    "half-weights-frozen": _estimate_frozen,
    "zero2-offload": _estimate_offload,
    "zero3-offload-optimizer": _estimate_offload,
    "zero2": _estimate_split,
    "zero3": _estimate_split,
    "zero3-infinity-optimizer": lambda failed, change: (
        _up_to(change, 4.0, f"they take {failed.job.states_in_ram:.2f} GiB of RAM") if failed.job.deepspeed else None
    ),
    "small-evaluation-batch": _estimate_predictions,
    "eval-accumulation": _estimate_predictions,
    "preprocess-logits": _estimate_predictions,
    "loss-only-evaluation": _estimate_predictions,
    "zero3-shards": _estimate_save,
    "fsdp-shards": _estimate_save,
    "fsdp-reshard": lambda failed, change: _estimate_shares(failed, change, "weights"),
    "fsdp-sync-each-batch": lambda failed, change: _estimate_shares(failed, change, "gradients"),
    "fsdp2-offload": lambda failed, change: by_share(failed, change, _SPLIT),
    "fsdp-more-gpus": lambda failed, change: by_share(failed, change, dict.fromkeys(_SPLIT, 0.5)),
    "save-only-model": _estimate_save,
    "fewer-workers": lambda failed, change: (
        _up_to(_workers(failed, change), 3.0) if failed.job.count("dataloader_num_workers") else None
    ),
    "pageable-batches": lambda failed, change: (
        _up_to(change, 1.0) if failed.argument("dataloader_pin_memory") is True and failed.job.on_cuda else None
    ),
}
"""Changes with savings from a record. Other rows are estimated by `frees`, and not proposed without it."""
