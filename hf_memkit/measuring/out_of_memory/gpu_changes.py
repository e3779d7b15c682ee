"""Changes that leave more GPU memory. In: a failed job. Out: a change, or None where it is on, refused or useless.
Without figures: those need records (`suggestions.py`)."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from hf_memkit.catalog.liger_support import LIGER_OPTIONS
from hf_memkit.catalog.optimizers import find_optimizer, paged_form
from hf_memkit.measuring.out_of_memory import suggestions
from hf_memkit.measuring.out_of_memory.change import Change
from hf_memkit.measuring.out_of_memory.device_tools import tools_of
from hf_memkit.measuring.out_of_memory.failed_job import FailedJob, unless
from hf_memkit.measuring.out_of_memory.other_names import LENGTHS, PIXELS

_BITSANDBYTES: Final = (None, "cuda", "rocm")
"""Devices with its optimizers. Its 4-bit weights also run on those of `_FOUR_BIT` (bitsandbytes 0.50: README)."""
_FOUR_BIT: Final = (*_BITSANDBYTES, "xpu", "hpu")


def batch(failed: FailedJob) -> Change | None:
    """A smaller micro-batch; that of the evaluation in one."""
    if failed.trace.phase == "evaluate":
        return eval_batch(failed)
    samples = failed.samples
    if samples is not None:
        if samples < failed.larger_by:
            return None
        return suggestions.smaller_batch(failed.job, samples / failed.larger_by if failed.larger_by > 1 else None)
    value = "smaller" if failed.larger_by > 1 else "half"
    return Change(
        "arguments.per_device_train_batch_size", value,
        "activations halve; double gradient_accumulation_steps, so that a step sees the same samples",
        "more, smaller forward passes a step; the same result up to rounding",
    )  # fmt: skip


def eval_batch(failed: FailedJob) -> Change | None:
    return failed.halved(
        "per_device_eval_batch_size",
        "evaluation batches have their own size, whatever the training batch size",
        "a slower evaluation; the metrics are the same",
    )


def length(failed: FailedJob) -> Change | None:
    attention = failed.trace.place == "attention"
    if failed.uses("diffusers"):
        return failed.halved(
            "resolution", "activations grow with the square of it", "smaller pictures", unknown="smaller"
        )
    if failed.uses("vision tower"):
        grows = "attention scores grow with the square of" if attention else "activations grow with"
        return failed.halved(
            failed.named(PIXELS),
            f"in the vision tower, {grows} an image's pixels, whatever the length of the text", "coarser images",
            otherwise="processor.max_pixels",
        )  # fmt: skip
    grows = "attention scores grow with its square" if attention else "activations and logits grow with it"
    return failed.halved(
        failed.named(LENGTHS), f"all texts of a batch are padded to its longest, and {grows}",
        "longer texts are truncated; the model does not learn from the rest",
        otherwise="data.max_length",
    )  # fmt: skip


def checkpointing(failed: FailedJob) -> Change | None:
    if failed.uses("checkpointing"):
        return None
    if failed.uses("FSDP"):
        return suggestions.FSDP_CHECKPOINTING
    if failed.uses("diffusers"):
        return replace(suggestions.CHECKPOINTING, key="arguments.gradient_checkpointing")
    old = " (before transformers 5.23: gradient_checkpointing)"
    return replace(suggestions.CHECKPOINTING, reason=suggestions.CHECKPOINTING.reason + old)


def fused_loss(failed: FailedJob) -> Change | None:
    """Liger's, where it has kernels for this model and they are used: in training."""
    model_type = failed.trace.model_type
    unknown_model = model_type is not None and model_type not in LIGER_OPTIONS
    if failed.uses("liger", "chunked loss", "label smoothing", "diffusers") or unknown_model:
        return None
    if failed.trace.phase == "evaluate":
        return None
    if failed.message.device_type not in (None, "cuda", "rocm", "xpu"):
        return None
    models = "" if model_type else " (Llama, Qwen, Gemma, Mistral and others, not GPT-2)"
    return replace(suggestions.FUSED_LOSS, reason=suggestions.FUSED_LOSS.reason + models)


def chunked_loss(failed: FailedJob) -> Change | None:
    if failed.uses("liger", "chunked loss") or failed.trace.phase == "evaluate":
        return None
    if failed.uses("trl"):
        return Change(
            "command", "pip install -U trl",
            "SFTTrainer of trl 1.16 and later does not compute the logits of a whole batch at once",
            "a new version of trl; for its other trainers (DPO, GRPO), set use_liger_kernel",
        )  # fmt: skip
    smoothed = failed.argument("label_smoothing_factor") or "…"
    options = f", label_smoothing={smoothed}" if failed.uses("label smoothing") else ""
    instead = "; it smooths labels too, so omit label_smoothing_factor, which needs all logits"
    return Change(
        "model_parts.chunked_loss", f"hf_memkit.components.chunked_loss.install(model{options})",
        "the technique chunked-loss computes loss and logits of a causal language model a few tokens at a time"
        + (instead if options else ""),
        "no logits in the training output; about the same time",
    )  # fmt: skip


def attention(failed: FailedJob) -> Change | None:
    if failed.uses("flash attention"):
        return None
    if failed.uses("diffusers"):
        name = "enable_xformers_memory_efficient_attention"
        return None if failed.argument(name) else Change(
            f"arguments.{name}", True, "attention then stores no scores, heads × pixels² numbers a layer",
            "the package xformers; PyTorch 2 and a recent diffusers do this without it",
        )  # fmt: skip
    if failed.uses("SDPA"):
        if failed.message.device_type not in (None, "cuda", "rocm"):
            return None
        return Change(
            "model.attn_implementation", "flash_attention_2",
            "SDPA falls back to full score matrices when no fused kernel supports the mask or the types; flash "
            "attention has no score matrices and needs no padding mask",
            "the package flash-attn, an Ampere GPU or later, and 16-bit computation",
        )  # fmt: skip
    return suggestions.SDPA


def eight_bit(failed: FailedJob) -> Change | None:
    """AdamW's states in 8 bit; paged where they are already, or that was not enough. Not of a training that resumes:
    the checkpoint's states are another optimizer's."""
    if failed.message.device_type not in _BITSANDBYTES or failed.uses("DeepSpeed", "FSDP", "paged optimizer"):
        return None
    if failed.resumes:
        return None
    optim = failed.job.optim
    small = find_optimizer(optim).bits == 8 or failed.trace.library == "bitsandbytes"
    if small or failed.trace.library == "torchao":
        if failed.platform in ("Windows", "WSL2"):
            return None  # managed memory fails there
        return Change(
            "arguments.optim", paged_form(optim),
            "CUDA moves paged states to RAM when the GPU is full",
            "a step waits for the bus when states were moved; not on Windows or WSL2; the package bitsandbytes",
            current=optim or None,
        )  # fmt: skip
    if optim and not optim.lower().startswith("adamw"):
        return None  # Adafactor, LOMO, SGD and the like hold less than 8-bit AdamW, or are another algorithm
    if failed.uses("diffusers"):
        plain = suggestions.EIGHT_BIT.reason.partition(";")[0]
        return replace(suggestions.EIGHT_BIT, key="arguments.use_8bit_adam", value=True, reason=plain)
    return replace(suggestions.EIGHT_BIT, current=optim or None)


def fused_optimizer(failed: FailedJob) -> Change | None:
    optim = failed.job.optim
    if failed.uses("fused optimizer") or failed.trace.library != "PyTorch" or optim not in ("", "adamw_torch"):
        return None
    return replace(suggestions.FUSED_ADAMW, current=optim or None)


def offload(failed: FailedJob) -> Change | None:
    if failed.uses("offload", "FSDP", "adapters") or failed.message.device_type not in (None, "cuda", "rocm"):
        return None
    if failed.resumes:
        return None
    name = "zero3-offload-optimizer" if failed.uses("ZeRO-3") else "zero2-offload"
    return Change(
        "arguments.deepspeed", f"{name}.json",
        f"`memkit ds copy {name}` moves gradients and optimizer states to RAM",
        "AdamW runs on the CPU and each step transfers over the bus; up to 20 bytes of RAM a parameter",
    )  # fmt: skip


def adapters(failed: FailedJob) -> Change | None:
    return None if failed.uses("adapters") or failed.resumes else suggestions.ADAPTERS


# The weights themselves.


half_weights = unless(
    Change(
        "model.dtype", "bfloat16",
        "weights take 2 bytes a parameter instead of 4; transformers 5 already loads a 16-bit checkpoint in 16 bit",
        "bf16 rounding in forward and backward; weights that are trained lose small updates, so train adapters",
    ),
    uses=("16-bit weights", "quantized weights"),
)  # fmt: skip


def four_bit(failed: FailedJob) -> Change | None:
    if failed.message.device_type not in _FOUR_BIT or failed.argument("load_in_4bit"):
        return None
    if failed.uses("quantized weights") and not failed.argument("load_in_8bit"):
        return None  # frames show bitsandbytes' weights, most likely in 4 bit
    return Change(
        "model.quantization_config", "BitsAndBytesConfig(load_in_4bit=True, …)",
        "weights take about 0.6 bytes a parameter instead of 2; LoRA adapters are trained on top (QLoRA)",
        "a different training: base weights stay frozen, rounded to 4 bit (Dettmers et al. 2023, arXiv 2305.14314); "
        "the packages bitsandbytes and peft",
    )  # fmt: skip


def sharded_weights(failed: FailedJob) -> Change | None:
    if failed.message.device_type == "mps":
        return None
    if failed.uses("FSDP"):
        return Change(
            "arguments.fsdp_config", {"cpu_ram_efficient_loading": True},
            "one rank loads the weights in RAM and each GPU gets its share; make TrainingArguments before "
            "from_pretrained, and set no device_map",
            "nothing on a model that from_pretrained loads",
        )  # fmt: skip
    if failed.uses("ZeRO-3"):
        return Change(
            "arguments.deepspeed", "zero3-offload.json",
            "`memkit ds copy zero3-offload` keeps the weights in RAM. TrainingArguments must exist before "
            "from_pretrained: only then does ZeRO-3 split the weights while they load",
            "all weights cross the bus in every pass; much RAM",
        )  # fmt: skip
    if failed.uses("quantized weights"):
        return Change(
            "model.device_map", "auto", "splits the layers over the GPUs of one process",
            "several GPUs, of which one computes at a time; not with torchrun, DeepSpeed or FSDP",
        )  # fmt: skip
    return Change(
        "arguments.deepspeed", "zero3.json",
        "`memkit ds copy zero3` splits the weights over several GPUs, as FSDP's full_shard does; make "
        "TrainingArguments before from_pretrained, and set no device_map",
        "several GPUs, which exchange the weights in every pass; with one GPU, zero3-offload keeps them in RAM",
    )  # fmt: skip


ALL_ON_ONE_GPU: Final = Change(
    "model.device_map", '{"": 0}', "places all weights on one GPU, or fails with sizes if they do not fit", "nothing"
)


def smaller_model(failed: FailedJob) -> Change | None:
    return Change(
        "model.name", "a smaller model", "these weights alone do not fit, whatever the batch size", "another model",
        current=failed.argument("model_name_or_path"),
    )  # fmt: skip


# A checkpoint that is read.


def old_processes(failed: FailedJob) -> Change | None:
    tool = tools_of(failed.message.device_type).processes
    if not tool:
        return None
    return Change(
        "command", tool,
        "lists the processes on the GPU: an earlier run, another notebook or a second copy of the model may still "
        "hold it",
        "nothing",
    )  # fmt: skip


def fresh_optimizer(failed: FailedJob) -> Change | None:
    if not failed.resumes:
        return None
    where = "into RAM"
    if failed.message.memory == "device":
        where = "onto each GPU where there are several processes (transformers 5.23: trainer.py 3964)"
    return Change(
        "model.from_pretrained", "CHECKPOINT, without resume_from_checkpoint",
        f"Trainer loads the optimizer's states, 8 bytes a parameter for AdamW, {where}; a new training from the "
        "checkpoint's weights loads none. With resume_from_checkpoint keep optim, which alone can load these states",
        "moments, learning rate schedule and the position in the data begin anew",
    )  # fmt: skip


BEST_MODEL_LATER: Final = Change(
    "arguments.load_best_model_at_end", False,
    "after training, the GPU still holds optimizer and gradients; trainer.state.best_model_checkpoint names the "
    "folder, which from_pretrained reads in a new process",
    "the Trainer keeps the last weights, and save_total_limit no longer spares the best checkpoint",
)  # fmt: skip
NEW_PROCESS: Final = Change(
    "model.from_pretrained", "CHECKPOINT, in a new process",
    "training had ended, and its process still holds optimizer, gradients and data; save, merge or evaluate in a "
    "second script, which reads the last checkpoint",
    "another script; the job must save a checkpoint at its last step",
)  # fmt: skip


# Evaluation, generation, saving.


def accumulated(failed: FailedJob) -> Change | None:
    if failed.argument("prediction_loss_only") or failed.argument("batch_eval_metrics"):
        return None
    return failed.halved(
        "eval_accumulation_steps",
        "with compute_metrics, Trainer keeps all predictions on the GPU until the evaluation ends; this moves them to "
        "RAM earlier",
        "the evaluation waits for these copies, and RAM must hold all predictions",
        unknown=16,
    )  # fmt: skip


small_predictions = unless(
    suggestions.SMALL_PREDICTIONS, "prediction_loss_only", uses=("preprocess_logits_for_metrics",)
)
batch_metrics = unless(
    Change(
        "arguments.batch_eval_metrics", True,
        "Trainer calls compute_metrics after each batch and keeps no predictions (transformers 4.42 and later)",
        "compute_metrics must take compute_result and add up its statistics",
    ),
    "batch_eval_metrics", "prediction_loss_only",
)  # fmt: skip
only_loss = unless(suggestions.ONLY_LOSS, "prediction_loss_only")


def vllm_share(failed: FailedJob) -> Change | None:
    if not failed.uses("vLLM"):
        return None
    return Change(
        "arguments.vllm_gpu_memory_utilization", "smaller",
        "vLLM in this process reserves this share of the GPU (trl: 0.3 by default); vllm_enable_sleep_mode=True frees "
        "it while the model trains",
        "vLLM generates fewer sequences at a time",
        current=failed.argument("vllm_gpu_memory_utilization"),
    )  # fmt: skip


def vllm_server(failed: FailedJob) -> Change | None:
    mode = failed.argument("vllm_mode")
    if mode == "server":
        return None
    return Change(
        "arguments.vllm_mode", "server",
        "`trl vllm-serve` then generates on GPUs of its own, and training has these for itself",
        "at least one more GPU",
        current=mode,
    )  # fmt: skip


def vllm_split(failed: FailedJob) -> Change | None:
    current = failed.job.count("vllm_tensor_parallel_size")
    return Change(
        "arguments.vllm_tensor_parallel_size", 2 if current is None else 2 * current,
        "each GPU then holds a share of vLLM's weights and KV cache",
        "several GPUs, which communicate for every token; the number of processes must be a multiple",
        current=current,
    )  # fmt: skip


def generated_length(failed: FailedJob) -> Change | None:
    name = "max_completion_length" if failed.uses("trl") else "generation_max_length"
    return failed.halved(
        name, "the KV cache grows with every generated token, and with generation_num_beams",
        "longer answers are truncated", unknown="smaller",
    )  # fmt: skip


def saved_shards(failed: FailedJob) -> Change | None:
    if failed.trace.library == "DeepSpeed" or failed.uses("ZeRO-3"):
        return suggestions.SHARDS_SAVED
    if failed.trace.library != "FSDP" and not failed.uses("FSDP"):
        return None
    return Change(
        "arguments.fsdp_config", {"state_dict_type": "SHARDED_STATE_DICT"},
        "each rank then writes its own shards, and none gathers the whole model. A full state dict needs "
        "FullStateDictConfig(offload_to_cpu=True, rank0_only=True), and RAM for the whole model",
        "a later merge of the shards, with `accelerate merge-weights`",
    )  # fmt: skip


only_model = unless(suggestions.ONLY_MODEL, "save_only_model")

MERGE_LATER: Final = Change(
    "model.merge_and_unload", "in RAM, after training",
    "the GPU also holds optimizer and gradients. Save the adapters alone (trainer.save_model), then load the base "
    "model with device_map='cpu' in a new process and merge there",
    "RAM for the whole model, and minutes",
)  # fmt: skip
