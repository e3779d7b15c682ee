"""Options that several verbs have, each with its help; and what they do to the terminal."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Annotated, Any, Final, get_type_hints

import typer

MORE: Final = "More options"
"""Heading of what few people need, below the others in a verb's help."""

Script = Annotated[
    str | None, typer.Argument(metavar="SCRIPT", help="Training script. It runs on this machine, up to its training.")
]
ScriptArguments = Annotated[
    list[str] | None, typer.Argument(metavar="-- ARGUMENTS", help="The script's own arguments.")
]
Module = Annotated[bool, typer.Option("-m", help="SCRIPT is a module, as after `python -m`.", rich_help_panel=MORE)]
Gpu = Annotated[
    str | None, typer.Option(help="GPU by name or size, such as T4, 'RTX 4090' or 16GB. Default: this machine's.")
]
GpuMemory = Annotated[
    str | None, typer.Option(help="Any GPU of this size with bf16, such as 16GB.", rich_help_panel=MORE)
]
Ram = Annotated[
    str | None, typer.Option(help="RAM of the machine, such as 64GB. Default: this machine's.", rich_help_panel=MORE)
]
Gpus = Annotated[int, typer.Option(min=1, help="GPUs on each machine.")]
Nodes = Annotated[int, typer.Option(min=1, help="Machines.", rich_help_panel=MORE)]
NvmePath = Annotated[str | None, typer.Option(help="Folder on a fast disk, for ZeRO-Infinity.", rich_help_panel=MORE)]
SequenceLength = Annotated[int | None, typer.Option(min=1, help="Tokens in a sequence.")]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Override a TrainingArguments field, or a value such as rank=32. Repeatable.",
    ),
]
Args = Annotated[
    str | None, typer.Option("--args", metavar="FILE", help="Your own arguments (YAML or JSON). They take precedence.")
]
Technique = Annotated[
    list[str] | None,
    typer.Option(
        "--technique",
        metavar="NAME",
        help="Use this technique instead of the preset's for the same purpose. Repeatable.",
    ),
]
Short = Annotated[bool, typer.Option("--short", help="One screen: the verdict and what to change.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]

RUNS: Final = "Runs of a recipe"
"""Heading of what `memkit recipe` has, and `memkit run` of a recipe's folder."""

Resume = Annotated[bool, typer.Option("--resume", help="Continue a run that was stopped.", rich_help_panel=RUNS)]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace the run in the folder.", rich_help_panel=RUNS)]
GpusOfRun = Annotated[int | None, typer.Option("--gpus", min=1, help="GPUs on each machine.", rich_help_panel=RUNS)]
NodesOfRun = Annotated[int | None, typer.Option("--nodes", min=1, help="Machines.", rich_help_panel=RUNS)]
NodeRank = Annotated[int | None, typer.Option(min=0, help="Number of this machine, from 0.", rich_help_panel=RUNS)]
MasterAddr = Annotated[str | None, typer.Option(help="Address of machine 0.", rich_help_panel=RUNS)]
MasterPort = Annotated[
    int | None,
    typer.Option(min=1, max=65535, help="Free port of machine 0. Default: 29500.", rich_help_panel=RUNS),
]
JsonOfRun = Annotated[bool, typer.Option("--json", help="Print JSON.", rich_help_panel=RUNS)]


def with_options(verb: Callable[..., Any]) -> Callable[..., Any]:
    """Turns each parameter that is a dataclass into command-line options, one for each of its fields."""
    hints = get_type_hints(verb, include_extras=True)
    groups: dict[str, Any] = {name: kind for name, kind in hints.items() if is_dataclass(kind)}
    parameters = []
    for each in inspect.signature(verb).parameters.values():
        of_fields = get_type_hints(groups[each.name], include_extras=True) if each.name in groups else {}
        own = {name: getattr(groups[each.name], name) for name in of_fields} or {each.name: each.default}
        parameters += [
            inspect.Parameter(name, each.KEYWORD_ONLY, default=default, annotation={**hints, **of_fields}[name])
            for name, default in own.items()
        ]

    @functools.wraps(verb)
    def command(**given: Any) -> Any:
        for name, kind in groups.items():
            given[name] = kind(**{each.name: given.pop(each.name) for each in fields(kind)})
        return verb(**given)

    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {each.name: each.annotation for each in parameters}
    return command


def tell(line: str) -> None:
    """Prints a line to standard error at once."""
    print(f"memkit: {line}", file=sys.stderr, flush=True)


def show_what_can_be_shown() -> None:
    """A terminal that cannot show a bar gets a question mark, not an error."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
