"""What to change where only the message is known: no figure, and no claim that a change fits this job."""

from __future__ import annotations

from typing import Final

from hf_memkit.oom.change import Change
from hf_memkit.oom.message import OomMessage

__all__ = ["without_records"]

_SMALLER: Final = (
    Change(
        "arguments.per_device_train_batch_size", "half",
        "with gradient_accumulation_steps doubled each step sees the same samples, and activations halve",
        "the same result up to rounding; more and smaller forwards a step",
    ),
    Change(
        "arguments.activation_checkpointing", True,
        "layers keep their input and compute the rest again in backward "
        "(before transformers 5.23: gradient_checkpointing)",
        "about one more forward pass a step (Chen et al. 2016, arXiv 1604.06174)",
    ),
    Change(
        "arguments.optim", "adamw_bnb_8bit",
        "AdamW's states take 2 bytes a parameter instead of 8",
        "states are rounded to 8 bit (Dettmers et al. 2021, arXiv 2110.02861); the package bitsandbytes",
    ),
)  # fmt: skip


_IN_EVALUATION: Final = (
    Change(
        "arguments.per_device_eval_batch_size", "half",
        "an evaluation's batches have their own size, whatever the training batch has",
        "none but time: the metrics are the same",
    ),
    Change(
        "arguments.eval_accumulation_steps", 16,
        "with compute_metrics Trainer keeps every prediction on the card until the evaluation ends; so they go to RAM",
        "the evaluation waits for those copies, and RAM must hold all predictions",
    ),
    Change(
        "Trainer.preprocess_logits_for_metrics", "lambda logits, labels: logits.argmax(-1)",
        "only what compute_metrics needs is kept of each batch, instead of all logits",
        "none, if the metrics are computed from the predicted classes or tokens",
    ),
)  # fmt: skip

_IN_SAVE: Final = (
    Change(
        "arguments.save_only_model", True,
        "optimizer states are then not gathered for the checkpoint (FSDP, ZeRO-3)",
        "training cannot be resumed from such a checkpoint",
    ),
)  # fmt: skip

_IN_LOAD: Final = (
    Change(
        "model.dtype", "bfloat16",
        "weights that are only read (adapters are trained beside them) take 2 bytes a parameter instead of 4",
        "forward and backward are rounded to bf16; not for weights that are trained themselves",
    ),
)  # fmt: skip

_BY_PHASE: Final[dict[str, tuple[Change, ...]]] = {
    "evaluate": _IN_EVALUATION,
    "save": _IN_SAVE,
    "load": _IN_LOAD,
    "optimizer": (_SMALLER[2],),  # activations are gone by then
}


def without_records(message: OomMessage, cause: str, phase: str | None = None) -> tuple[Change, ...]:
    """Up to three changes that most often answer this cause in this phase; none where the job is not the matter."""
    if message.memory != "device" or message.form == "xla":
        return ()
    changes = _BY_PHASE.get(phase or "", _SMALLER)
    if message.device_type == "mps":
        return tuple(change for change in changes if change.key != "arguments.optim")  # bitsandbytes needs a GPU
    bare = cause == "unknown" and message.form in ("torch-device", "torch-device-bare") and message.free_bytes is None
    return changes if bare or cause in ("size", "fragmentation", "cap") else ()
