"""A setup as a file of arguments for `HfArgumentParser` scripts: YAML with the reasons as comments, or JSON. It
includes the user's own entries, and lists settings that such a file cannot contain, each with its line of code."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any, Final

import yaml

from hf_memkit._version import __version__
from hf_memkit.catalog import library_versions
from hf_memkit.presets.not_in_file import Outside, outside_lines, script_arguments
from hf_memkit.setup.own_arguments import LENGTH_NAMES
from hf_memkit.setup.setup import Replaced, Setup

_WIDTH: Final = 110  # characters of a line

_FROM_SCRATCH: Final = frozenset({"model_type", "config_name", "config_overrides"})
"""Arguments of transformers' examples for a model with random weights; they exclude `model_name_or_path`."""


Reasoned = Mapping[str, tuple[Any, str]]
"""Name → (value, reason)."""


@dataclass(frozen=True)
class ArgumentFile:
    """Content of the file.

    Attributes:
        title: its origin, one line.
        entries: the user's own first, without reasons, then the preset's, under the installed transformers' names.
        replaced: settings of the preset that the user's own replaced.
        outside: settings that the file cannot contain.
        notes: further information for the user.
    """

    title: str
    entries: Reasoned
    replaced: tuple[Replaced, ...] = ()
    outside: tuple[Outside, ...] = ()
    notes: tuple[str, ...] = field(default=())

    @property
    def content(self) -> dict[str, Any]:
        return {name: value for name, (value, _) in self.entries.items()}

    def text(self, *, as_yaml: bool) -> str:
        """The file's text. Only YAML has the reasons, because JSON has no comments."""
        if not as_yaml:
            return json.dumps(self.content, indent=2) + "\n"
        blocks = [_comment([self.title])]
        for owner, has_reason in (("Yours", False), ("The preset's", True)):
            if values := {name: entry for name, entry in self.entries.items() if bool(entry[1]) is has_reason}:
                blocks.append(f"# {owner}\n{reasoned_yaml(values)}")
        if self.replaced:
            blocks.append(
                "# Settings of the preset that yours override:\n" + _comment([f"- {entry}" for entry in self.replaced])
            )
        if self.outside:
            lines = []
            for entry in self.outside:
                lines += [f"- {entry.setting}: {entry.reason}", f"    {entry.line}"]
            blocks.append("# Not possible in a file of arguments:\n" + _comment(lines))
        if self.notes:
            blocks.append("# Notes:\n" + _comment([f"- {note}" for note in self.notes]))
        return "\n".join(blocks)

    def to_json(self) -> dict[str, Any]:
        return {
            "arguments": self.content,
            "replaced": [replaced.to_json() for replaced in self.replaced],
            "outside_arguments": [line.to_json() for line in self.outside],
        }


def argument_file(
    setup: Setup,
    *,
    own: Mapping[str, Any] | None = None,
    replaced: Iterable[Replaced] = (),
    script: str = "trainer",
    deepspeed: str = "",
) -> ArgumentFile:
    """The file of a setup with the user's own fields applied, under the installed transformers' names.

    Args:
        own: everything in the user's file, under current names. It comes first, in its order.
        replaced: settings that it replaced.
        script: the kind of script (`hf_memkit.presets.not_in_file.SCRIPTS`).
        deepspeed: path of the DeepSpeed JSON, if the setup has a DeepSpeed config.
    """
    own = dict(own or {})
    replaced = tuple(replaced)
    entries: dict[str, tuple[Any, str]] = {name: (value, "") for name, value in own.items()}
    given = script_arguments(setup, script)
    if own.keys() & _FROM_SCRATCH:
        given.pop("model_name_or_path", None)  # the model was named for its sizes only
    if script == "run_clm":  # it has block_size, and fails on the others
        entries = {name: each for name, each in entries.items() if name not in LENGTH_NAMES or name in given}
    arguments = {s.key.partition(".")[2]: s for s in setup.settings if s.key.startswith("arguments.")}
    if script == "trl":
        # TRL also reads the file in the process that starts accelerate's launcher: a backend there is an error, and
        # the launcher chooses the same one (accelerate 1.15.0: state.py 226-234, 303-304).
        arguments.pop("ddp_backend", None)
    entries |= {name: (s.value, s.reason) for name, s in {**given, **arguments}.items() if name not in own}
    if "deepspeed.config" in setup and deepspeed:
        reason = next((s.reason for s in setup.settings if s.key == "deepspeed.preset"), "the preset's DeepSpeed JSON")
        entries["deepspeed"] = deepspeed, reason
    notes = setup.notes
    if not any(reason for _, reason in entries.values()) and not replaced:
        notes = (f"this file changes nothing: preset {setup.preset!r} sets no argument", *notes)
    return ArgumentFile(
        title=f"Preset {setup.preset}, written by memkit {__version__} for transformers {version('transformers')}",
        entries=with_installed_names(entries),
        replaced=(
            *replaced,
            *(Replaced(s, name, own[name]) for name, s in given.items() if name in own and own[name] != s.value),
        ),
        outside=outside_lines(setup, script, own),
        notes=notes,
    )


def accelerate_file(setup: Setup) -> str:
    """The YAML for `accelerate launch --config_file` of a setup with FSDP; empty without. It has the same settings as
    `fsdp_config` in the argument file, which is enough for `torchrun`."""
    if not setup.get("arguments.fsdp"):
        return ""
    job = setup.resolved_for
    config = setup["arguments.fsdp_config"]
    values = {f"fsdp_{_ACCELERATE_NAMES.get(name, name)}": value for name, value in config.items()}
    precisions = [name for name in ("bf16", "fp16") if setup.get(f"arguments.{name}")]
    content = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "FSDP",
        "mixed_precision": precisions[0] if precisions else "no",
        "num_machines": job.nodes,
        "num_processes": max(2, job.processes),
        "fsdp_config": values,
    }
    return yaml.safe_dump(content, sort_keys=False)


_ACCELERATE_NAMES: Final = {"cpu_offload": "offload_params"}
"""Names in Trainer's `fsdp_config` → accelerate's, where they differ."""


def with_installed_names(arguments: Reasoned) -> dict[str, tuple[Any, str]]:
    """The arguments under the installed transformers' names."""
    renamed = {}
    for name, (value, reason) in arguments.items():
        ((installed, value),) = library_versions.to_installed_arguments({name: value}).items()
        renamed[installed] = (value, reason)
    return renamed


def reasoned_yaml(entries: Reasoned, indent: str = "") -> str:
    """Each value under its reason; consecutive values with the same reason share it."""
    text = ""
    previous = ""
    for name, (value, reason) in entries.items():
        if reason != previous:
            lines = textwrap.wrap(reason, _WIDTH - 2 * len(indent), break_long_words=False)
            text += "".join(f"# {line}\n" for line in lines)
        # PyYAML writes 1.0e-05 for a number and quotes the text "no", as its reader requires.
        text += yaml.safe_dump({name: value}, sort_keys=False, allow_unicode=True, width=_WIDTH)
        previous = reason
    return textwrap.indent(text, indent)


def _comment(lines: Iterable[str]) -> str:
    wrapped = []
    for line in lines:
        indent = len(line) - len(line.lstrip())
        if indent:  # code stays on one line, so that it can be copied
            wrapped.append(f"# {line}")
            continue
        hang = "  " if line.startswith("- ") else ""
        wrapped += [
            f"# {part}" for part in textwrap.wrap(line, _WIDTH, subsequent_indent=hang, break_long_words=False)
        ]
    return "".join(f"{line}\n" for line in wrapped)
