"""Setup → TrainingArguments."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

from hf_memkit import compat
from hf_memkit.errors import RunError
from hf_memkit.setup import Setup
from hf_memkit.zero.process_group import join_process_group

if TYPE_CHECKING:
    from transformers import TrainingArguments

__all__ = ["build_arguments", "prepared_rows"]


def build_arguments(
    setup: Setup,
    own: Mapping[str, Any] | None = None,
    arguments_class: type[TrainingArguments] | None = None,
) -> TrainingArguments:
    """The setup's TrainingArguments, for the transformers that is installed.

    Args:
        setup: whose `arguments.*` become keyword arguments, and `deepspeed.config` the DeepSpeed config.
        own: the user's keyword arguments, which win over the setup's.
        arguments_class: a subclass, such as `Seq2SeqTrainingArguments` or TRL's `SFTConfig`; None: the one that the
            setup's `trainer.arguments_class` names, or TrainingArguments.

    Raises:
        RunError: transformers refuses them.
    """
    if arguments_class is None:
        module, _, name = str(setup.get("trainer.arguments_class", "transformers:TrainingArguments")).partition(":")
        arguments_class = getattr(import_module(module), name)
    options = compat.to_installed_arguments({**setup.arguments, **(own or {})})
    if "deepspeed.config" in setup:
        options.setdefault("deepspeed", setup["deepspeed.config"])
    try:
        arguments = arguments_class(**options)
    except (TypeError, ValueError, ImportError) as error:
        text = str(error).splitlines()[0].rstrip(".")
        # Its own advice names an argument of another version; what helps is the same in all.
        cpu = "; to try it on a machine without a card: arguments={'use_cpu': True}" if "use_cpu" in text else ""
        raise RunError(f"TrainingArguments refuses this setup: {text}{cpu}") from error
    join_process_group(arguments)
    return arguments


def prepared_rows(setup: Setup) -> dict[str, Any]:
    """Arguments with which TRL's SFTTrainer trains on rows of `input_ids` and `labels` as they are; none for others.

    It would look for conversations otherwise, to mask and to cut them (trl 1.16.0: sft_trainer.py,
    `skip_prepare_dataset`). The labels say what `assistant_only_loss` would, which it refuses without conversations.
    """
    if setup.get("trainer.arguments_class") != "trl:SFTConfig":
        return {}
    options = {**(setup.get("arguments.dataset_kwargs") or {}), "skip_prepare_dataset": True}
    return {"dataset_kwargs": options, "assistant_only_loss": False}
