"""Setup → Trainer's keyword arguments: the optimizer and what the trainer parts bring. The user's own win."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from hf_memkit.errors import RunError, SettingError
from hf_memkit.setup import Setup
from hf_memkit.train.components import trainer_part_options
from hf_memkit.train.optimizer import optimizer_class_and_options

__all__ = ["after_making", "trainer_class", "trainer_options"]


def trainer_class(setup: Setup) -> Any:
    """The setup's Trainer: transformers' own, or the subclass that `trainer.class` names as `module:class`."""
    module, _, name = str(setup.get("trainer.class", "transformers:Trainer")).partition(":")
    return getattr(import_module(module), name)


def after_making(setup: Setup, trainer: Any) -> None:
    """With fp16, makes the trained weights beside frozen ones fp32: a gradient scaler refuses 16-bit ones, and such
    cards compute no bf16.

    PEFT makes adapters fp32, but not the heads that it trains whole (peft 0.21.2: utils/other.py,
    ModulesToSaveWrapper). SFTTrainer makes all of them bf16 beside 4-bit weights (trl 1.16.0: sft_trainer.py,
    `_is_quantized_model`).
    """
    adapted = bool(setup.section("adapter")) or setup.get("trainer.class") == "trl:SFTTrainer"
    if not setup.get("arguments.fp16") or not adapted:
        return
    for parameter in trainer.model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()


def trainer_options(
    setup: Setup,
    *,
    model: Any,
    arguments: Any,
    processing_class: Any = None,
    own: Mapping[str, Any] | None = None,
    say: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Keyword arguments for Trainer, without `model` and `args`.

    Args:
        setup: whose optimizer and trainer parts are wanted.
        model: the model, with its parts installed.
        arguments: the TrainingArguments.
        processing_class: tokenizer or processor, as Trainer takes it.
        own: the user's keyword arguments. They win; `callbacks` are kept beside the parts'.
        say: told what of the setup the user's arguments replace, a line a call.

    Raises:
        SettingError: two parts give Trainer the same thing.
        RunError: a part cannot do its work, or Trainer would wrap the model in nn.DataParallel.
    """
    _refuse_data_parallel(model, arguments)
    own = dict(own or {})
    options: dict[str, Any] = {}
    owner: dict[str, str] = {}
    optimizer = optimizer_class_and_options(setup, arguments)
    if optimizer is not None:
        options["optimizer_cls_and_kwargs"] = optimizer
        owner["optimizer_cls_and_kwargs"] = setup["optimizer.class"]
    parts = trainer_part_options(setup, model=model, processing_class=processing_class, arguments=arguments)
    callbacks: list[Any] = []
    for name, given in parts.items():
        callbacks += given.pop("callbacks", ())
        for key, value in given.items():
            if key in options:
                raise SettingError(f"{owner[key]!r} and {name!r} both give Trainer {key}; take one")
            options[key], owner[key] = value, name
    for key in options.keys() & own.keys():
        if say is not None:
            say(f"{key}: yours, instead of that of {owner[key]}")
    callbacks = [*callbacks, *(own.pop("callbacks", None) or ())]
    options = {**options, **own}
    if processing_class is not None:
        options["processing_class"] = processing_class
    if callbacks:
        options["callbacks"] = callbacks
    return options


def _refuse_data_parallel(model: Any, arguments: Any) -> None:
    """Raises where one process sees several cards and the model is not spread over them.

    Trainer would wrap the model in nn.DataParallel (transformers 5.23.0: trainer.py 2666-2672) and multiply the batch
    by the number of cards (training_args.py, `train_batch_size`), which no setup reckons with; parts that replace
    methods of one instance, or hold a state, cannot be copied that way.
    """
    places = set((getattr(model, "hf_device_map", None) or {}).values()) - {"cpu", "disk"}
    cards = arguments.n_gpu
    if cards > 1 and len(places) < 2:
        raise RunError(
            f"this process sees {cards} cards: Trainer would copy the model to each of them in every step "
            f"(nn.DataParallel) and multiply the batch by {cards}; start one process a card (torchrun "
            f"--nproc-per-node {cards}), or set CUDA_VISIBLE_DEVICES to one"
        )
