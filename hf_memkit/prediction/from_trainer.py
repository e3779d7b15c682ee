"""`predict_trainer`: what a user gives to Trainer → a prediction, before anything is trained.

```python
args = TrainingArguments("out", bf16=True, per_device_train_batch_size=8, gradient_checkpointing=True)
found = predict_trainer(model, args, train_dataset=data, gpu="16GB")
```
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from hf_memkit.errors import InputError
from hf_memkit.hardware import described_machine
from hf_memkit.job import DEFAULT_LENGTH, DEFAULT_MICRO_BATCH, Job
from hf_memkit.own_arguments import read_trainer
from hf_memkit.prediction.defaults import TRAINER_DEFAULTS, LookedAt, default_setup, look_at, look_at_config
from hf_memkit.prediction.predicting import predict
from hf_memkit.prediction.user_batch import UserBatches, batches_of_example, batches_of_rows, signature_columns
from hf_memkit.prediction.user_training import UserTraining, import_path, write_module
from hf_memkit.request import refuse_below_one, refuse_too_long
from hf_memkit.setup import Setup

if TYPE_CHECKING:
    from transformers import PretrainedConfig, Trainer, TrainingArguments

    from hf_memkit.prediction.prediction import Prediction

__all__ = ["predict_trainer"]

_BATCH: Final = "per_device_train_batch_size"
_EVALUATION_BATCH: Final = "per_device_eval_batch_size"


def predict_trainer(
    model: Trainer | str | PretrainedConfig | Any,
    args: TrainingArguments | Mapping[str, Any] | None = None,
    *,
    train_dataset: Any = None,
    data_collator: Callable[[list[Any]], Any] | None = None,
    processing_class: Any = None,
    optimizer_cls_and_kwargs: tuple[type, dict[str, Any]] | None = None,
    trainer_class: type | str | None = None,
    example: Mapping[str, Any] | None = None,
    sequence_length: int | None = None,
    gpu: str | None = None,
    gpu_memory: str | None = None,
    ram: str | None = None,
    gpus: int = 1,
    nodes: int = 1,
    trust_remote_code: bool = False,
) -> Prediction:
    """What a training with Trainer will need, of a transformers model or your own; nothing is trained here.

    Give what you would give to Trainer, under the same names, or a Trainer that you have not started:

    >>> predict_trainer("gpt2-xl", {"bf16": True}, sequence_length=1024, gpu="RTX 4090")      # doctest: +SKIP
    >>> predict_trainer(my_module, args, example={"x": ((3, 224, 224), "float32"), "labels": 0})  # doctest: +SKIP
    >>> predict_trainer(trainer, gpu="16GB")                                                  # doctest: +SKIP

    Args:
        model: a Trainer; a hub ID or folder (its config is read, no weights); a config of transformers; a model that
            is in memory, on the meta device or not (no value of it is copied); a function or class that makes the
            model without arguments, or its name as `"my_package.models:build"`: it is called on tensors without
            memory, in another process.
        args: TrainingArguments, or a dict of their fields, which also takes `bf16=True` where there is no GPU.
        train_dataset: its first rows are read, and the longest of them make the batch.
        data_collator, processing_class: as Trainer takes them; the collator is called here.
        optimizer_cls_and_kwargs: as Trainer takes it; the class must be importable.
        trainer_class: a subclass of Trainer with methods of your own, or its name, `"my_package.training:MyTrainer"`.
        example: one row in the place of `train_dataset`: name → a tensor, (nested) list or number, or
            `(shape, dtype)`, without the dimension of the batch.
        sequence_length: tokens of a row, for transformers' models of text, where neither of the two is given.
        gpu: the card: a name such as `"T4"`, or a size such as `"16GB"`; None: this machine's.
        gpu_memory, ram: sizes in the place of the card's and of this machine's.
        gpus, nodes: cards on each machine, and machines.
        trust_remote_code: whether code that comes with a model of the hub may be run, in the other process.

    Returns:
        The prediction; what was assumed is in its `notes`.

    Raises:
        InputError: something of it is wrong, contradicts itself, or cannot be modelled, with the reason.
    """
    given = _Given(
        model, args, train_dataset, data_collator, processing_class, optimizer_cls_and_kwargs, trainer_class
    )
    if _is_trainer(model):
        given = _unpack_trainer(model, given)
    refuse_below_one(sequence_length=sequence_length, gpus=gpus, nodes=nodes)
    machine = described_machine(gpu, gpu_memory, ram, None)
    fields, notes = read_trainer(given.args)
    own = UserTraining(
        trainer_class=import_path(given.trainer_class, "trainer_class") if given.trainer_class is not None else None,
        metrics=given.metrics,
    )
    notes += _say_of_evaluation(fields, own)
    batch = int(fields.get(_BATCH, DEFAULT_MICRO_BATCH))
    with tempfile.TemporaryDirectory() as folder:
        looked_at, own = _model(given.model, own, Path(folder), trust_remote_code=trust_remote_code)
        batches = _batches(given, example, looked_at, batch, int(fields.get(_EVALUATION_BATCH, DEFAULT_MICRO_BATCH)))
        if batches is not None:
            batches.write(Path(folder) / "batches.pt")
            own = dataclasses.replace(own, batch_file=str(Path(folder) / "batches.pt"))
            notes.append(batches.note)
        elif looked_at is None and not _has_config(given.model):
            raise InputError(
                "example: a model of your own needs train_dataset, or one row as example, such as "
                "{'x': ((3, 224, 224), 'float32'), 'labels': 0}"
            )
        length = _length(batches, sequence_length, looked_at, notes)
        setup = _setup(looked_at, fields, given)
        if machine.gpu is None:
            notes.append("no GPU here and none named (gpu, gpu_memory): there is no verdict")
        facts = looked_at.facts if looked_at is not None else None
        job = Job(facts, machine, batch, length, gpus=gpus, nodes=nodes)
        found = predict(dataclasses.replace(setup, job=job), trust_remote_code=trust_remote_code, own=own)
    return found.with_notes(*notes)


@dataclasses.dataclass(frozen=True)
class _Given:
    """What Trainer would be given."""

    model: Any
    args: Any
    train_dataset: Any
    data_collator: Any
    processing_class: Any
    optimizer: tuple[type, dict[str, Any]] | None
    trainer_class: Any
    metrics: bool = False
    """Whether its evaluations keep all that the model gives, for metrics."""


def _say_of_evaluation(fields: dict[str, Any], own: UserTraining) -> list[str]:
    """What is to be said of evaluations; what Trainer ignores is taken out of `fields`."""
    notes = []
    if own.trainer_class is None and fields.pop("predict_with_generate", None):
        notes.append("predict_with_generate has no effect: Trainer does not generate, Seq2SeqTrainer does")
    evaluates = fields.get("eval_strategy", "no") != "no"
    accumulates = fields.get("eval_accumulation_steps") is None and not fields.get("batch_eval_metrics")
    if evaluates and own.metrics and accumulates:
        notes.append(
            "compute_metrics: the card keeps the predictions of all batches of an evaluation, and those of two are "
            "counted here; eval_accumulation_steps=1 moves them to RAM"
        )
    return notes


def _is_trainer(model: Any) -> bool:
    return all(hasattr(model, name) for name in ("training_step", "args", "train_dataset", "data_collator"))


def _unpack_trainer(trainer: Any, given: _Given) -> _Given:
    """What a Trainer was given, without what is given beside it.

    Raises:
        InputError: it has an optimizer of its own, which cannot be passed on; or arguments stand beside it.
    """
    from transformers import Trainer

    if given.args is not None:
        raise InputError("args: the Trainer that is given has its own; leave args out, or give its model instead")
    if trainer.optimizer is not None:
        raise InputError(
            "the Trainer has an optimizer already (optimizers=…, or it was started), which another process cannot be "
            "given; give optimizer_cls_and_kwargs in its place"
        )
    kind = type(trainer)
    return _Given(
        model=trainer.model,
        args=trainer.args,
        train_dataset=given.train_dataset if given.train_dataset is not None else trainer.train_dataset,
        data_collator=given.data_collator or trainer.data_collator,
        processing_class=given.processing_class or getattr(trainer, "processing_class", None),
        optimizer=given.optimizer or getattr(trainer, "optimizer_cls_and_kwargs", None),
        trainer_class=given.trainer_class or (None if kind is Trainer else kind),
        metrics=trainer.compute_metrics is not None
        and trainer.preprocess_logits_for_metrics is None  # takes less of them
        and not trainer.args.prediction_loss_only,
    )


def _model(
    model: Any, own: UserTraining, folder: Path, *, trust_remote_code: bool
) -> tuple[LookedAt | None, UserTraining]:
    """(the model as its config describes it, None where it is the user's own; what the child makes it from)."""
    from torch import nn
    from transformers import PretrainedConfig

    if isinstance(model, str) and ":" not in model:
        return look_at(model, trust_remote_code=trust_remote_code), own
    if isinstance(model, PretrainedConfig):
        return look_at_config(model, type(model).__name__, "architecture"), own
    if isinstance(model, nn.Module):
        path = folder / "module.pt"
        write_module(model, path)
        return None, dataclasses.replace(own, module_file=str(path))
    if isinstance(model, str) or callable(model):
        return None, dataclasses.replace(own, factory=import_path(model, "model"))
    raise InputError(
        f"model: must be a hub ID, a folder, a config, an nn.Module, a function that makes one, or a Trainer, and is "
        f"a {type(model).__name__}"
    )


def _has_config(model: Any) -> bool:
    """Whether the model says what it is trained on, as those of transformers do."""
    return hasattr(model, "main_input_name") and hasattr(model, "config")


def _batches(
    given: _Given, example: Mapping[str, Any] | None, looked_at: LookedAt | None, train_size: int, evaluate_size: int
) -> UserBatches | None:
    if example is not None and given.train_dataset is not None:
        raise InputError("example and train_dataset: these are two ways to say one thing; give one")
    sizes = {"train_size": train_size, "evaluate_size": evaluate_size}
    if example is not None:
        return batches_of_example(example, given.data_collator, **sizes)
    if given.train_dataset is None:
        return None
    collator = given.data_collator
    if collator is None and hasattr(given.processing_class, "pad"):
        from transformers import DataCollatorWithPadding

        collator = DataCollatorWithPadding(given.processing_class)
    return batches_of_rows(given.train_dataset, collator, _columns(given, looked_at), **sizes)


def _columns(given: _Given, looked_at: LookedAt | None) -> list[str] | None:
    """The columns that Trainer would keep; None where that is not known."""
    args = given.args if isinstance(given.args, Mapping) else vars(given.args) if given.args is not None else {}
    if args.get("remove_unused_columns", True) is False:
        return None
    forward = getattr(given.model, "forward", None)
    if looked_at is not None and not looked_at.own_code:
        import transformers
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

        name = looked_at.model_class or MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[looked_at.config["model_type"]]
        forward = getattr(getattr(transformers, name, None), "forward", None)
    return [*signature_columns(forward), *(args.get("label_names") or ())] if forward is not None else None


def _length(
    batches: UserBatches | None, sequence_length: int | None, looked_at: LookedAt | None, notes: list[str]
) -> int:
    """Tokens of a row.

    Raises:
        InputError: more than the model's positions.
    """
    longest = looked_at.maximum_length if looked_at is not None else None
    if batches is not None:
        if sequence_length is not None:
            raise InputError("sequence_length: the rows of example or train_dataset have their own; leave it out")
        length = batches.length
    elif sequence_length is not None:
        length = sequence_length
    else:
        length = min(DEFAULT_LENGTH, longest or DEFAULT_LENGTH)
        notes.append(f"sequences of {length} tokens: assumed; sequence_length says another")
    if looked_at is not None:
        refuse_too_long(looked_at.name, length, longest)
    return length


def _setup(looked_at: LookedAt | None, fields: Mapping[str, Any], given: _Given) -> Setup:
    if looked_at is not None:
        setup = default_setup(looked_at, fields)
    else:
        if "deepspeed" in fields:
            raise InputError(
                "deepspeed: what it splits is computed from the shapes of transformers' causal language models, and "
                "this model is your own; predict without it"
            )
        setup = Setup(preset=TRAINER_DEFAULTS)
        for name, value in fields.items():
            setup = setup.put(f"arguments.{name}", value, "yours")
    if given.optimizer is not None:
        kind, options = given.optimizer
        setup = setup.put("optimizer.class", import_path(kind, "optimizer_cls_and_kwargs"), "yours")
        setup = setup.put("optimizer.takes", [], "your keyword arguments are all that it gets")
        for name, value in options.items():
            try:
                setup = setup.put(f"optimizer.{name}", value, "yours")
            except TypeError:
                raise InputError(f"optimizer_cls_and_kwargs: {name}={value!r} is no plain value") from None
    return setup
