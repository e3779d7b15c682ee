"""Setup → TrainingArguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hf_memkit import compat
from hf_memkit.errors import RunError
from hf_memkit.training_setup import TrainingSetup
from hf_memkit.zero.process_group import join_process_group

if TYPE_CHECKING:
    from transformers import TrainingArguments

__all__ = ["build_arguments"]


def build_arguments(
    setup: TrainingSetup,
    own: Mapping[str, Any] | None = None,
    arguments_class: type[TrainingArguments] | None = None,
) -> TrainingArguments:
    """The setup's TrainingArguments, for the transformers that is installed.

    Args:
        setup: whose `arguments.*` become keyword arguments, and `deepspeed.config` the DeepSpeed config.
        own: the user's keyword arguments, which win over the setup's.
        arguments_class: a subclass, such as `Seq2SeqTrainingArguments` or TRL's `SFTConfig`.

    Raises:
        RunError: transformers refuses them.
    """
    from transformers import TrainingArguments

    options = compat.to_installed_arguments({**setup.arguments, **(own or {})})
    if "deepspeed.config" in setup:
        options.setdefault("deepspeed", setup["deepspeed.config"])
    try:
        arguments = (arguments_class or TrainingArguments)(**options)
    except (TypeError, ValueError, ImportError) as error:
        text = str(error).splitlines()[0].rstrip(".")
        # Its own advice names an argument of another version; what helps is the same in all.
        cpu = "; to try it on a machine without a card: arguments={'use_cpu': True}" if "use_cpu" in text else ""
        raise RunError(f"TrainingArguments refuses this setup: {text}{cpu}") from error
    join_process_group(arguments)
    return arguments
