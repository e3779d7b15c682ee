"""A training as the script has it: arguments, model and engine, without a trace."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from dataclasses import fields
from importlib.metadata import version
from typing import Any

import torch
from accelerate.utils import memory

from hf_memkit.catalog.fp16_overflow import overflow_in_fp16
from hf_memkit.catalog.library_versions import name_in_version
from hf_memkit.common.as_json import as_json
from hf_memkit.prediction.child.example_inputs import base_model
from hf_memkit.prediction.child.gpu import fsdp
from hf_memkit.prediction.child.gpu.cuda_queries import memory_fraction
from hf_memkit.prediction.child.libraries.deepspeed_engine import traced_engine
from hf_memkit.prediction.child.trainer_kinds.vllm import traced_vllm
from hf_memkit.prediction.child.training.given_settings import given_settings
from hf_memkit.prediction.traced_training import TracedArguments, TracedModel, TracedTraining
from hf_memkit.setup.live_arguments import creation_record


def describe_training(trainer: Any) -> TracedTraining:
    """What is known of a Trainer's training before it is traced."""
    model = trainer.model
    base = base_model(model)
    parameters = {id(weight): weight for weight in model.parameters()}.values()
    trained = [weight for weight in parameters if weight.requires_grad]
    return TracedTraining(
        trainer=type(trainer).__name__,
        arguments=_arguments(trainer.args),
        model=TracedModel(
            kind=type(base).__name__,
            name=str(getattr(getattr(base, "config", None), "_name_or_path", "") or ""),
            parameters=sum(map(_elements, parameters)),
            trainable_parameters=sum(map(_elements, trained)),
            dtypes=_dtypes(parameters),
            trained_dtypes=_dtypes(trained),
        ),
        batches_tried=tuple(_batches_tried(trainer)),
        memory_fraction=memory_fraction(),
        allocator={name: value for name, value in os.environ.items() if name.endswith("ALLOC_CONF")},
        engine=traced_engine(trainer),
        sharded=fsdp.is_sharded(trainer),
        parallel_sizes=fsdp.parallel_sizes(trainer),
        fsdp=fsdp.fsdp_settings(trainer),
        unused_savings=fsdp.unused_savings(trainer),
        vllm=traced_vllm(trainer),
        given=given_settings(trainer),
        fp16_overflow=fp16_overflow(trainer),
    )


def _arguments(arguments: Any) -> TracedArguments:
    """The fields of `TracedArguments`, from TrainingArguments of any version."""
    values = {}
    installed = tuple(map(int, version("transformers").split(".")[:2]))
    for field in fields(TracedArguments):
        value = getattr(arguments, name_in_version(field.name, installed), None)
        with contextlib.suppress(TypeError):
            values[field.name] = as_json(getattr(value, "value", value))
    values["accelerator_config"] = _accelerator_config(arguments) or None
    record = creation_record(arguments)
    if record is not None and record.given.get("torch_compile_backend") is None:
        values["torch_compile_backend"] = None  # Trainer has set it because of torch_compile
    return TracedArguments(**values)


def _accelerator_config(arguments: Any) -> dict[str, Any]:
    """The fields of `accelerator_config` that differ from their defaults, without `num_steps`, which Trainer adds
    (transformers 5.23.0: trainer.py, `create_accelerator_and_postprocess`)."""
    config = getattr(arguments, "accelerator_config", None)
    if config is None:
        return {}
    accumulation = {**(config.gradient_accumulation_kwargs or {})}
    accumulation.pop("num_steps", None)
    content = {**config.to_dict(), "gradient_accumulation_kwargs": accumulation or None}
    default = type(config)()
    return {name: value for name, value in content.items() if value != getattr(default, name)}


def _dtypes(parameters: Iterable[torch.Tensor]) -> tuple[str, ...]:
    return tuple(sorted({str(weight.dtype).removeprefix("torch.") for weight in parameters}))


def _elements(parameter: torch.Tensor) -> int:
    """Elements of a parameter; bitsandbytes packs two 4-bit elements in a byte."""
    packed = 2 * parameter.element_size() if hasattr(parameter, "quant_type") else 1
    return packed * parameter.numel()


def fp16_overflow(trainer: Any) -> str:
    """What overflows in this training if it computes in fp16; empty if nothing is known."""
    base = base_model(trainer.model)
    if not trainer.args.fp16 and all(weight.dtype != torch.float16 for weight in base.parameters()):
        return ""
    kept = getattr(base, "_keep_in_fp32_modules", None) or ()
    return overflow_in_fp16(getattr(getattr(base, "config", None), "model_type", None), kept)


def _batches_tried(trainer: Any) -> list[int]:
    """Batch sizes that `auto_find_batch_size` would try after out-of-memory errors."""
    if not trainer.args.auto_find_batch_size:
        return []
    sizes: list[int] = []

    def attempt(batch_size: int) -> None:
        sizes.append(batch_size)
        raise RuntimeError("CUDA out of memory.")

    clear, memory.clear_device_cache = memory.clear_device_cache, lambda **_: None  # collects garbage each time
    try:
        with contextlib.suppress(RuntimeError):
            memory.find_executable_batch_size(attempt, starting_batch_size=trainer._train_batch_size)()
    finally:
        memory.clear_device_cache = clear
    return sizes
