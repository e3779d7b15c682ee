"""Options that several verbs share."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from typing import TYPE_CHECKING, Annotated, Any, Final, get_type_hints

import typer

from hf_memkit.common.answer.safe_text import printable

if TYPE_CHECKING:
    from hf_memkit.catalog.hardware import Machine

MORE: Final = "More options"
"""Heading of rarely needed options, the last in a verb's help."""

RUNS: Final = "Runs of a recipe"
"""Heading of the options of `memkit recipe`, and of `memkit run` for a recipe's folder."""


INTERRUPTED: Final = 130
"""Exit code after Ctrl-C, as in a shell: 1 means that it does not fit."""

MOST_GPUS: Final = 100_000
"""Largest number for `--gpus` and `--nodes`."""


def option(text: str, *flags: str, **details: Any) -> Any:
    """`typer.Option` with this help text."""
    return typer.Option(*flags, help=text, **details)


more = functools.partial(option, rich_help_panel=MORE)
runs = functools.partial(option, rich_help_panel=RUNS)

Nodes = Annotated[int, more("Machines.", min=1, max=MOST_GPUS)]
NvmePath = Annotated[str | None, more("Folder on a fast disk, for ZeRO-Infinity.")]
Short = Annotated[bool, option("One screen: the verdict and what to change.", "--short")]
Json = Annotated[bool, option("Print JSON.", "--json")]


@dataclass(frozen=True, kw_only=True)
class MachineOptions:
    """A described machine; by default this one."""

    gpu: Annotated[str | None, option("GPU by name or size, such as T4 or 16GB. Default: this machine's.")] = None
    gpu_memory: Annotated[str | None, more("Any GPU of this size with bf16, such as 16GB.")] = None
    ram: Annotated[str | None, more("RAM of the machine, such as 64GB. Default: this machine's.")] = None

    def machine(self, nvme_path: str | None = None) -> Machine:
        from hf_memkit.catalog.hardware import described_machine

        return described_machine(self.gpu, self.gpu_memory, self.ram, nvme_path)


@dataclass(frozen=True, kw_only=True)
class SizingOptions(MachineOptions):
    """The model and the machines for which a preset is computed."""

    model: Annotated[str | None, option("Hub ID or local folder: compute sizes and bytes for this model.")] = None
    gpus: Annotated[int, option("GPUs on each machine.", min=1, max=MOST_GPUS)] = 1
    nodes: Nodes = 1
    nvme_path: NvmePath = None


def flags_given(options: Any, *names: str) -> list[str]:
    """The flags of options that differ from their defaults. `names`: fields to look at; none means all."""
    return [
        _FLAGS.get(field.name, f"--{field.name.replace('_', '-')}")
        for field in fields(options)
        if (not names or field.name in names) and getattr(options, field.name) not in (field.default, "", (), [])
    ]


_FLAGS: Final = {
    "settings": "--set",
    "as_json": "--json",
    "module": "-m",
    "phases": "--no-phases",
    "arguments": "arguments",
}
"""Field → its flag, if it has another name."""


def with_options(verb: Callable[..., Any]) -> Callable[..., Any]:
    """Turns each parameter that is a dataclass into command-line options, one for each of its fields. `--short` and
    `--json` are the last in the help."""
    hints = get_type_hints(verb, include_extras=True)
    groups: dict[str, Any] = {name: kind for name, kind in hints.items() if is_dataclass(kind)}
    parameters = []
    for each in inspect.signature(verb).parameters.values():
        of_fields = get_type_hints(groups[each.name], include_extras=True) if each.name in groups else {}
        own = {name: getattr(groups[each.name], name, each.empty) for name in of_fields} or {each.name: each.default}
        parameters += [
            inspect.Parameter(name, each.KEYWORD_ONLY, default=default, annotation={**hints, **of_fields}[name])
            for name, default in own.items()
        ]

    parameters.sort(key=lambda each: each.name in ("short", "as_json"))

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
    print(f"memkit: {printable(line, 4000)}", file=sys.stderr, flush=True)


def show_what_can_be_shown() -> None:
    """Prints `?` for characters that the terminal cannot show."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
