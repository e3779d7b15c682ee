"""A user's request, in plain values: a recipe, a preset, a DeepSpeed preset or Trainer's defaults; model, GPU, and own
arguments. `resolve` makes a setup of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hf_memkit.common.errors import InputError


@dataclass(frozen=True)
class Request:
    """One requested job. None and empty values were not requested.

    Attributes:
        recipe: a recipe's name, or its YAML file.
        variant: a variant of the recipe, or `"auto"`.
        preset: presets and techniques joined by `+`; empty without a recipe: Trainer's defaults.
        deepspeed: a DeepSpeed preset alone.
        techniques: techniques that replace others with the same purpose.
        values: values of techniques, such as the LoRA rank.
        model: hub ID or local folder, instead of the recipe's.
        data: file, folder or hub ID instead of the recipe's data.
        gpu, gpu_memory, ram: another machine than this one (`hf_memkit.catalog.hardware`).
        gpus: processes on each machine, one GPU each; None: the recipe's, or 1.
        nodes: machines.
        global_batch_size: sequences in an optimizer step of all processes.
        sequence_length: tokens.
        max_steps: optimizer steps.
        output: folder for checkpoints, records and the trained model; empty: a new one in `memkit-runs/`.
        nvme_path: folder for ZeRO-Infinity's swap files; a recipe makes a subfolder in it.
        arguments: the user's fields of TrainingArguments, under current names, and a file's arguments of its script.
        args_file: their file, for messages.
        notes: conversions when they were read.
        trust_remote_code: whether the model's own code may be run.
    """

    recipe: str | None = None
    variant: str = "auto"
    preset: str = ""
    deepspeed: str = ""
    techniques: tuple[str, ...] = ()
    values: Mapping[str, Any] = field(default_factory=dict)
    model: str | None = None
    data: str | None = None
    gpu: str | None = None
    gpu_memory: str | None = None
    ram: str | None = None
    gpus: int | None = None
    nodes: int = 1
    global_batch_size: int | None = None
    sequence_length: int | None = None
    max_steps: int | None = None
    output: str = ""
    nvme_path: str | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)
    args_file: str | None = None
    notes: tuple[str, ...] = ()
    trust_remote_code: bool = False


def below_one(numbers: Mapping[str, Any]) -> list[str]:
    """A line for each count that is no whole number above 0."""
    return [
        f"{name}={number!r}: must be a whole number above 0"
        for name, number in numbers.items()
        if not isinstance(number, int) or isinstance(number, bool) or number < 1
    ]


def refuse_below_one(**numbers: Any) -> None:
    """Raise InputError for the first count that is no whole number above 0; None: not given."""
    if lines := below_one({name: number for name, number in numbers.items() if number is not None}):
        raise InputError(lines[0])


def refuse_too_long(model: str, length: int | None, longest: int | None, option: str = "") -> None:
    """Refuse a sequence longer than the model's positions allow.

    Args:
        model: its name, for the message.
        length: tokens; None: not given.
        longest: maximum tokens; None: unknown.
        option: option for the length, for the message.
    """
    if length and longest and length > longest:
        raise InputError(
            f"sequence length {length} is longer than {model} allows ({longest}); give {option}{longest} or less"
        )
