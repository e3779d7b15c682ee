"""What the rows of the catalogue need beyond their data: when advice proposes one, in which words, and what it saves.

In: a failed job and the row's change. Out: the change for this job, or None where it is on, refused or useless. Where
the job has records, `failed.ranked` is true, and the change has `at_most_gib`: the most that it can save, from the
record. Figures come from records only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

from hf_memkit.catalog.library_versions import name_in_version
from hf_memkit.catalog.liger_support import LIGER_OPTIONS
from hf_memkit.catalog.optimizers import OPTIMIZERS, find_optimizer, paged_form
from hf_memkit.common.units import GIB
from hf_memkit.measuring.out_of_memory.change import Change
from hf_memkit.measuring.out_of_memory.device_tools import allocator_variable, tools_of
from hf_memkit.measuring.out_of_memory.failed_job import FailedJob
from hf_memkit.measuring.out_of_memory.other_names import LENGTHS, MAP_PROCESSES, PIXELS
from hf_memkit.measuring.out_of_memory.run_view import ACTIVATION_PHASES, STATES_PHASES, RunView
from hf_memkit.setup.techniques.registry import CATALOGUE

Condition = Callable[[FailedJob, Change], Change | None]

CONDITIONS: Final[dict[str, Condition]] = {}
"""By the row's name. A row without one is proposed wherever its data allow."""


def _of(*names: str) -> Callable[[Condition], Condition]:
    def register(condition: Condition) -> Condition:
        CONDITIONS.update(dict.fromkeys(names, condition))
        return condition

    return register


_STATES_BYTES: Final = OPTIMIZERS["adamw_torch"].states.bytes_a_parameter
_EIGHT_BIT_BYTES: Final = OPTIMIZERS["adamw_bnb_8bit"].states.bytes_a_parameter

_OFFLOADED_BYTES: Final = 20
"""What ZeRO-Offload holds in RAM a parameter, at most: fp32 master weight, gradient and two moments, the 16-bit copy
on its way to the GPU, and with accumulation 16-bit gradients (deepspeed 0.19.8: runtime/zero/stage_1_and_2.py;
`memkit ds show zero2-offload --model …` has the ledger)."""

_FIRST: Final = 1e6
"""For a change that removes the cause itself at almost no cost: before all others."""

_HELD: Final = {"activations": "activations hold", "loss": "logits and loss hold", "gradients": "gradients hold",
                "optimizer": "optimizer states hold", "weights": "weights hold"}  # fmt: skip


def by_share(failed: FailedJob, change: Change, frees: Mapping[Any, float]) -> Change | None:
    """The change with the categories that it works on, from the record; None where they hold nothing then."""
    job = failed.job
    held = {category: job.gib(category) or 0.0 for category in frees}
    phases = ACTIVATION_PHASES if {"activations", "loss"} & {*frees} else STATES_PHASES
    most = sum(share * held[category] for category, share in frees.items())
    if job.phase not in phases or not most:
        return None
    figures = ", ".join(f"{_HELD[category]} {size:.2f} GiB" for category, size in held.items() if size)
    return replace(change, reason=f"{change.reason}; {figures}", at_most_gib=most)


# ---- activations and loss ----


def smaller_batch(job: RunView, most: float | None = None) -> Change | None:
    """The next smaller divisor of the micro-batch, at most `most` if there is one; None for one sample, or unknown."""
    samples = job.count("per_device_train_batch_size")
    if job.argument("auto_find_batch_size") and "samples" in job.moment:
        samples = job.moment["samples"]
    if samples is None or samples < 2:
        return None
    parts = [samples // factor for factor in range(2, samples + 1) if samples % factor == 0]
    smaller = next((part for part in parts if most is None or part <= most), parts[-1])
    steps, factor = job.count("gradient_accumulation_steps"), samples // smaller
    name = job.names.get("gradient_accumulation_steps", "gradient_accumulation_steps")
    more = f"set {name} {steps} → {steps * factor} too" if steps else f"multiply {name} by {factor}"
    reason = f"{more}, so that a step sees the same samples"
    return replace(Change.of(CATALOGUE["global-batch"]), value=smaller, reason=reason, current=samples)


@_of("global-batch")
def _micro_batch(failed: FailedJob, change: Change) -> Change | None:
    job = failed.job
    if not failed.ranked:
        if failed.samples is None:
            return replace(change, value="smaller") if failed.larger_by > 1 else change
        if failed.samples < failed.larger_by:
            return None
        return smaller_batch(job, failed.samples / failed.larger_by if failed.larger_by > 1 else None)
    before_forward = job.phase == "data"
    unknown = before_forward or job.activations_unknown
    held = None if unknown else job.of_the_batch
    smaller = smaller_batch(job)
    if job.phase not in (*ACTIVATION_PHASES, "data") or smaller is None or not (held or unknown):
        return None
    if held is None:
        what = "; tensors computed before the model's forward grow with the samples" if before_forward else ""
        return replace(smaller, reason=smaller.reason + what, at_most_gib=2.0)
    saves = held * (1 - smaller.value / smaller.current)
    basis = (
        f"measured activations and loss grow with the samples: {smaller.value} of {smaller.current} samples hold "
        f"{held - saves:.2f} of {held:.2f} GiB"
    )
    reason = f"{smaller.reason}; activations and loss hold {held:.2f} GiB for {smaller.current} samples"
    return replace(smaller, reason=reason, saves_gib=round(saves, 2), basis=basis, at_most_gib=saves)


@_of("shorter-sequences")
def _shorter(failed: FailedJob, change: Change) -> Change | None:
    job = failed.job
    if not failed.ranked:
        if failed.trace.place == "attention":
            change = replace(change, reason="all texts of a batch are padded to its longest, and attention scores "
                             "grow with its square")  # fmt: skip
        return failed.under_name(change, LENGTHS)
    longest, held = job.moment.get("longest_sequence"), job.of_the_batch
    if job.phase not in ACTIVATION_PHASES or longest is None or longest < 2 or not held:
        return None
    saves = held * (1 - (longest // 2) / longest)
    basis = (
        f"{held:.2f} GiB of activations and loss, measured, grow at least linearly with the tokens: half the tokens "
        "save at least half"
    )
    reason = f"{change.reason}; the longest has {longest} tokens"
    return replace(
        change, value=longest // 2, reason=reason, saves_gib=round(saves, 2), basis=basis, at_most_gib=saves
    )  # fmt: skip


@_of("smaller-images")
def _images(failed: FailedJob, change: Change) -> Change | None:
    if failed.trace.place == "attention":
        change = replace(change, reason=change.reason.replace("activations grow with", "attention scores grow with "
                                                              "the square of"))  # fmt: skip
    return failed.under_name(change, PIXELS)


@_of("activation-checkpointing")
def _checkpointing(failed: FailedJob, change: Change) -> Change | None:
    job = failed.job
    if failed.uses(
        "FSDP"
    ):  # transformers refuses both switches together (trainer.py: "FSDP's activation_checkpointing")
        change = replace(change, key="arguments.fsdp_config", value={"activation_checkpointing": True})
    elif failed.uses("diffusers"):
        change = replace(change, key="arguments.gradient_checkpointing")
    elif failed.ranked:
        name = name_in_version("activation_checkpointing", job.version("transformers"))
        change = replace(change, key=f"arguments.{name}")
    else:
        change = replace(change, reason=f"{change.reason} (before transformers 5.23: gradient_checkpointing)")
    if failed.ranked and job.activations_unknown:
        return replace(change, at_most_gib=1.0) if job.phase in ACTIVATION_PHASES else None
    return by_share(failed, change, CATALOGUE["activation-checkpointing"].frees) if failed.ranked else change


@_of("liger")
def _fused_loss(failed: FailedJob, change: Change) -> Change | None:
    """Where Liger has kernels for this model and they are used: in training."""
    model_type = failed.trace.model_type or failed.job.run.get("model_type")
    if model_type is None:
        models = " (Llama, Qwen, Gemma, Mistral and others, not GPT-2)"
        change = replace(change, reason=change.reason + models)
    known = model_type in LIGER_OPTIONS or (model_type is None and not failed.ranked)
    if not known or failed.trace.phase == "evaluate":
        return None
    return by_share(failed, change, CATALOGUE["liger"].frees) if failed.ranked else change


@_of("chunked-loss")
def _chunked_loss(failed: FailedJob, change: Change) -> Change | None:
    if failed.trace.phase == "evaluate":
        return None
    smoothed = failed.argument("label_smoothing_factor") or "…"
    options = f", label_smoothing={smoothed}" if failed.uses("label smoothing") else ""
    instead = "; it smooths labels too, so omit label_smoothing_factor, which needs all logits" if options else ""
    return replace(
        change, key="model_parts.chunked_loss", value=f"hf_memkit.components.chunked_loss.install(model{options})",
        reason=change.reason + instead,
    )  # fmt: skip


@_of("newer-trl")
def _newer_trl(failed: FailedJob, change: Change) -> Change | None:
    return None if failed.trace.phase == "evaluate" else change


@_of("sdpa-attention")
def _sdpa(failed: FailedJob, change: Change) -> Change | None:
    if not failed.ranked:
        return change
    eager = failed.job.run.get("attention") == "eager"
    return by_share(failed, change, CATALOGUE["sdpa-attention"].frees) if eager else None


@_of("bf16-autocast", "fp16-autocast")
def _autocast(failed: FailedJob, change: Change) -> Change | None:
    """Activations halve; each weight gets a 16-bit copy while it runs."""
    job = failed.job
    held, has_bf16 = job.gib("activations"), job.has_bf16
    if job.phase not in ACTIVATION_PHASES or not held or has_bf16 is None or not job.weights_in_fp32:
        return None
    copies = (job.parameters or 0) * 2 / GIB
    if not copies or held / 2 <= copies or has_bf16 != (change.key == "arguments.bf16"):
        return None
    reason = f"{change.reason}; activations hold {held:.2f} GiB, and these copies take {copies:.2f} GiB"
    return replace(change, reason=reason, at_most_gib=held / 2 - copies)


# ---- what lives from step to step: weights, gradients, optimizer states; and the allocator ----


@_of("expandable-segments", "empty-cache-steps")
def _fragmentation(failed: FailedJob, change: Change) -> Change | None:
    job = failed.job
    settings = str(job.hardware.get("allocator_settings") or "").lower().replace(" ", "")
    is_on = "expandable_segments:true" in settings
    if job.cause != "fragmentation" or is_on != (change.key == CATALOGUE["empty-cache-steps"].key):
        return None
    cached = job.moment.get("fragmentation_gib")
    size = f"{cached:.2f} GiB" if cached is not None else "enough memory"
    if not is_on:
        change = replace(change, key=f"environment.{allocator_variable('cuda', job.version('torch'))}")
    return replace(change, reason=f"{change.reason}; {size} was cached", at_most_gib=_FIRST)


def _states(job: RunView) -> float | None:
    """What the optimizer's states hold, or will hold where the first step is making them."""
    if job.phase not in STATES_PHASES:
        return None
    held = job.gib("optimizer")
    if job.phase == "optimizer":
        return max(held or 0.0, job.states_gib_per(_STATES_BYTES) or 0.0) or None
    return held or None


def _small_already(failed: FailedJob) -> bool:
    return find_optimizer(failed.job.optim).bits == 8 or failed.trace.library in ("bitsandbytes", "torchao")


@_of("adamw-8bit")
def _eight_bit(failed: FailedJob, change: Change) -> Change | None:
    """Not of a training that resumes: the checkpoint's states are another optimizer's."""
    job, row = failed.job, find_optimizer(failed.job.optim)
    if failed.resumes or _small_already(failed):
        return None
    if not failed.ranked:
        if job.optim and not job.optim.lower().startswith("adamw"):
            return None  # Adafactor, LOMO, SGD and the like hold less than 8-bit AdamW, or are another algorithm
        if failed.uses("diffusers"):
            return replace(change, key="arguments.use_8bit_adam", value=True, reason=change.reason.partition(",")[0])
        return change
    held = _states(job)
    plain = row.algorithm == "AdamW" and row.bits == 32 and not job.optim.endswith(("_xla", "_npu_fused"))
    if held is None or not plain:
        return None
    saves, basis = _eight_bit_saving(job, held)
    most = held * (1 - _EIGHT_BIT_BYTES / _STATES_BYTES) if saves is None else saves
    reason = f"{change.reason}; here they take {held:.2f} GiB"
    return replace(change, reason=reason, saves_gib=saves, basis=basis, at_most_gib=most)


def _eight_bit_saving(job: RunView, held: float) -> tuple[float | None, str | None]:
    """GiB, if the table of modules has the embeddings, and the measured states are AdamW's in fp32."""
    embeddings, trainable = job.embedding_parameters, job.trainable
    measured = job.gib("optimizer")
    if embeddings is None or trainable is None or not measured or embeddings > trainable:
        return None, None
    if abs(measured - trainable * _STATES_BYTES / GIB) > 0.02 * measured:
        return None, None  # 16-bit states, or states on other devices: the arithmetic does not hold
    saves = (trainable - embeddings) * (_STATES_BYTES - _EIGHT_BIT_BYTES) / GIB
    basis = (
        f"{held:.2f} GiB of states, measured, at 8 bytes a parameter; the {trainable - embeddings:,} of {trainable:,} "
        f"parameters that are not embeddings then take {_EIGHT_BIT_BYTES:.2f}"
    )
    return round(saves, 2), basis


@_of("paged-adamw-8bit")
def _paged(failed: FailedJob, change: Change) -> Change | None:
    """Where the states are small already, and that was not enough. Managed memory fails on Windows and WSL2."""
    job, row = failed.job, find_optimizer(failed.job.optim)
    change = replace(change, value=paged_form(job.optim))
    if failed.resumes or not _small_already(failed) or failed.platform in ("Windows", "WSL2"):
        return None
    if not failed.ranked:
        return change
    own = (row.algorithm, row.packages, row.bits) == ("AdamW", ("bitsandbytes",), 8)
    return by_share(failed, change, {"optimizer": 1.0}) if own else None


@_of("adamw-fused")
def _fused_optimizer(failed: FailedJob, change: Change) -> Change | None:
    job = failed.job
    if not failed.ranked:
        here = failed.trace.place == "optimizer step" and failed.trace.library == "PyTorch"
        return change if here and job.optim in ("", "adamw_torch") else None
    weights = job.gib("weights")
    if job.phase != "optimizer" or job.optim != "adamw_torch" or not job.on_cuda:
        return None
    if not weights or not job.trainable or not job.parameters:
        return None
    copy = weights * job.trainable / job.parameters
    return replace(change, reason=f"{change.reason}; here they have {copy:.2f} GiB", at_most_gib=copy)


@_of("half-weights-frozen")
def _frozen(failed: FailedJob, change: Change) -> Change | None:
    """Frozen fp32 weights in 16 bit, if only adapters are trained."""
    job = failed.job
    held, parameters = job.gib("weights"), (job.parameters or 0) - (job.trainable or 0)
    frozen = parameters * 4 / GIB
    if not held or not job.trains_adapters or not job.weights_in_fp32 or not job.has_bf16 or frozen > held:
        return None
    if job.phase not in (*STATES_PHASES, "evaluate"):
        return None
    basis = f"{parameters:,} frozen parameters, 2 bytes each instead of 4"
    reason = f"{change.reason}; here they take {frozen:.2f} GiB"
    return replace(change, reason=reason, saves_gib=round(frozen / 2, 2), basis=basis, at_most_gib=frozen / 2)


@_of("lora")
def _lora(failed: FailedJob, change: Change) -> Change | None:
    if failed.resumes or (failed.ranked and not failed.job.trainable):
        return None
    return by_share(failed, change, CATALOGUE["lora"].frees) if failed.ranked else change


@_of("qlora")
def _four_bit(failed: FailedJob, change: Change) -> Change | None:
    """Not where frames show bitsandbytes' weights, most likely in 4 bit."""
    return None if failed.uses("quantized weights") and not failed.argument("load_in_8bit") else change


@_of("zero2-offload", "zero3-offload-optimizer")
def _offload(failed: FailedJob, change: Change) -> Change | None:
    job = failed.job
    if failed.resumes or not failed.ranked:
        return None if failed.resumes else change
    held, needs = job.model_states, job.states_gib_per(_OFFLOADED_BYTES)
    ram = job.hardware.get("ram_limit_gib") or job.hardware.get("ram_gib")
    if not held or job.phase not in STATES_PHASES or (job.deepspeed and job.stage is None):
        return None
    if needs is None or (ram and needs > ram):
        return None
    return replace(
        change, reason=f"{change.reason}; gradients and states hold {held:.2f} GiB there now",
        cost=f"{change.cost}; here up to {needs:.1f} GiB of RAM", at_most_gib=held,
    )  # fmt: skip


@_of("zero2", "zero3")
def _split(failed: FailedJob, change: Change) -> Change | None:
    """What is split over the GPUs of the job: `zero3` where `zero2` is in use, or where the weights do not load."""
    job, processes = failed.job, failed.job.run.get("world_size", 1)
    if not failed.ranked:
        in_ram = failed.message.memory == "host"
        return None if failed.message.device_type == "mps" or (in_ram and not failed.uses("DeepSpeed")) else change
    stage = 0 if job.stage is None and not job.deepspeed else job.stage
    held = job.gib("weights") if stage == 2 else job.model_states
    if not job.model_states or not held or processes < 2 or job.phase not in STATES_PHASES or failed.uses("adapters"):
        return None
    if stage is None or stage >= 3 or (stage == 2) != change.value.startswith("zero3"):
        return None
    reason = f"{change.reason}; each of the {processes} processes now holds a full copy"
    return replace(change, reason=reason, at_most_gib=held * (1 - 1 / processes))


@_of("zero3-infinity-optimizer")
def _states_on_disk(failed: FailedJob, change: Change) -> Change | None:
    """Not proposed where the arguments show no offload."""
    job, shown = failed.job, failed.uses("offload")
    if failed.offloads_to_disk or failed.resumes:
        return None
    if failed.ranked:
        takes = f"; they take {job.states_in_ram:.2f} GiB of RAM" if job.states_in_ram else ""
        return replace(change, reason=change.reason + takes, at_most_gib=4.0) if shown and job.deepspeed else None
    if job.arguments and not shown and not (failed.uses("DeepSpeed") and isinstance(job.argument("deepspeed"), str)):
        return None
    no_deepspeed = failed.platform == "Windows" or failed.message.form in ("windows-commit", "notebook")
    if no_deepspeed and not shown:
        return None
    return change if shown else replace(change, reason=f"if DeepSpeed offloads states to RAM: {change.reason}")


@_of("pageable-states")
def _pageable_states(failed: FailedJob, change: Change) -> Change | None:
    return None if failed.job.arguments and not failed.uses("DeepSpeed") else change


@_of("unpaged-states")
def _unpaged(failed: FailedJob, change: Change) -> Change | None:
    if failed.resumes:
        return None
    row = find_optimizer(failed.job.optim)
    smaller = " (adamw_bnb_8bit: 2 bytes a parameter)" if row.unpaged and row.bits != 8 else ""
    return replace(change, value=row.unpaged or change.value, reason=change.reason + smaller)


# ---- loading and checkpoints ----


@_of("one-rank-loads")
def _one_rank_loads(failed: FailedJob, change: Change) -> Change | None:
    if failed.uses("FSDP"):
        return None if failed.message.memory == "host" and failed.uses("DeepSpeed", "ZeRO-3") else change
    if failed.message.memory == "device" or failed.uses("DeepSpeed", "ZeRO-3"):
        return None
    return replace(change, reason=f"{change.reason}; it needs fsdp: full_shard. Or start fewer processes")


@_of("layers-over-gpus", "zero3-offload")
def _several_gpus(failed: FailedJob, change: Change) -> Change | None:
    return None if failed.message.device_type == "mps" else change


@_of("smaller-model")
def _smaller_model(failed: FailedJob, change: Change) -> Change | None:
    return replace(change, current=failed.argument("model_name_or_path"))


@_of("fresh-optimizer")
def _fresh_optimizer(failed: FailedJob, change: Change) -> Change | None:
    return change if failed.resumes else None


@_of("zero3-shards")
def _zero3_shards(failed: FailedJob, change: Change) -> Change | None:
    if failed.ranked:
        return replace(change, at_most_gib=2.0) if failed.job.phase == "save" and failed.job.stage == 3 else None
    return change if failed.trace.library == "DeepSpeed" or failed.uses("ZeRO-3") else None


@_of("fsdp-shards")
def _fsdp_shards(failed: FailedJob, change: Change) -> Change | None:
    if failed.trace.library == "DeepSpeed" or failed.uses("ZeRO-3"):
        return None
    return change if failed.trace.library == "FSDP" or failed.uses("FSDP") else None


@_of("save-only-model")
def _only_model(failed: FailedJob, change: Change) -> Change | None:
    sharded = failed.job.phase == "save" and failed.uses("DeepSpeed", "FSDP")
    return (replace(change, at_most_gib=1.0) if sharded else None) if failed.ranked else change


@_of("fewer-checkpoints")
def _fewer_checkpoints(failed: FailedJob, change: Change) -> Change | None:
    kept = failed.job.count("save_total_limit")
    return None if kept is not None and kept < 2 else change


# ---- evaluation and generation ----


def _whole_gpu(job: RunView) -> float:
    """Without categories, the change to what usually holds most comes first."""
    return 1.0 + (job.gib("loss") or 0.0)


@_of("small-evaluation-batch")
def _evaluation_batch(failed: FailedJob, change: Change) -> Change | None:
    if not failed.ranked:
        return change
    known = failed.job.phase == "evaluate" and failed.job.count("per_device_eval_batch_size") is not None
    return replace(change, at_most_gib=0.75 * _whole_gpu(failed.job)) if known else None


@_of("eval-accumulation", "preprocess-logits", "loss-only-evaluation")
def _predictions(failed: FailedJob, change: Change) -> Change | None:
    """Predictions moved to RAM as the evaluation goes on, made small before they are kept, or not kept."""
    job, name = failed.job, change.key.rpartition(".")[2]
    moves, drops = name == "eval_accumulation_steps", name == "prediction_loss_only"
    if not failed.ranked:
        return replace(change, value="half") if moves and job.count(name) is not None else change
    if job.phase != "evaluate" or job.keeps_no_predictions:
        return None
    if drops:
        what = " (already so if the Trainer has no compute_metrics)"
        return replace(change, reason=change.reason + what, at_most_gib=0.0)
    if job.argument("batch_eval_metrics") or (moves and job.argument(name) is not None):
        return None
    return replace(change, at_most_gib=_whole_gpu(job) / (1 if moves else 2))


@_of("vllm-server")
def _server(failed: FailedJob, change: Change) -> Change | None:
    return None if failed.argument("vllm_mode") == "server" else change


@_of("vllm-over-gpus")
def _over_gpus(failed: FailedJob, change: Change) -> Change | None:
    current = failed.job.count("vllm_tensor_parallel_size")
    return change if current is None else replace(change, value=2 * current)


@_of("shorter-answers")
def _shorter_answers(failed: FailedJob, change: Change) -> Change | None:
    return replace(change, key="arguments.max_completion_length") if failed.uses("trl") else change


# ---- RAM: data, machine ----

_ONE_ARRAY: Final = 16 * GIB
"""A single request from which the array itself is too large, whatever else is in RAM: half of a small machine's."""

_MOST_MAPS: Final = 8
"""Processes of a `map` at most: each holds its rows and a copy of the tokenizer."""


@_of("fewer-workers")
def _fewer_workers(failed: FailedJob, change: Change) -> Change | None:
    workers = failed.job.count("dataloader_num_workers")
    if failed.ranked:
        return replace(change, value=workers // 2, current=workers, at_most_gib=3.0) if workers else None
    if failed.trace.phase is None and (failed.message.requested_bytes or 0) >= _ONE_ARRAY:
        return None
    return change if workers is None else replace(change, value=workers // 2, current=workers) if workers else None


@_of("no-workers")
def _no_workers(failed: FailedJob, change: Change) -> Change | None:
    return None if failed.job.count("dataloader_num_workers") == 0 else change


@_of("pageable-batches")
def _pageable_batches(failed: FailedJob, change: Change) -> Change | None:
    pinned = failed.argument("dataloader_pin_memory")
    if failed.ranked:
        return replace(change, at_most_gib=1.0) if pinned is True and failed.job.on_cuda else None
    return None if pinned is False else change


@_of("fewer-map-processes")
def _fewer_map_processes(failed: FailedJob, change: Change) -> Change | None:
    change = failed.under_name(change, MAP_PROCESSES)
    current = failed.job.count(change.key.rpartition(".")[2])
    if current is not None and current > 2 * _MOST_MAPS:
        change = replace(change, value=_MOST_MAPS, current=current)
    return None if failed.recorded else change


@_of("smaller-map-batches", "streamed-data")
def _while_mapping(failed: FailedJob, change: Change) -> Change | None:
    return None if failed.recorded else change


@_of("other-processes")
def _other_processes(failed: FailedJob, change: Change) -> Change | None:
    tool = tools_of(failed.message.device_type).processes
    return replace(change, value=tool) if tool else None


@_of("more-ram")
def _more_ram(failed: FailedJob, change: Change) -> Change | None:
    """Not where the fix for the cause has it, and not for managed memory."""
    named = failed.message.in_cgroup or failed.message.form in ("kubernetes-node", "bitsandbytes-managed")
    return None if named else change


@_of("more-ram-for-wsl")
def _more_ram_for_wsl(failed: FailedJob, change: Change) -> Change | None:
    return change if failed.platform in (None, "WSL2") else None
