"""Options that several verbs have, each with its help; and what they do to the terminal."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

__all__ = [
    "Args",
    "Gpu",
    "GpuMemory",
    "Gpus",
    "Json",
    "Module",
    "Nodes",
    "NvmePath",
    "Ram",
    "Script",
    "ScriptArguments",
    "SequenceLength",
    "Set",
    "Short",
    "Technique",
    "show_what_can_be_shown",
]

Script = Annotated[
    str | None, typer.Argument(metavar="SCRIPT", help="A training script. Its code runs here; nothing is trained.")
]
ScriptArguments = Annotated[list[str] | None, typer.Argument(metavar="-- ARGUMENTS", help="What the script gets.")]
Module = Annotated[bool, typer.Option("-m", help="SCRIPT is the name of a module, as after `python -m`.")]
Gpu = Annotated[
    str | None, typer.Option(help="For this GPU, such as T4 or 'RTX 4090' (docs/predict.md has all names), or 16GB.")
]
GpuMemory = Annotated[str | None, typer.Option(help="For a card of this size with bf16, such as 16GB.")]
Ram = Annotated[str | None, typer.Option(help="For this much RAM, such as 64GB.")]
Gpus = Annotated[int, typer.Option(min=1, help="Cards (processes) on each machine.")]
Nodes = Annotated[int, typer.Option(min=1, help="Machines.")]
NvmePath = Annotated[str | None, typer.Option(help="Folder on a fast disk, for presets that swap.")]
SequenceLength = Annotated[int | None, typer.Option(min=1, help="Tokens in a sequence.")]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="A field of TrainingArguments, or a value such as rank=32."),
]
Args = Annotated[
    str | None, typer.Option("--args", metavar="FILE", help="Your own arguments (YAML or JSON); they win.")
]
Technique = Annotated[
    list[str] | None,
    typer.Option(
        "--technique", metavar="NAME", help="A technique that takes the place of what decides the same thing."
    ),
]
Short = Annotated[bool, typer.Option("--short", help="The answer on one screen: the verdict, and what to change.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def show_what_can_be_shown() -> None:
    """A terminal that cannot show a bar gets a question mark, not an error."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
