"""A setup as what a person pastes: flags of a command line, YAML, Python, and the commands that come before.

In: a candidate. Out: text, with the names of the installed transformers.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import yaml
from packaging.version import Version

from hf_memkit import compat
from hf_memkit.plan.candidate import SetupCandidate

__all__ = ["Pasted", "pasted"]

_ON_DISK = "nvme"


@dataclass(frozen=True, slots=True)
class Pasted:
    """
    Attributes:
        before: commands to type first: they write the files that the arguments name, or install what is needed.
        environment: `"NAME=value"`, to stand before the command.
        flags: `"--NAME value"` each, for scripts that read their arguments with HfArgumentParser; of an argument that
            is given twice the last one counts.
        yaml: the same as a file of arguments.
        python: the same as keyword arguments of TrainingArguments.
        no_flag: of these arguments `"NAME=None"` each: a parser takes no None.
        model: keyword arguments of `from_pretrained`, for which a script has no flag; empty: none.
        code: what has to be changed in the script besides; empty: nothing.
    """

    before: tuple[str, ...]
    environment: tuple[str, ...]
    flags: tuple[str, ...]
    yaml: str
    python: str
    no_flag: tuple[str, ...]
    model: str
    code: str

    def to_json(self) -> dict[str, Any]:
        return {
            "before": list(self.before),
            "environment": list(self.environment),
            "flags": " ".join(self.flags),
            "yaml": self.yaml,
            "python": self.python,
            "no_flag": list(self.no_flag),
            "model": self.model,
            "code": self.code,
        }


def pasted(candidate: SetupCandidate) -> Pasted:
    """What sets this candidate's settings in a script by hand."""
    engine = next((each.engine for each in candidate.choices if each.engine), "")
    arguments = _installed(candidate.arguments)
    before = tuple(each.install for each in candidate.choices if each.install)
    if engine:
        on_disk = _ON_DISK in json.dumps(arguments["deepspeed"])
        before += (f"memkit ds copy {engine}" + (" --nvme-path FOLDER_ON_A_FAST_DISK" if on_disk else ""),)
        arguments["deepspeed"] = f"{engine}.json"
    model = candidate.overrides.model
    return Pasted(
        before=before,
        environment=tuple(f"{name}={shlex.quote(value)}" for name, value in candidate.environment.items()),
        flags=tuple(f"--{name} {_word(value)}" for name, value in arguments.items() if value is not None),
        yaml=yaml.safe_dump(arguments, sort_keys=False, allow_unicode=True, width=1000),
        python=_call("TrainingArguments", arguments),
        no_flag=tuple(f"{name}=None" for name, value in arguments.items() if value is None),
        model=_call("AutoModel….from_pretrained", model) if model else "",
        code=candidate.code,
    )


def _installed(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Under the names that the installed transformers has; it is not imported, which takes seconds."""
    release = Version(version("transformers")).release[:2]
    return {compat.name_in_version(name, release): value for name, value in arguments.items()}


def _word(value: Any) -> str:
    """As HfArgumentParser takes it: a mapping is JSON (transformers: training_args.py, `_VALID_DICT_FIELDS`)."""
    return shlex.quote(json.dumps(value, separators=(",", ":")) if isinstance(value, Mapping) else str(value))


def _call(what: str, arguments: Mapping[str, Any]) -> str:
    lines = "".join(f"    {name}={value!r},\n" for name, value in arguments.items())
    return f"{what}(\n    ...,\n{lines})"
