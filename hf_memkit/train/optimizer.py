"""Setup → the optimizer that Trainer is given, where its own `optim` does not do."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

from hf_memkit.setup import Setup

if TYPE_CHECKING:
    from transformers import TrainingArguments

__all__ = ["optimizer_class_and_options", "optimizer_options"]

_TAKES: Final = ("lr", "betas", "eps")


def optimizer_options(setup: Setup, live: TrainingArguments | None = None) -> dict[str, Any] | None:
    """Keyword arguments of the setup's own optimizer, or None where Trainer's `optim` does.

    Learning rate, betas and epsilon come from the TrainingArguments fields, as with any of Trainer's own optimizers,
    as far as the optimizer takes them (`optimizer.takes`); the weight decay comes with Trainer's parameter groups.
    `live`: the arguments that were made, which may differ from the setup's.
    """
    if "optimizer.class" not in setup:
        return None
    options = setup.section("optimizer")
    del options["class"]
    takes = options.pop("takes", _TAKES)
    arguments = setup.arguments
    if live is not None:
        names = ("learning_rate", "adam_beta1", "adam_beta2", "adam_epsilon")
        arguments = {name: getattr(live, name) for name in names}
    given = {
        "lr": arguments.get("learning_rate", 5e-5),
        "betas": (arguments.get("adam_beta1", 0.9), arguments.get("adam_beta2", 0.999)),
        "eps": arguments.get("adam_epsilon", 1e-8),
    }
    return {**options, **{name: given[name] for name in takes}}


def optimizer_class_and_options(
    setup: Setup, live: TrainingArguments | None = None
) -> tuple[type, dict[str, Any]] | None:
    """(class, keyword arguments) for `Trainer(optimizer_cls_and_kwargs=…)`, or None where `optim` does."""
    options = optimizer_options(setup, live)
    if options is None:
        return None
    module, _, name = setup["optimizer.class"].partition(":")
    return getattr(importlib.import_module(module), name), options
