"""What was asked for: a recipe, a preset, a DeepSpeed preset or Trainer's defaults; model, GPU, and own arguments.

Plain values, as a command line, a file or a caller of the Python API gives them; `resolve` makes a setup of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hf_memkit.common.errors import InputError


@dataclass(frozen=True)
class Request:
    """One job, as it was asked for. What is None or empty was not asked for.

    Attributes:
        recipe: a recipe's name, or its YAML file.
        variant: a variant of the recipe, or `"auto"`.
        preset: presets and techniques joined by `+`; empty without a recipe: Trainer's defaults.
        deepspeed: a DeepSpeed preset by itself.
        techniques: techniques that take the place of those that decide the same thing.
        values: values of techniques, such as the LoRA rank.
        model: hub ID or local folder, in place of the recipe's.
        data: file, folder or hub ID in place of the recipe's data.
        gpu, gpu_memory, ram: the machine in question, where it is not this one (`hf_memkit.catalog.hardware`).
        gpus: processes on each machine, one GPU each; None: the recipe's, or 1.
        nodes: machines.
        global_batch_size: sequences an optimizer step, all processes together.
        sequence_length: tokens.
        max_steps: optimizer steps.
        output: folder for checkpoints, records and the trained model; empty: a new one in `memkit-runs/`.
        nvme_path: folder for what ZeRO-Infinity swaps; a recipe makes one of its own in it.
        arguments: the user's own fields of TrainingArguments, under today's names and each of its field's type, and,
            from a file, arguments of the script's own.
        args_file: the file that they come from, for messages.
        notes: what was changed when they were read.
        trust_remote_code: whether code that comes with the model may be run.
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
    """A line for each of these counts that is no whole number above 0."""
    return [
        f"{name}={number!r}: must be a whole number above 0"
        for name, number in numbers.items()
        if not isinstance(number, int) or isinstance(number, bool) or number < 1
    ]


def refuse_below_one(**numbers: Any) -> None:
    """Refuses the first that is no whole number above 0; those that are None were not given."""
    if lines := below_one({name: number for name, number in numbers.items() if number is not None}):
        raise InputError(lines[0])


def refuse_too_long(model: str, length: int | None, longest: int | None, option: str = "") -> None:
    """Refuses a sequence longer than the model's positions allow; None: not given, or not known. `option`: what says
    the length, for the message, which names the longest."""
    if length and longest and length > longest:
        raise InputError(
            f"sequence length {length} is longer than {model} allows ({longest}); give {option}{longest} or less"
        )
