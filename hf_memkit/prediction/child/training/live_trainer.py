"""Recreates a Trainer of another process and calls its `train()`, as a script would.

python -m hf_memkit.prediction.child.training.live_trainer FILE    # written by `live_objects.py`
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from transformers import Trainer, TrainingArguments

from hf_memkit.catalog import library_versions
from hf_memkit.common.errors import InputError, Unmodelled
from hf_memkit.prediction.child.example_inputs import Rows, example, pads, shortened
from hf_memkit.prediction.child.trainer_kinds.generation import arguments_class, generates, generation_config
from hf_memkit.prediction.live_objects import ON_HOST, PREPARED, TrainerParts, read_objects
from hf_memkit.setup.setup import Setup


def ready_trainer(path: Path) -> Any:
    """The Trainer in a file, on this process's GPU. InputError if the function that should make a model makes none."""
    given = read_objects(path)
    return _create(given) if isinstance(given, TrainerParts) else _restore(given)


def _refuse_fsdp(arguments: TrainingArguments) -> None:
    """Raises Unmodelled for FSDP of one GPU."""
    if arguments.fsdp and arguments.world_size == 1:
        raise Unmodelled("fsdp: FSDP2 splits a model between GPUs. Write gpus=2, or more")


def _restore(trainer: Any) -> Any:
    """Repeats the part of the Trainer's constructor that depends on the device (transformers 5.23.0: trainer.py)."""
    accumulation = trainer.args.accelerator_config.gradient_accumulation_kwargs
    if accumulation:  # added when the first accelerator was created
        accumulation.pop("num_steps", None)
    device = trainer.args.device  # determines the device, which resets all accelerators
    _refuse_fsdp(trainer.args)
    trainer.create_accelerator_and_postprocess()
    on_host = vars(trainer).pop(ON_HOST)
    for module in {id(value): value for value in vars(trainer).values() if isinstance(value, nn.Module)}.values():
        if on_host:
            _move(module, device)
        if vars(module).pop(PREPARED, False) and module is not trainer.model:
            trainer.accelerator.prepare_model(module, evaluation_mode=True)
    return trainer


def _move(module: nn.Module, device: torch.device) -> None:
    """Moves a module: `Module.to` of transformers refuses some quantised models, and torchao's tensors would move
    their inner tensors outside the fake mode."""
    for part in module.modules():
        for key, parameter in part._parameters.items():
            if parameter is not None and is_traceable_wrapper_subclass(parameter):
                names, context = parameter.__tensor_flatten__()
                inner = {name: getattr(parameter, name).to(device) for name in names}
                moved = parameter.__tensor_unflatten__(inner, context, parameter.shape, parameter.stride())
                part._parameters[key] = nn.Parameter(moved, parameter.requires_grad)
    nn.Module.to(module, device)


def _create(parts: TrainerParts) -> Any:
    model = parts.model if isinstance(parts.model, nn.Module) else parts.model()
    if not isinstance(model, nn.Module):
        raise InputError(f"model: must make an nn.Module; it made a {type(model).__name__}")
    kind = parts.kind or Trainer
    arguments = parts.arguments
    if isinstance(arguments, Setup):
        own = {"output_dir": tempfile.gettempdir(), "report_to": [], **generation_config(arguments)}
        options = library_versions.to_installed_arguments({**arguments.arguments, **own})
        arguments = (arguments_class(arguments, kind) or TrainingArguments)(**options)
    _ = arguments.device  # determines the ranks
    _refuse_fsdp(arguments)
    rows = parts.rows if parts.rows is not None else _rows(model, arguments, parts.length or 1)
    options = dict(parts.options)
    if generates(arguments, kind):  # only if there are metrics
        options.setdefault("compute_metrics", lambda prediction: {})
    return kind(model=model, args=arguments, train_dataset=rows, eval_dataset=rows, **options)


def _rows(model: Any, arguments: TrainingArguments, length: int) -> Rows:
    """Example rows for a model of transformers."""
    grouped = str(getattr(arguments, "train_sampling_strategy", "")) == "group_by_length"
    setup = Setup(preset="live")
    padded = pads(setup.put("arguments.train_sampling_strategy", "group_by_length", "") if grouped else setup, model)
    row = example(model, length, with_mask=padded)
    size = max(arguments.train_batch_size, arguments.eval_batch_size)
    return Rows(row, 4 * size, shortened(model, row) if padded else None, size)


if __name__ == "__main__":
    ready_trainer(Path(sys.argv[1])).train()
