"""What to change when only a message is known, its traceback and perhaps the arguments: without figures, and without
what frames or arguments show in use."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from hf_memkit.compat import current_name
from hf_memkit.liger_support import LIGER_OPTIONS
from hf_memkit.oom.change import Change
from hf_memkit.oom.message import OomMessage
from hf_memkit.oom.run_view import RunView, mapping
from hf_memkit.oom.suggestions import ONLY_LOSS, SHARDS_SAVED, SMALL_PREDICTIONS, smaller_batch
from hf_memkit.oom.traceback import Feature, Traced
from hf_memkit.optimizers import find_optimizer, paged_form

__all__ = ["grows_with_the_batch", "job_of", "without_records"]

_MOST: Final = 3

_DEFAULTS: Final = {
    "per_device_train_batch_size": 8, "per_device_eval_batch_size": 8, "gradient_accumulation_steps": 1,
    "dataloader_num_workers": 0,
}  # fmt: skip
"""Of TrainingArguments (transformers 4.4x to 5.23): what a file of arguments that leaves them out means."""

_LENGTHS: Final = ("max_length", "max_seq_length", "max_seq_len", "block_size", "cutoff_len", "model_max_length")
"""Names that scripts give the longest sequence (trl; transformers' examples; LLaMA-Factory)."""


def job_of(arguments: Mapping[str, Any]) -> RunView:
    """A job from a file's arguments, under current names and with transformers' defaults."""
    named = {current_name(name): value for name, value in arguments.items()}
    engine = "DeepSpeedEngine" if named.get("deepspeed") else ""
    return RunView({"arguments": {**_DEFAULTS, **named}, "engine": engine}, {})


@dataclass(frozen=True, slots=True)
class _Known:
    """`job`: without any arguments where none are known."""

    trace: Traced
    job: RunView
    device_type: str | None
    larger_by: float
    """How many times larger than the GPU the tensor alone is; below 1 where it is not."""
    in_use: frozenset[Feature]

    def uses(self, *features: Feature) -> bool:
        return any(feature in self.in_use for feature in features)

    def argument(self, name: str) -> Any:
        return self.job.argument(name)


Technique = Callable[[_Known], Change | None]


def without_records(
    message: OomMessage, cause: str, trace: Traced | None = None, job: RunView | None = None
) -> tuple[Change, ...]:
    """Up to three changes for this cause and place; none if the job is not the cause.

    Args:
        message, cause: the message and its cause.
        trace: what the traceback shows.
        job: from the user's arguments (`job_of`), if known.
    """
    trace, job = trace or Traced(), job or RunView({}, {})
    if message.memory != "device" or message.form in ("xla", "tensorflow", "vllm-cache", "vllm-start"):
        return ()
    bare = cause == "unknown" and message.form in ("torch-device", "torch-device-bare") and message.free_bytes is None
    if not bare and cause not in ("size", "fragmentation", "cap"):
        return ()
    limit = message.allowed_bytes or message.capacity_bytes
    larger_by = (message.requested_bytes or 0) / limit if limit else 0.0
    known = _Known(trace, job, message.device_type, larger_by, _in_use(trace, job))
    by_phase = _BY_PHASE.get(trace.phase or "", _SMALLER)
    techniques = _BY_PLACE[trace.place] if trace.place is not None else by_phase
    if larger_by > 1 and trace.place is None and by_phase is _SMALLER:
        techniques = (_batch, _length)  # all that makes one tensor smaller, whatever it is
    if trace.phase == "evaluate" and trace.place in ("logits", "cross entropy", "attention"):
        techniques = (_eval_batch, *techniques)
    found: dict[str, Change] = {}
    for technique in techniques:
        change = technique(known)
        if change is not None:
            found.setdefault(change.key, change)  # two values for one setting are no advice
    return tuple(found.values())[:_MOST]


def grows_with_the_batch(trace: Traced) -> bool:
    """Whether a smaller batch may shrink the allocation; False if it depends on the model alone."""
    model_only = ("optimizer states", "optimizer step", "gathered weights", "merged adapters")
    return trace.place not in model_only if trace.place else trace.phase not in ("load", "save", "optimizer")


def _in_use(trace: Traced, job: RunView) -> frozenset[Feature]:
    zero = mapping(mapping(job.argument("deepspeed")).get("zero_optimization"))
    adapters = ("use_peft", "lora_r", "lora_rank", "load_in_4bit", "load_in_8bit")
    fsdp_checkpoints = mapping(job.argument("fsdp_config")).get("activation_checkpointing")
    signs: tuple[tuple[Feature, object], ...] = (
        ("checkpointing", job.checkpointing or fsdp_checkpoints),
        ("liger", job.argument("use_liger_kernel")),
        ("label smoothing", job.argument("label_smoothing_factor")),
        ("DeepSpeed", job.deepspeed),
        ("FSDP", job.fsdp),
        ("fused optimizer", job.optim == "adamw_torch_fused"),
        ("paged optimizer", find_optimizer(job.optim).unpaged),
        ("SDPA", job.argument("attn_implementation") == "sdpa"),
        ("flash attention", "flash" in str(job.argument("attn_implementation"))),
        ("ZeRO-3", zero.get("stage") == 3),
        ("offload", mapping(zero.get("offload_optimizer")).get("device") in ("cpu", "nvme")),
        ("adapters", any(map(job.argument, adapters))),
    )
    return trace.in_use | {feature for feature, shown in signs if shown}


def _batch(known: _Known) -> Change | None:
    """A smaller micro-batch; that of the evaluation in one."""
    if known.trace.phase == "evaluate":
        return _eval_batch(known)
    if known.job.arguments:
        samples = known.job.count("per_device_train_batch_size") or 1
        if samples < known.larger_by:
            return None
        return smaller_batch(known.job, samples / known.larger_by if known.larger_by > 1 else None)
    value = "smaller" if known.larger_by > 1 else "half"
    return Change(
        "arguments.per_device_train_batch_size", value,
        "activations halve; double gradient_accumulation_steps, so that a step sees the same samples",
        "more, smaller forward passes a step; the same result up to rounding",
    )  # fmt: skip


def _eval_batch(known: _Known) -> Change | None:
    samples = known.job.count("per_device_eval_batch_size")
    if samples is not None and samples < 2:
        return None
    return Change(
        "arguments.per_device_eval_batch_size", "half" if samples is None else samples // 2,
        "evaluation batches have their own size, whatever the training batch size",
        "a slower evaluation; the metrics are the same",
        current=samples,
    )  # fmt: skip


def _length(known: _Known) -> Change | None:
    name = next((name for name in _LENGTHS if isinstance(known.argument(name), int)), None)
    current = known.argument(name) if name is not None else None
    if current is not None and current < 2:
        return None
    attention = known.trace.place == "attention"
    grows = "attention scores grow with its square" if attention else "activations and logits grow with it"
    return Change(
        "data.max_length" if name is None else f"arguments.{name}", "half" if current is None else current // 2,
        f"all texts of a batch are padded to its longest, and {grows}",
        "longer texts are truncated; the model does not learn from the rest",
        current=current,
    )  # fmt: skip


def _checkpointing(known: _Known) -> Change | None:
    if known.uses("checkpointing"):
        return None
    reason = "each layer keeps its input and recomputes its other activations in backward"
    cost = "about one more forward pass a step (Chen et al. 2016, arXiv 1604.06174)"
    if known.uses("FSDP"):
        # transformers refuses both switches together (trainer.py: "FSDP's activation_checkpointing").
        return Change("arguments.fsdp_config", {"activation_checkpointing": True}, reason, cost)
    old = " (before transformers 5.23: gradient_checkpointing)"
    return Change("arguments.activation_checkpointing", True, reason + old, cost)


def _fused_loss(known: _Known) -> Change | None:
    """Logits in chunks by Liger's kernels, where it has them for this model and they are used: in training."""
    trace = known.trace
    unknown_model = trace.model_type is not None and trace.model_type not in LIGER_OPTIONS
    if known.uses("liger", "chunked loss", "label smoothing") or unknown_model or trace.phase == "evaluate":
        return None
    if known.device_type not in (None, "cuda", "rocm", "xpu"):
        return None
    return Change(
        "arguments.use_liger_kernel", True,
        "Liger's fused loss computes the logits, tokens × vocabulary, in chunks"
        + ("" if trace.model_type else " (Llama, Qwen, Gemma, Mistral and others, not GPT-2)"),
        "the package liger-kernel; rounding differences; no logits in the training output",
    )  # fmt: skip


def _chunked_loss(known: _Known) -> Change | None:
    if known.uses("liger", "chunked loss") or known.argument("use_liger_kernel"):
        return None
    if known.uses("trl"):
        return Change(
            "command", "pip install -U trl",
            "SFTTrainer of trl 1.16 and later does not compute the logits of a whole batch at once",
            "a new version of trl; for its other trainers (DPO, GRPO), set use_liger_kernel",
        )  # fmt: skip
    smoothed = known.argument("label_smoothing_factor") or "…"
    options = f", label_smoothing={smoothed}" if known.uses("label smoothing") else ""
    instead = "; it smooths labels too, so omit label_smoothing_factor, which needs all logits"
    return Change(
        "model_parts.chunked_loss", f"hf_memkit.components.chunked_loss.install(model{options})",
        "the technique chunked-loss computes loss and logits of a causal language model a few tokens at a time"
        + (instead if options else ""),
        "no logits in the training output; about the same time",
    )  # fmt: skip


def _attention(known: _Known) -> Change | None:
    if known.uses("flash attention"):
        return None
    if known.uses("SDPA"):
        return Change(
            "model.attn_implementation", "flash_attention_2",
            "SDPA falls back to full score matrices when no fused kernel supports the mask or the types; flash "
            "attention has no score matrices and needs no padding mask",
            "the package flash-attn, an Ampere GPU or later, and 16-bit computation",
        )  # fmt: skip
    return Change(
        "model.attn_implementation", "sdpa",
        "eager attention stores its scores, heads × length² numbers a sequence and layer; SDPA does not",
        "rounding differences; no attention weights in the output; a model without SDPA fails to load",
    )  # fmt: skip


def _eight_bit(known: _Known) -> Change | None:
    """AdamW's states in 8 bit; paged where they are already, or that was not enough."""
    if known.device_type not in (None, "cuda", "rocm") or known.uses("DeepSpeed", "FSDP", "paged optimizer"):
        return None
    optim = known.job.optim
    small = find_optimizer(optim).bits == 8 or known.trace.library == "bitsandbytes"
    if small or known.trace.library == "torchao":
        return Change(
            "arguments.optim", paged_form(optim),
            "CUDA moves paged states to RAM when the GPU is full",
            "a step waits for the bus when states were moved; not on Windows or WSL2; the package bitsandbytes",
            current=optim or None,
        )  # fmt: skip
    if optim and not optim.startswith("adamw"):
        return None  # Adafactor, LOMO, SGD and the like hold less than 8-bit AdamW, or are another algorithm
    return Change(
        "arguments.optim", "adamw_bnb_8bit",
        "AdamW's states take 2 bytes a parameter instead of 8; paged_adamw_8bit also moves them to RAM when the GPU "
        "is full",
        "8-bit rounding of the states (Dettmers et al. 2021, arXiv 2110.02861); the package bitsandbytes",
        current=optim or None,
    )  # fmt: skip


def _fused_optimizer(known: _Known) -> Change | None:
    optim = known.job.optim
    if known.uses("fused optimizer") or known.trace.library != "PyTorch" or optim not in ("", "adamw_torch"):
        return None
    return Change(
        "arguments.optim", "adamw_torch_fused",
        "adamw_torch allocates temporaries as large as the trained parameters (torch: torch/optim/adam.py, foreach); "
        "the fused kernel needs none",
        "nothing: no slower, and the same result up to rounding",
        current=optim or None,
    )  # fmt: skip


def _offload(known: _Known) -> Change | None:
    if known.uses("offload", "FSDP", "adapters") or known.device_type not in (None, "cuda", "rocm"):
        return None
    name = "zero3-offload-optimizer" if known.uses("ZeRO-3") else "zero2-offload"
    return Change(
        "arguments.deepspeed", f"{name}.json",
        f"`memkit ds copy {name}` moves gradients and optimizer states to RAM",
        "AdamW runs on the CPU and each step transfers over the bus; up to 20 bytes of RAM a parameter",
    )  # fmt: skip


def _adapters(known: _Known) -> Change | None:
    if known.uses("adapters"):
        return None
    return Change(
        "adapter.LoraConfig", {"target_modules": "all-linear"},
        "gradients and optimizer states of LoRA adapters are small",
        "a different training: base weights stay frozen (Hu et al. 2021, arXiv 2106.09685); the package peft",
    )  # fmt: skip


def _accumulated(known: _Known) -> Change | None:
    if known.argument("prediction_loss_only") or known.argument("batch_eval_metrics"):
        return None
    current = known.argument("eval_accumulation_steps")
    if isinstance(current, int) and current < 2:
        return None
    return Change(
        "arguments.eval_accumulation_steps", current // 2 if isinstance(current, int) else 16,
        "with compute_metrics, Trainer keeps all predictions on the GPU until the evaluation ends; this moves them to "
        "RAM earlier",
        "the evaluation waits for these copies, and RAM must hold all predictions",
        current=current if isinstance(current, int) else None,
    )  # fmt: skip


def _small_predictions(known: _Known) -> Change | None:
    shown = known.uses("preprocess_logits_for_metrics") or known.argument("prediction_loss_only")
    return None if shown else SMALL_PREDICTIONS


def _only_loss(known: _Known) -> Change | None:
    return None if known.argument("prediction_loss_only") else ONLY_LOSS


def _vllm_share(known: _Known) -> Change | None:
    if not known.uses("vLLM"):
        return None
    return Change(
        "arguments.vllm_gpu_memory_utilization", "smaller",
        "vLLM in this process reserves this share of the GPU (trl: 0.3 by default); vllm_enable_sleep_mode=True frees "
        "it while the model trains",
        "vLLM generates fewer sequences at a time",
        current=known.argument("vllm_gpu_memory_utilization"),
    )  # fmt: skip


def _generated_length(known: _Known) -> Change | None:
    name = "max_completion_length" if known.uses("trl") else "generation_max_length"
    current = known.argument(name)
    return Change(
        f"arguments.{name}", current // 2 if isinstance(current, int) else "smaller",
        "the KV cache grows with every generated token, and with generation_num_beams",
        "longer answers are truncated",
        current=current,
    )  # fmt: skip


def _gathered(known: _Known) -> Change | None:
    """The whole model's weights, put together for one file."""
    if known.trace.library == "DeepSpeed":
        return SHARDS_SAVED
    return Change(
        "arguments.fsdp_config", {"state_dict_type": "SHARDED_STATE_DICT"},
        "each rank then writes its own shards, and none gathers the whole model",
        "a later merge of the shards, with `accelerate merge-weights`",
    )  # fmt: skip


def _only_model(known: _Known) -> Change | None:
    if known.argument("save_only_model"):
        return None
    return Change(
        "arguments.save_only_model", True,
        "the checkpoint then gathers no optimizer states (FSDP, ZeRO-3)",
        "training cannot resume from the checkpoint",
    )  # fmt: skip


def _merge_later(known: _Known) -> Change | None:
    return Change(
        "model.merge_and_unload", "in RAM, after training",
        "the GPU also holds optimizer and gradients. Save the adapters alone (trainer.save_model), then load the base "
        "model with device_map='cpu' in a new process and merge there",
        "RAM for the whole model, and minutes",
    )  # fmt: skip


def _half_weights(known: _Known) -> Change | None:
    if known.argument("dtype") in ("bfloat16", "float16") or known.argument("torch_dtype") in ("bfloat16", "float16"):
        return None
    return Change(
        "model.dtype", "bfloat16",
        "frozen weights, with trained adapters, take 2 bytes a parameter instead of 4",
        "bf16 rounding in forward and backward; not for weights that are trained",
    )  # fmt: skip


_SMALLER: Final[tuple[Technique, ...]] = (_batch, _checkpointing, _eight_bit, _length)
_LOSS: Final[tuple[Technique, ...]] = (_fused_loss, _chunked_loss, _batch, _length)
_PREDICTIONS: Final[tuple[Technique, ...]] = (_accumulated, _small_predictions, _only_loss)

_BY_PLACE: Final[dict[str, tuple[Technique, ...]]] = {
    "logits": _LOSS,
    "cross entropy": _LOSS,
    "attention": (_attention, _batch, _length, _checkpointing),
    "optimizer states": (_eight_bit, _offload, _adapters),
    "optimizer step": (_fused_optimizer, _eight_bit, _offload, _adapters),
    "recomputation": (_batch, _length, _eight_bit),
    "predictions of an evaluation": _PREDICTIONS,
    "generation": (_vllm_share, _eval_batch, _generated_length),
    "gathered weights": (_gathered, _only_model),
    "merged adapters": (_merge_later,),
}
_BY_PHASE: Final[dict[str, tuple[Technique, ...]]] = {
    "evaluate": (_eval_batch, _accumulated, _small_predictions),
    "save": (_only_model,),
    "load": (_half_weights,),
    "optimizer": (_eight_bit, _offload, _adapters),  # activations are gone by then
}
