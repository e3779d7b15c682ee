"""Setup → TrainingArguments, Trainer's keyword arguments, and components on the model. A component is
`components/NAME.py`, for each `model_parts.NAME` and `trainer_parts.NAME` of the setup. The user's own keyword
arguments override those of components."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from hf_memkit import components
from hf_memkit.catalog import library_versions
from hf_memkit.common.errors import RunError, SettingError
from hf_memkit.setup.process_group import join_process_group
from hf_memkit.setup.setup import Setup

if TYPE_CHECKING:
    from transformers import TrainingArguments


def trainer_class(setup: Setup) -> Any:
    """The setup's Trainer: transformers' Trainer, or the subclass in `trainer.class` (`module:class`)."""
    return _import(str(setup.get("trainer.class", "transformers:Trainer")))


def _import(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)


def after_making(setup: Setup, trainer: Any) -> None:
    """Under fp16, cast trained weights on a frozen model to fp32, because a gradient scaler refuses 16-bit weights.

    PEFT makes adapters fp32, but not heads that it trains completely (peft 0.21.2: ModulesToSaveWrapper). On 4-bit
    weights SFTTrainer makes all of them bf16 (trl 1.16.0: sft_trainer.py, `_is_quantized_model`).
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
    """Keyword arguments for Trainer, without `model` and `args`, for a model with installed components.

    Args:
        own: the user's keyword arguments, which override the others; `callbacks` are added.
        say: called with a line for each setting that the user's arguments replace.

    Raises:
        SettingError: two components set the same argument.
        RunError: a component fails, or Trainer would wrap the model in nn.DataParallel.
    """
    # Trainer would wrap the model in nn.DataParallel, unless it is spread over the GPUs (transformers 5.23.0:
    # trainer.py 2666-2672), and multiply the batch (training_args.py, `train_batch_size`); components that replace
    # methods of one instance, or have state, cannot be copied.
    places = set((getattr(model, "hf_device_map", None) or {}).values()) - {"cpu", "disk"}
    count = arguments.n_gpu
    if count > 1 and len(places) < 2:
        raise RunError(
            f"this process sees {count} GPUs: Trainer would copy the model to each of them in every step "
            f"(nn.DataParallel) and multiply the batch by {count}. Start one process per GPU (torchrun "
            f"--nproc-per-node {count}), or set CUDA_VISIBLE_DEVICES to one GPU"
        )

    own = dict(own or {})
    options: dict[str, Any] = {}
    owner: dict[str, str] = {}
    optimizer = optimizer_class_and_options(setup, arguments)
    if optimizer is not None:
        options["optimizer_cls_and_kwargs"] = optimizer
        owner["optimizer_cls_and_kwargs"] = setup["optimizer.class"]
    callbacks: list[Any] = []
    for name, values in setup.section("trainer_parts").items():
        live = {"model": model, "processing_class": processing_class, "arguments": arguments}
        given = _use(name, "trainer_options", **live, **values)
        callbacks += given.pop("callbacks", ())
        for key, value in given.items():
            if key in options:
                raise SettingError(f"{owner[key]!r} and {name!r} both set {key} of Trainer. Choose one")
            options[key] = value
            owner[key] = name

    for key in options.keys() & own.keys():
        if say is not None:
            say(f"{key}: yours overrides that of {owner[key]}")
    callbacks = [*callbacks, *(own.pop("callbacks", None) or ())]
    options = {**options, **own}
    if processing_class is not None:
        options["processing_class"] = processing_class
    if callbacks:
        options["callbacks"] = callbacks
    return options


def install_model_parts(model: Any, setup: Setup) -> Callable[[], None]:
    """Install the setup's model components on `model`; returns a function that removes them in reverse order.

    Raises:
        RunError: a component cannot work on this model; the others have been removed.
    """
    undo: list[Callable[[], None]] = []

    def undo_all() -> None:
        while undo:
            undo.pop()()

    try:
        for name, options in setup.section("model_parts").items():
            undo.append(_use(name, "install", model, **options))
    except RunError:
        undo_all()
        raise
    return undo_all


def _use(part: str, function: str, /, *arguments: Any, **options: Any) -> Any:
    """Call a component's function. Raises RunError if it cannot work with these objects."""
    try:
        return getattr(import_module(f"{components.__name__}.{part}"), function)(*arguments, **options)
    except (TypeError, ValueError, RuntimeError, ImportError) as error:
        raise RunError(f"{part.replace('_', ' ')}: {error}") from error


_TAKES: Final = ("lr", "betas", "eps")


def optimizer_options(setup: Setup, live: TrainingArguments | None = None) -> dict[str, Any] | None:
    """Keyword arguments of the setup's own optimizer, or None if it uses Trainer's `optim`.

    Learning rate, betas and epsilon come from the TrainingArguments fields, as for Trainer's optimizers, if the
    optimizer takes them (`optimizer.takes`); the weight decay comes with Trainer's parameter groups. `live`: the
    actual arguments, which may differ from the setup's.
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
    """(class, keyword arguments) for `Trainer(optimizer_cls_and_kwargs=…)`, or None if the setup uses `optim`."""
    options = optimizer_options(setup, live)
    if options is None:
        return None
    return _import(setup["optimizer.class"]), options


def build_arguments(
    setup: Setup, own: Mapping[str, Any] | None = None, arguments_class: type[TrainingArguments] | None = None
) -> TrainingArguments:
    """The setup's TrainingArguments, for the installed transformers.

    Args:
        own: the user's keyword arguments, which override the setup's.
        arguments_class: a subclass, such as `Seq2SeqTrainingArguments` or TRL's `SFTConfig`; None: the setup's
            `trainer.arguments_class`, or TrainingArguments.

    Raises:
        RunError: the class rejects the arguments.
    """
    if arguments_class is None:
        arguments_class = _import(str(setup.get("trainer.arguments_class", "transformers:TrainingArguments")))
    options = library_versions.to_installed_arguments({**setup.arguments, **(own or {})})
    if "deepspeed.config" in setup:
        options.setdefault("deepspeed", setup["deepspeed.config"])
    try:
        arguments = arguments_class(**options)
    except (TypeError, ValueError, ImportError) as error:
        text = str(error).splitlines()[0].rstrip(".")
        # transformers' advice names an argument of another version.
        cpu = "; to try it on a machine without a GPU: arguments={'use_cpu': True}" if "use_cpu" in text else ""
        raise RunError(f"TrainingArguments rejects this setup: {text}{cpu}") from error
    join_process_group(arguments)
    return arguments


def prepared_rows(setup: Setup) -> dict[str, Any]:
    """Arguments that make TRL's SFTTrainer train on rows of `input_ids` and `labels` unchanged; none for other
    trainers. Otherwise it would look for conversations, to mask and truncate them (trl 1.16.0: sft_trainer.py,
    `skip_prepare_dataset`). The labels replace `assistant_only_loss`, which it refuses without conversations."""
    if setup.get("trainer.arguments_class") != "trl:SFTConfig":
        return {}
    options = {**(setup.get("arguments.dataset_kwargs") or {}), "skip_prepare_dataset": True}
    return {"dataset_kwargs": options, "assistant_only_loss": False}
