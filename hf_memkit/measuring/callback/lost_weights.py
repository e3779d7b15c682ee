"""Sentences about weights that Trainer does not read from a checkpoint, for the callback and for `memkit run`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Final

from transformers.trainer_utils import get_last_checkpoint

from hf_memkit.catalog.library_versions import is_on
from hf_memkit.components.resuming import is_loaded_from, lost_weights, lost_when_saved

_CAUSE: Final = "transformers saves them under other names than Trainer reads (huggingface/transformers, issue 43701)"


def why_not_resumed(model: Any, checkpoint: Path) -> str:
    """What Trainer does not restore from the checkpoint, and the fix; empty if it restores everything, or if the model
    has been loaded from there."""
    if is_loaded_from(model, checkpoint) or (lost := lost_weights(model, checkpoint)) is None:
        return ""
    load = f"{type(model).__name__}.from_pretrained({str(checkpoint)!r})"
    return (
        f"{checkpoint}: Trainer does not restore {lost}, such as {lost.names[0]}: {_CAUSE}. Load the model from it "
        f"before you make the Trainer: {load}"
    )


def why_not_the_best(model: Any, arguments: Any) -> str:
    """What `load_best_model_at_end` does not restore, and the fix; empty if it restores everything, or is off."""
    engine = arguments.deepspeed_plugin or arguments.fsdp or is_on(os.environ.get("ACCELERATE_USE_FSDP"))
    if not arguments.load_best_model_at_end or engine or (lost := lost_when_saved(model)) is None:
        return ""
    load = f"{type(model).__name__}.from_pretrained(trainer.state.best_model_checkpoint)"
    return (
        f"load_best_model_at_end: Trainer does not restore {lost}, such as {lost.names[0]}: {_CAUSE}. Set it to false "
        f"and metric_for_best_model to loss, and after train() load the best model: {load}"
    )


def resumed_checkpoint(arguments: Any, state: Any) -> Path | None:
    """The folder from which a training has resumed, as its first event shows it; None: it starts, or it is unknown."""
    if not state.global_step:
        return None
    given = arguments.resume_from_checkpoint
    folders = [Path(given)] if isinstance(given, str) else []
    folders.append(Path(arguments.output_dir) / f"checkpoint-{state.global_step}")
    return next((folder for folder in folders if folder.is_dir()), None)


def asked_checkpoint(arguments: Any, asked: Any) -> Path | None:
    """The folder of `train(resume_from_checkpoint=asked)`; None: it starts, or Trainer finds no checkpoint."""
    if asked is True:
        asked = get_last_checkpoint(arguments.output_dir) if Path(arguments.output_dir).is_dir() else None
    return Path(asked) if asked and Path(asked).is_dir() else None
