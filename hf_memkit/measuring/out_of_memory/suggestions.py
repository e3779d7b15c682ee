"""What to change so that a job fits. In: a `run` record and the record of a moment. Out: one to three changes, none in
force already, refused by the engine or useless in the phase that failed. Figures come from the records only."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

from hf_memkit.catalog.library_versions import name_in_version
from hf_memkit.catalog.liger_support import LIGER_OPTIONS
from hf_memkit.catalog.optimizers import OPTIMIZERS, find_optimizer, paged_form
from hf_memkit.common.units import GIB
from hf_memkit.measuring.out_of_memory.change import Change
from hf_memkit.measuring.out_of_memory.device_tools import allocator_variable
from hf_memkit.measuring.out_of_memory.run_view import RunView
from hf_memkit.measuring.record_types import ModulesRecord, RunRecord

Proposals = Iterator[tuple[float, Change]]
"""Changes, each with the most GiB of memory that it can save, which gives their order."""

ACTIVATION_PHASES: Final = ("forward", "backward")

_ON_THE_GPU: Final = ("load", "data", "forward", "backward", "optimizer")

_FP32_STATES_BYTES: Final = OPTIMIZERS["adamw_torch"].states.bytes_a_parameter
_EIGHT_BIT_BYTES: Final = OPTIMIZERS["adamw_bnb_8bit"].states.bytes_a_parameter

_OFFLOADED_BYTES: Final = 20
"""What ZeRO-Offload holds in RAM a parameter, at most: fp32 master weight, gradient and two moments, the 16-bit copy
on its way to the GPU, and with accumulation 16-bit gradients (deepspeed 0.19.8: runtime/zero/stage_1_and_2.py;
`memkit ds show zero2-offload --model …` has the ledger)."""

_FIRST: Final = 1e6
"""For a change that removes the cause itself at almost no cost: before all others."""

_BATCH_COST: Final = (
    "more, smaller forward passes a step, slower if they leave the GPU idle; the same result up to rounding"
)

# What is changed, and what it costs; the reason where nothing of the job is measured.
CHECKPOINTING: Final = Change(
    "arguments.activation_checkpointing", True,
    "each layer keeps its input and recomputes its other activations in backward",
    "about one more forward pass a step (Chen et al. 2016, arXiv 1604.06174); the same result",
)  # fmt: skip
FSDP_CHECKPOINTING: Final = replace(
    CHECKPOINTING, key="arguments.fsdp_config", value={"activation_checkpointing": True}
)
"""transformers refuses both switches together (trainer.py: "FSDP's activation_checkpointing")."""
FUSED_LOSS: Final = Change(
    "arguments.use_liger_kernel", True,
    "Liger's fused loss computes the logits, tokens × vocabulary, in chunks",
    "the package liger-kernel; rounding differences; no logits in the training output",
)  # fmt: skip
SDPA: Final = Change(
    "model.attn_implementation", "sdpa",
    "eager attention stores its scores, heads × length² numbers a sequence and layer; SDPA does not",
    "rounding differences; no attention weights in the output; a model without SDPA fails to load",
)  # fmt: skip
EIGHT_BIT: Final = Change(
    "arguments.optim", "adamw_bnb_8bit",
    "AdamW's states take 2 bytes a parameter instead of 8; paged_adamw_8bit also moves them to RAM when the GPU is "
    "full",
    "8-bit rounding of the states (no loss in the tasks of Dettmers et al. 2021, arXiv 2110.02861); the package "
    "bitsandbytes",
)  # fmt: skip
FUSED_ADAMW: Final = Change(
    "arguments.optim", "adamw_torch_fused",
    "adamw_torch allocates temporaries as large as the trained parameters (torch: torch/optim/adam.py, foreach); the "
    "fused kernel needs none",
    "nothing: no slower, and the same result up to rounding",
)  # fmt: skip
ADAPTERS: Final = Change(
    "adapter.LoraConfig", {"target_modules": "all-linear"},
    "gradients and optimizer states of LoRA adapters are small",
    "a different training: base weights stay frozen (Hu et al. 2021, arXiv 2106.09685); the package peft",
)  # fmt: skip
PAGEABLE_BATCHES: Final = Change(
    "arguments.dataloader_pin_memory", False, "batches then lie in pageable RAM",
    "copies to the GPU are slower and block",
)  # fmt: skip
ONLY_MODEL: Final = Change(
    "arguments.save_only_model", True, "a save then gathers no optimizer states",
    "training cannot resume from the checkpoint; DeepSpeed refuses load_best_model_at_end",
)  # fmt: skip
SMALL_PREDICTIONS: Final = Change(
    "Trainer.preprocess_logits_for_metrics", "lambda logits, labels: logits.argmax(-1)",
    "Trainer then keeps only what compute_metrics needs, not all logits",
    "nothing if the metrics use the predicted classes or tokens",
)  # fmt: skip
ONLY_LOSS: Final = Change(
    "arguments.prediction_loss_only", True, "the evaluation keeps no predictions",
    "compute_metrics is not called; the evaluation reports the loss only",
)  # fmt: skip
SHARDS_SAVED: Final = Change(
    "deepspeed.zero_optimization.stage3_gather_16bit_weights_on_model_save", False,
    "at stage 3 a save gathers the 16-bit weights of the whole model",
    "checkpoints then hold DeepSpeed shards; zero_to_fp32.py in the checkpoint folder merges them",
)  # fmt: skip


def batch(job: RunView) -> Proposals:
    """A smaller micro-batch with as many more of them: the same samples in each optimizer step."""
    before_forward = job.phase == "data"
    unknown = before_forward or job.activations_unknown
    held = None if unknown else job.of_the_batch
    change = smaller_batch(job)
    if job.phase not in (*ACTIVATION_PHASES, "data") or change is None or not (held or unknown):
        return
    if held is None:
        what = "; tensors computed before the model's forward grow with the samples" if before_forward else ""
        yield 2.0, replace(change, reason=change.reason + what)
        return
    saves = held * (1 - change.value / change.current)
    basis = (
        f"measured activations and loss grow with the samples: {change.value} of {change.current} samples hold "
        f"{held - saves:.2f} of {held:.2f} GiB"
    )
    reason = f"{change.reason}; activations and loss hold {held:.2f} GiB for {change.current} samples"
    yield saves, replace(change, reason=reason, saves_gib=round(saves, 2), basis=basis)


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
    return Change(
        "arguments.per_device_train_batch_size", smaller, f"{more}, so that a step sees the same samples",
        _BATCH_COST,
        current=samples,
    )  # fmt: skip


def checkpointing(job: RunView) -> Proposals:
    held = None if job.activations_unknown else job.gib("activations")
    if job.phase not in ACTIVATION_PHASES or job.checkpointing or not (held or job.activations_unknown):
        return
    name = name_in_version("activation_checkpointing", job.version("transformers"))
    change = FSDP_CHECKPOINTING if job.fsdp else replace(CHECKPOINTING, key=f"arguments.{name}")
    holds = f"activations hold {held:.2f} GiB; " if held is not None else ""
    yield held if held is not None else 1.0, replace(change, reason=holds + change.reason)


def fused_loss(job: RunView) -> Proposals:
    held = job.gib("loss")
    known = job.run.get("model_type") in LIGER_OPTIONS and job.hardware.get("device_type") in ("cuda", "xpu")
    if job.phase not in ACTIVATION_PHASES or not held or not known or job.argument("use_liger_kernel"):
        return
    vocabulary = job.run.get("vocabulary")
    words = f" over a vocabulary of {vocabulary:,}" if vocabulary else ""
    reason = f"logits and loss{words} hold {held:.2f} GiB; Liger's fused loss computes them in chunks"
    yield held, replace(FUSED_LOSS, reason=reason)


def half_precision(job: RunView) -> Proposals:
    """Autocast. Activations halve; each weight gets a 16-bit copy while it runs."""
    held = job.gib("activations")
    if job.phase not in ACTIVATION_PHASES or not held or job.has_bf16 is None or job.deepspeed or job.fsdp:
        return
    if job.argument("bf16") or job.argument("fp16") or not job.weights_in_fp32 or not job.parameters:
        return
    copies = job.parameters * 2 / GIB
    gain = held / 2 - copies
    name, why = ("bf16", "") if job.has_bf16 else ("fp16", " (this GPU has no bf16)")
    if gain > 0:
        yield gain, Change(
            f"arguments.{name}", True,
            f"16-bit matrix products{why} halve most of the {held:.2f} GiB of activations and add {copies:.2f} GiB of "
            "16-bit weight copies",
            "16-bit rounding in forward and backward; weights and optimizer stay in fp32; faster",
        )  # fmt: skip


def eager_attention(job: RunView) -> Proposals:
    held = job.gib("activations")
    if held and job.phase in ACTIVATION_PHASES and job.run.get("attention") == "eager":
        what = "eager attention keeps a sequence × sequence matrix for every head and layer"
        yield held, replace(SDPA, reason=f"{what}; activations hold {held:.2f} GiB")


def sequence_length(job: RunView) -> Proposals:
    longest, held = job.moment.get("longest_sequence"), job.of_the_batch
    if job.phase not in ACTIVATION_PHASES or longest is None or longest < 2 or not held:
        return
    saves = held * (1 - (longest // 2) / longest)
    yield saves, Change(
        "data.max_length", longest // 2,
        f"the longest sequence of the batch has {longest} tokens, and all others are padded to it",
        "longer texts are truncated; the model does not learn from the rest",
        round(saves, 2),
        f"{held:.2f} GiB of activations and loss, measured, grow at least linearly with the tokens: half the tokens "
        "save at least half",
    )  # fmt: skip


# What lives from step to step: weights, gradients, optimizer states; and the allocator.


def allocator(job: RunView) -> Proposals:
    """Segments that grow, against fragmentation."""
    settings = str(job.hardware.get("allocator_settings") or "").lower().replace(" ", "")
    if job.cause != "fragmentation" or not job.on_cuda:
        return
    cached = job.moment.get("fragmentation_gib")
    size = f"{cached:.2f} GiB" if cached is not None else "enough memory"
    reason = f"{size} was cached, in blocks too small for the request"
    if "expandable_segments:true" in settings:
        if job.argument("torch_empty_cache_steps") is None:
            # transformers 5.23: training_args.py, help of torch_empty_cache_steps, has the cost
            yield _FIRST, Change(
                "arguments.torch_empty_cache_steps", 1, reason + ", although segments are already expandable",
                "about 10% slower, according to transformers' documentation",
            )  # fmt: skip
        return
    yield _FIRST, Change(
        f"environment.{allocator_variable('cuda', job.version('torch'))}", "expandable_segments:True", reason,
        "nothing on Linux, but processes cannot share GPU tensors",
    )  # fmt: skip


def eight_bit(job: RunView) -> Proposals:
    """AdamW with 8-bit states."""
    held, row = _states(job), find_optimizer(job.optim)
    plain = row.algorithm == "AdamW" and row.bits == 32 and not row.unpaged
    without_kernels = job.optim.endswith(("_xla", "_npu_fused")) or not job.on_cuda
    if held is None or not plain or without_kernels or job.deepspeed or job.fsdp:
        return
    saves, basis = _eight_bit_saving(job, held)
    reason = (
        f"AdamW's states take {held:.2f} GiB; 8-bit states take about 2 bytes a parameter instead of 8, except for "
        "embeddings, which bitsandbytes keeps in 32 bit"
    )
    most = held * (1 - _EIGHT_BIT_BYTES / _FP32_STATES_BYTES) if saves is None else saves
    yield most, replace(EIGHT_BIT, reason=reason, saves_gib=saves, basis=basis)


def paged(job: RunView) -> Proposals:
    """8-bit states that may leave the GPU."""
    held, row = job.gib("optimizer"), find_optimizer(job.optim)
    if not held or job.phase not in _ON_THE_GPU or not job.on_cuda or job.deepspeed or job.fsdp:
        return
    if row.unpaged or (row.algorithm, row.packages, row.bits) != ("AdamW", ("bitsandbytes",), 8):
        return
    yield held, Change(
        "arguments.optim", paged_form(job.optim),
        f"CUDA then moves the {held:.2f} GiB of 8-bit states to RAM when the GPU is full",
        "a step waits for the bus when states were moved; the same result; not on Windows or WSL2",
    )  # fmt: skip


def fused_optimizer(job: RunView) -> Proposals:
    weights = job.gib("weights")
    if job.phase != "optimizer" or job.optim != "adamw_torch" or job.deepspeed or not job.on_cuda:
        return
    if not weights or not job.trainable or not job.parameters:
        return
    copy = weights * job.trainable / job.parameters
    yield copy, replace(FUSED_ADAMW, reason=f"{FUSED_ADAMW.reason}; here they have {copy:.2f} GiB")


def base_weights(job: RunView) -> Proposals:
    """Frozen fp32 weights in 16 bit, if only adapters are trained."""
    held = job.gib("weights")
    if not held or not job.trains_adapters or not job.weights_in_fp32:
        return
    if job.phase not in (*_ON_THE_GPU, "evaluate") or not job.has_bf16:
        return
    parameters = (job.parameters or 0) - (job.trainable or 0)
    frozen = parameters * 4 / GIB
    if frozen <= held:
        yield frozen / 2, Change(
            "model.dtype", "bfloat16",
            f"the frozen weights take {frozen:.2f} GiB in fp32",
            "bf16 rounding in forward and backward; the adapters stay in fp32 (PEFT casts them up)",
            round(frozen / 2, 2), f"{parameters:,} frozen parameters, 2 bytes each instead of 4",
        )  # fmt: skip


def adapters(job: RunView) -> Proposals:
    held = job.model_states
    if job.phase not in _ON_THE_GPU or job.trains_adapters or not job.trainable or not held:
        return
    whole = f"gradients and optimizer states of the whole model take {held:.2f} GiB"
    yield held, replace(ADAPTERS, reason=f"{whole}; those of LoRA adapters are small")


def sharding(job: RunView) -> Proposals:
    """Gradients and states split over the GPUs of the job."""
    held, processes = job.model_states, job.run.get("world_size", 1)
    if not held or processes < 2 or job.fsdp or job.phase not in _ON_THE_GPU or job.trains_adapters:
        return
    stage = 0 if job.stage is None and not job.deepspeed else job.stage
    name, splits = "zero2", "splits gradients and optimizer states"
    if stage == 2:
        name, splits, held = "zero3", "also splits the weights", job.gib("weights")
    if stage is None or stage >= 3 or not held:
        return
    yield held * (1 - 1 / processes), Change(
        "arguments.deepspeed", f"{name}.json",
        f"`memkit ds copy {name}` {splits} over the {processes} processes; each now holds a full copy",
        "more communication between GPUs in each step; DeepSpeed also keeps fp32 master weights",
    )  # fmt: skip


def offload(job: RunView) -> Proposals:
    """ZeRO-Offload: gradients and states in RAM, the optimizer step on the CPU."""
    held = job.model_states
    if not held or job.fsdp or not job.on_cuda or job.phase not in _ON_THE_GPU or job.trains_adapters:
        return
    if (job.deepspeed and job.stage is None) or job.argument("deepspeed_offload_optimizer"):
        return
    if job.states_in_ram or "CPUAdam" in " ".join(job.optimizers):
        return  # they are there already
    ram = job.hardware.get("ram_limit_gib") or job.hardware.get("ram_gib")
    needs = job.states_gib_per(_OFFLOADED_BYTES)
    if needs is None or (ram and needs > ram):
        return
    name = "zero3-offload-optimizer" if job.stage == 3 else "zero2-offload"
    yield held, Change(
        "arguments.deepspeed", f"{name}.json",
        f"`memkit ds copy {name}` moves gradients and optimizer states, {held:.2f} GiB on this GPU, to RAM",
        f"AdamW runs on the CPU and each step transfers over the bus; up to {needs:.1f} GiB of RAM (20 bytes a "
        "parameter); DeepSpeed compiles its CPU optimizer once",
    )  # fmt: skip


def _states(job: RunView) -> float | None:
    """What the optimizer's states hold, or will hold where the first step is making them."""
    if job.phase not in _ON_THE_GPU:
        return None
    held = job.gib("optimizer")
    if job.phase == "optimizer":
        return max(held or 0.0, job.states_gib_per(_FP32_STATES_BYTES) or 0.0) or None
    return held or None


def _eight_bit_saving(job: RunView, held: float) -> tuple[float | None, str | None]:
    """GiB, if the table of modules has the embeddings, and the measured states are AdamW's in fp32."""
    embeddings, trainable = job.embedding_parameters, job.trainable
    measured = job.gib("optimizer")
    if embeddings is None or trainable is None or not measured or embeddings > trainable:
        return None, None
    if abs(measured - trainable * _FP32_STATES_BYTES / GIB) > 0.02 * measured:
        return None, None  # 16-bit states, or states on other devices: the arithmetic does not hold
    saves = (trainable - embeddings) * (_FP32_STATES_BYTES - _EIGHT_BIT_BYTES) / GIB
    basis = (
        f"{held:.2f} GiB of states, measured, at 8 bytes a parameter; the {trainable - embeddings:,} of {trainable:,} "
        f"parameters that are not embeddings then take {_EIGHT_BIT_BYTES:.2f}"
    )
    return round(saves, 2), basis


# Outside the training step on the GPU: evaluation, saving, and host RAM.


def gathered_predictions(job: RunView) -> Proposals:
    """Predictions moved to RAM as the evaluation goes on, or made small before they are kept."""
    if job.phase != "evaluate" or job.keeps_no_predictions or job.argument("batch_eval_metrics"):
        return
    if job.argument("eval_accumulation_steps") is None:
        yield _whole_gpu(job), Change(
            "arguments.eval_accumulation_steps", 16,
            "with compute_metrics, Trainer keeps all predictions on the GPU until the evaluation ends; this moves "
            "them to RAM every 16 batches",
            "the evaluation waits for these copies, and RAM must hold all predictions (for a language model samples × "
            "tokens × vocabulary)",
        )  # fmt: skip
    yield _whole_gpu(job) / 2, SMALL_PREDICTIONS


def only_loss(job: RunView) -> Proposals:
    if job.phase == "evaluate" and not job.keeps_no_predictions:
        what = " (already so if the Trainer has no compute_metrics)"
        yield 0.0, replace(ONLY_LOSS, reason=ONLY_LOSS.reason + what)


def evaluation_batch(job: RunView) -> Proposals:
    samples = job.count("per_device_eval_batch_size")
    if job.phase == "evaluate" and samples is not None and samples > 1:
        yield _whole_gpu(job) * 0.75, Change(
            "arguments.per_device_eval_batch_size", samples // 2,
            f"evaluation batches have {samples} samples, whatever the training batch size",
            "a slower evaluation; the metrics are the same",
        )  # fmt: skip


def saving(job: RunView) -> Proposals:
    if job.phase != "save":
        return
    if job.stage == 3:
        yield 2.0, SHARDS_SAVED
    if not job.argument("save_only_model") and (job.deepspeed or job.fsdp):
        yield 1.0, ONLY_MODEL


def loader(job: RunView) -> Proposals:
    if workers := job.count("dataloader_num_workers"):
        yield 3.0, Change(
            "arguments.dataloader_num_workers", workers // 2,
            f"each of the {workers} worker processes holds its own copy of the data, and prefetched batches",
            "loading may become too slow for the GPU; watch the step time",
        )  # fmt: skip


def pinned_batches(job: RunView) -> Proposals:
    if job.argument("dataloader_pin_memory") is True and job.on_cuda:
        yield 1.0, PAGEABLE_BATCHES


def buffers_in_ram(job: RunView) -> Proposals:
    states, device = job.states_in_ram, job.argument("deepspeed_offload_optimizer")
    offloaded = "CPUAdam" in " ".join(job.optimizers) or (job.deepspeed and states > 0) or device == "cpu"
    if not offloaded or device == "nvme":
        return
    what = f"the {states:.2f} GiB of optimizer states in RAM" if states else "the optimizer states in RAM"
    yield 4.0, Change(
        "arguments.deepspeed", "zero3-infinity-optimizer.json",
        f"`memkit ds copy zero3-infinity-optimizer --nvme-path DIR` moves {what} to NVMe, with buffers sized for this "
        "machine",
        "each step reads and writes all states on the disk; needs local NVMe",
    )  # fmt: skip


def _whole_gpu(job: RunView) -> float:
    """Without categories, the change to what usually holds most comes first."""
    return 1.0 + (job.gib("loss") or 0.0)


Rule = Callable[[RunView], Proposals]

_DEVICE: Final[tuple[Rule, ...]] = (
    allocator, batch, checkpointing, fused_loss, eager_attention, half_precision, fused_optimizer, eight_bit, paged,
    base_weights, sharding, offload, adapters, sequence_length, evaluation_batch, gathered_predictions, only_loss,
    saving,
)  # fmt: skip
_HOST: Final[tuple[Rule, ...]] = (loader, buffers_in_ram, pinned_batches)

_OTHER_TRAINING: Final[tuple[Rule, ...]] = (adapters, sequence_length, only_loss)
"""These change what is trained, or what an evaluation reports: they come last."""

_NOTICED: Final = 0.002
"""Share of the GPU. Less is within the allocator's rounding: its segments have 2 to 20 MiB each."""


def suggest(
    run: RunRecord, moment: Mapping[str, Any], *, modules: ModulesRecord | None = None, limit: int = 3
) -> list[Change]:
    """The changes that save most for this job, largest first; changes to what is trained come last.

    If the largest have no figure, the last place goes to a change with a measured saving, if there is one.

    Args:
        run: the `run` record.
        moment: an `OomRecord`, or the `StepRecord` of the highest peak; `cause` in it selects the kind of change.
        modules: the `modules` record, which gives the saving of an 8-bit optimizer.
        limit: maximum number of changes.
    """
    job = RunView(run, moment, modules)
    if job.cause == "kernel resources":
        return []
    rules = _HOST if job.cause in ("host memory", "shared memory") else _DEVICE
    proposals = [
        (rule in _OTHER_TRAINING, -at_most_gib, change)
        for rule in rules
        for at_most_gib, change in rule(job)
        if not _too_little(job, at_most_gib)
    ]
    chosen: dict[str, Change] = {}
    for _, _, change in sorted(proposals, key=lambda proposal: proposal[:2]):
        chosen.setdefault(change.key, change)  # two values for one setting are no advice
    changes = list(chosen.values())
    first, measured = changes[:limit], [change for change in changes if change.saves_gib is not None]
    if len(first) > 1 and measured and measured[0] not in first:
        return [*first[:-1], measured[0]]  # it is the one to count on
    return first


def _too_little(job: RunView, at_most_gib: float) -> bool:
    """Whether a change costs something and saves nothing noticeable, such as smaller states of a few adapters."""
    capacity = job.hardware.get("capacity_gib")
    return capacity is not None and bool(job.categories) and 0 < at_most_gib < _NOTICED * capacity
