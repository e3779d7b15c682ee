"""`predict_trainer`: predicts the arguments of Trainer, or a Trainer, before anything is trained.

The objects are sent to another process without the values of weights (`live_objects.py`), and predicted there like a
script (`from_script.py`).
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import os
import re
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from hf_memkit.catalog.hardware import described_machine
from hf_memkit.common.errors import InputError
from hf_memkit.common.user_script import UserScript
from hf_memkit.prediction.defaults import (
    ModelDescription,
    default_setup,
    describe_config,
    describe_model,
    setup_of_arguments,
)
from hf_memkit.prediction.from_script import predict_in
from hf_memkit.prediction.from_setup import predict
from hf_memkit.prediction.running_scripts import ScriptJob
from hf_memkit.prediction.trace.request import LIVE
from hf_memkit.prediction.worker import shared_worker
from hf_memkit.setup.job import DEFAULT_LENGTH, DEFAULT_MICRO_BATCH, Job
from hf_memkit.setup.own_arguments import read_trainer
from hf_memkit.setup.request import refuse_below_one, refuse_too_long

if TYPE_CHECKING:
    from transformers import PretrainedConfig, Trainer, TrainingArguments

    from hf_memkit.prediction.prediction import Prediction


_SCRIPTS_PROCESS: Final = "hf_memkit.prediction.child.script.script"
"""Module that only a process has in which memkit predicts a script."""

_NO_GPU: Final = "no verdict: this machine has no GPU, and none is named (gpu=NAME)"


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
    """Predicts the memory of a training with Trainer, of a transformers model or your own; nothing is trained here.

    Give a Trainer that has not been started, or Trainer's own arguments under the same names:

    >>> predict_trainer(trainer, gpu="16GB")                                                  # doctest: +SKIP
    >>> predict_trainer("gpt2-xl", {"bf16": True}, sequence_length=1024, gpu="RTX 4090")      # doctest: +SKIP
    >>> predict_trainer(my_module, args, example={"x": ((3, 224, 224), "float32"), "labels": 0})  # doctest: +SKIP

    Args:
        model: a Trainer; a hub ID or folder (only its config is read); a config of transformers; a model in memory or
            on the meta device (its values are not copied); a function or class that creates the model without
            arguments, or its name as `"my_package.models:build"`: it is called in another process, on tensors without
            memory.
        args: TrainingArguments, or a dict of their fields, in which `bf16=True` is possible without a GPU.
        train_dataset: its worst and a typical batch are predicted.
        data_collator, processing_class: as for Trainer; the collator is called in the other process.
        optimizer_cls_and_kwargs: as for Trainer.
        trainer_class: a subclass of Trainer, or its name, `"my_package.training:MyTrainer"`.
        example: one row instead of `train_dataset`: name → a tensor, (nested) list or number, or
            `(shape, dtype)`, without the dimension of the batch.
        sequence_length: tokens of a row, for transformers' text models without a data set or example.
        gpu: the GPU: a name such as `"T4"`, or a size such as `"16GB"`. Default: this machine's.
        gpu_memory, ram: override the sizes of the GPU and of this machine.
        gpus, nodes: GPUs per machine, and machines.
        trust_remote_code: whether code that comes with a model of the hub may run, in the other process.

    Returns:
        The prediction; assumptions are in its `notes`.

    Raises:
        InputError: an argument is wrong, contradicts another, or cannot be modelled.
        ScriptFailed: your code raised an exception; `text` is the traceback.
    """
    refuse_below_one(sequence_length=sequence_length, gpus=gpus, nodes=nodes)
    machine = described_machine(gpu, gpu_memory, ram, None, option="gpu")
    job = ScriptJob(UserScript(LIVE, is_module=True), machine, gpus, nodes, ram_is_given=ram is not None)
    own = {
        "train_dataset": train_dataset, "data_collator": data_collator, "processing_class": processing_class,
        "optimizer_cls_and_kwargs": optimizer_cls_and_kwargs, "trainer_class": trainer_class, "example": example,
    }  # fmt: skip
    if all(hasattr(model, name) for name in ("training_step", "args", "train_dataset", "data_collator")):  # a Trainer
        others = {"args": args, **own, "sequence_length": sequence_length}
        given = [name for name, value in others.items() if value is not None]
        if given:
            raise InputError(f"{', '.join(given)}: the Trainer has its own; omit {' and '.join(given)}")
        return _predict_objects(model, job)

    description = _describe(model, trust_remote_code)
    if description is not None and all(each is None for each in own.values()):
        attention = getattr(model, "_attn_implementation", None)
        return _predict_config(description, attention, args, sequence_length, job, trust_remote_code)

    from transformers import Trainer, TrainingArguments

    from hf_memkit.prediction.live_objects import TrainerParts

    notes: list[str] = []
    rows, length = _rows(model, description, own, sequence_length, notes)
    passed_on = ("data_collator", "processing_class", "optimizer_cls_and_kwargs")
    options = {name: own[name] for name in passed_on if own[name] is not None}
    made = _model_maker(model, description, trust_remote_code)
    arguments = args if isinstance(args, TrainingArguments) else setup_of_arguments(read_trainer(args)[0])
    kind = _import_object(trainer_class, "trainer_class") if isinstance(trainer_class, str) else trainer_class
    if kind is not None and not (isinstance(kind, type) and issubclass(kind, Trainer)):
        raise InputError(f"trainer_class: {trainer_class} is not a subclass of transformers.Trainer")
    parts = TrainerParts(made, arguments, rows, length, kind, options)

    prediction = _predict_objects(parts, job, notes)
    if train_dataset is None:  # all rows are alike, and their number is not the user's
        kept = tuple(note for note in prediction.notes if not note.startswith("traced: the"))
        prediction = dataclasses.replace(prediction, notes=kept)
    return prediction


def _predict_objects(objects: Any, job: ScriptJob, notes: Sequence[str] = ()) -> Prediction:
    """The prediction of objects that another process trains."""
    if _SCRIPTS_PROCESS in sys.modules:
        raise InputError(
            "predict_trainer() in a script that memkit predicts: its model has no values here. Omit the call, because "
            "memkit predicts what the script trains; or run the script with python"
        )
    from hf_memkit.prediction.live_objects import write_objects

    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "objects.pickle"
        write_objects(objects, path)
        script = dataclasses.replace(job.script, arguments=(str(path),))
        job = dataclasses.replace(job, script=script, environment=environment)
        return predict_in(shared_worker(), job).prediction.with_notes(*notes)


def _describe(model: Any, trust_remote_code: bool) -> ModelDescription | None:
    """The model's description from its config; None for an object or a function that creates one."""
    from transformers import PretrainedConfig

    if isinstance(model, str) and ":" not in model:
        return describe_model(model, trust_remote_code=trust_remote_code)
    if isinstance(model, PretrainedConfig):
        return describe_config(model, type(model).__name__, "architecture")
    return None


def _predict_config(
    description: ModelDescription,
    attention: str | None,
    args: Any,
    sequence_length: int | None,
    where: ScriptJob,
    trust_remote_code: bool,
) -> Prediction:
    """The prediction without the user's own objects, as `memkit predict --model`. `attention`: the config's
    `attn_implementation`."""
    fields, notes = read_trainer(args)
    length = sequence_length
    if length is None:
        length = min(DEFAULT_LENGTH, description.maximum_length or DEFAULT_LENGTH)
        notes.append(f"sequences of {length} tokens: assumed; set another with sequence_length")
    refuse_too_long(description.name, length, description.maximum_length)
    if where.machine.gpu is None:
        notes.append(_NO_GPU)
    batch = int(fields.get("per_device_train_batch_size", DEFAULT_MICRO_BATCH))
    job = Job(description.facts, where.machine, batch, length, gpus=where.gpus, nodes=where.nodes)
    setup = dataclasses.replace(default_setup(description, fields), job=job)
    if attention is not None:
        setup = setup.put("model.attn_implementation", attention, "the config's")
    return predict(setup, trust_remote_code=trust_remote_code).with_notes(*notes)


def _model_maker(model: Any, description: ModelDescription | None, trust_remote_code: bool) -> Any:
    """The model, or a function that creates it in the other process."""
    from torch import nn

    if description is not None:
        name = description.model_class or "AutoModelForCausalLM"
        return functools.partial(_model_of, model, name, trust_remote_code)
    if isinstance(model, str):
        return _import_object(model, "model")
    if isinstance(model, nn.Module) or callable(model):
        return model
    raise InputError(
        f"model: must be a hub ID, a folder, a config, an nn.Module, a function that makes one, or a Trainer; it is "
        f"a {type(model).__name__}"
    )


def _model_of(source: Any, class_name: str, trust_remote_code: bool) -> Any:
    """A model of transformers; called in the other process, where no weights are read."""
    import transformers

    kind = getattr(transformers, class_name)
    if isinstance(source, str):
        return kind.from_pretrained(source, trust_remote_code=trust_remote_code)
    return kind._from_config(source) if hasattr(kind, "_from_config") else kind.from_config(source)


_PATH: Final = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


def _import_object(path: str, what: str) -> Any:
    """The object named `"package.module:name"`; InputError if it does not exist."""
    if not _PATH.fullmatch(path):
        raise InputError(f"{what}={path!r}: write a module and a name in it, such as 'my_package.models:build'")
    module, _, names = path.partition(":")
    try:
        named: Any = importlib.import_module(module)
    except Exception as error:  # the user's code may raise any error
        first = (str(error).strip().splitlines() or [""])[0]
        raise InputError(f"{what}={path!r}: importing {module} failed: {type(error).__name__}: {first}") from error
    for name in names.split("."):
        if not hasattr(named, name):
            raise InputError(f"{what}={path!r}: the module {module} has no {names}")
        named = getattr(named, name)
    return named


def _rows(
    model: Any,
    description: ModelDescription | None,
    own: Mapping[str, Any],
    sequence_length: int | None,
    notes: list[str],
) -> tuple[Any, int | None]:
    """(data set, None), or (None, tokens of example rows); InputError if both or none are given, or it is empty."""
    data, example = own["train_dataset"], own["example"]
    if example is not None and data is not None:
        raise InputError("example and train_dataset: mutually exclusive; omit one")
    if sequence_length is not None and (example is not None or data is not None):
        raise InputError("sequence_length: the rows of example or train_dataset have their own; omit it")
    if example is not None:
        return [{name: _value(name, value) for name, value in example.items()}] * _ROWS, None
    if data is not None:
        if hasattr(data, "__len__") and not len(data):
            raise InputError("train_dataset: no rows; give at least one")
        return data, None
    if description is None and not (hasattr(model, "main_input_name") and hasattr(model, "config")):
        raise InputError(
            "train_dataset or example: give one of them for a model of your own; example is one row, such as "
            "{'x': ((3, 224, 224), 'float32'), 'labels': 0}"
        )
    if sequence_length is None:
        sequence_length = DEFAULT_LENGTH
        notes.append(f"sequences of {sequence_length} tokens: assumed; set another with sequence_length")
    return None, sequence_length


_ROWS: Final = 1024  # number of copies of an example


def _value(name: str, given: Any) -> Any:
    """A tensor or plain value of a row."""
    import torch

    if isinstance(given, tuple) and len(given) == 2 and isinstance(given[0], list | tuple):
        shape, dtype = given
        kind = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
        if isinstance(kind, torch.dtype):
            sizes = [size for size in shape if not isinstance(size, int) or isinstance(size, bool) or size < 1]
            if sizes:
                raise InputError(f"example[{name!r}]: {tuple(shape)} is not a shape; write whole numbers above 0")
            # A mask of ones masks nothing; 0 is a valid label and token of every model.
            return (torch.ones if "mask" in name else torch.zeros)(tuple(shape), dtype=kind)
        if isinstance(dtype, str):
            raise InputError(f"example[{name!r}]: torch has no dtype {dtype!r}; write one, such as float32")
    if isinstance(given, str) or given is None:
        raise InputError(
            f"example[{name!r}]={given!r}: must be a tensor, numbers, or (shape, dtype) such as ((128,), 'int64')"
        )
    return given
