"""Setup → the objects that train: TrainingArguments, model, optimizer, Trainer's keyword arguments.

The order matters: TrainingArguments first and kept alive, because under ZeRO-3 they tell `from_pretrained` and
`from_config` to split the weights while they are made (transformers:src/transformers/integrations/deepspeed.py).
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from hf_memkit import compat
from hf_memkit.errors import MissingPackageError, RunError
from hf_memkit.models import hub_reachable, quiet_transformers
from hf_memkit.presets import find_preset
from hf_memkit.training_setup import TrainingSetup
from hf_memkit.zero.process_group import join_process_group

if TYPE_CHECKING:
    from transformers import PreTrainedModel, TrainingArguments

__all__ = ["build_arguments", "build_model", "optimizer_class_and_options", "optimizer_options", "require_packages"]

_EXTRA = {"torchao": "gpu", "bitsandbytes": "gpu", "liger_kernel": "gpu"}


def require_packages(preset: str) -> None:
    """Makes sure that what the preset imports is installed.

    Raises:
        MissingPackageError: a package is missing; names the command that installs it.
    """
    for package in find_preset(preset).packages:
        if importlib.util.find_spec(package) is None:
            what = f"'hf-memkit[{_EXTRA[package]}]'" if package in _EXTRA else package
            raise MissingPackageError(
                f"variant {preset!r} needs {package}, which is not installed; run: pip install {what}"
            )


def build_arguments(setup: TrainingSetup) -> TrainingArguments:
    """The setup's TrainingArguments, for the transformers that is installed.

    Raises:
        RunError: transformers refuses them.
    """
    from transformers import TrainingArguments

    options = compat.to_installed_arguments(setup.arguments)
    if "deepspeed.config" in setup:
        options["deepspeed"] = setup["deepspeed.config"]
    try:
        arguments = TrainingArguments(**options)
    except (ValueError, ImportError) as error:
        raise RunError(f"TrainingArguments refuses this setup: {str(error).splitlines()[0]}") from error
    join_process_group(arguments)
    return arguments


def build_model(setup: TrainingSetup, say: Callable[[str], None]) -> PreTrainedModel:
    """The setup's model, with its vocabulary padded and its adapters added.

    Where the weights cannot be had, the model is built from the setup's architecture with random weights; `say` is
    told so.

    Raises:
        RunError: the weights cannot be loaded, and there is no architecture to build from.
    """
    import torch

    torch.manual_seed(int(setup["arguments.seed"]))  # random weights are the same in every run
    dtype = getattr(torch, setup["model.dtype"])
    with quiet_transformers():
        model = _load(setup, dtype, say)
        multiple = setup.get("model.pad_vocabulary_to_multiple_of")
        if multiple:
            # New rows start at the mean of the old ones, so that they take next to no probability.
            model.resize_token_embeddings(pad_to_multiple_of=multiple)
        if setup.section("adapter"):
            model = _add_adapters(model, setup.section("adapter"))
    return model


def _load(setup: TrainingSetup, dtype: Any, say: Callable[[str], None]) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    name, architecture = setup["model.name"], setup.get("model.architecture")
    if setup["model.origin"] != "architecture":
        try:
            # Asked once whether the hub answers: otherwise each file waits for its own time-out.
            return AutoModelForCausalLM.from_pretrained(name, dtype=dtype, local_files_only=not hub_reachable())
        except (OSError, ValueError) as error:
            raise RunError(f"the weights of {name!r} cannot be loaded: {str(error).splitlines()[0]}") from error
    values = dict(architecture)
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    if setup.get("arguments.use_cpu"):
        say("The small model starts from random weights.")
    else:
        say(f"WARNING: {name} cannot be reached. Training starts from RANDOM weights: this is no fine-tuning.")
    return model


def _add_adapters(model: Any, options: dict[str, Any]) -> Any:
    import warnings

    from peft import LoraConfig, get_peft_model

    with warnings.catch_warnings():
        # PEFT warns that it sets fan_in_fan_out for GPT-2's Conv1D itself, as it should.
        warnings.filterwarnings("ignore", message="fan_in_fan_out")
        return get_peft_model(model, LoraConfig(**options))


def optimizer_options(setup: TrainingSetup) -> dict[str, Any] | None:
    """Keyword arguments of the setup's own optimizer, or None where Trainer's `optim` does.

    Learning rate, betas and epsilon come from the TrainingArguments fields, as with any of Trainer's own optimizers;
    the weight decay comes with Trainer's parameter groups.
    """
    if "optimizer.class" not in setup:
        return None
    options = setup.section("optimizer")
    del options["class"]
    arguments = setup.arguments
    return {
        **options,
        "lr": arguments["learning_rate"],
        "betas": (arguments.get("adam_beta1", 0.9), arguments.get("adam_beta2", 0.999)),
        "eps": arguments.get("adam_epsilon", 1e-8),
    }


def optimizer_class_and_options(setup: TrainingSetup) -> tuple[type, dict[str, Any]] | None:
    """(class, keyword arguments) for `Trainer(optimizer_cls_and_kwargs=…)`, or None where `optim` does."""
    options = optimizer_options(setup)
    if options is None:
        return None
    module, _, name = setup["optimizer.class"].partition(":")
    return getattr(importlib.import_module(module), name), options
