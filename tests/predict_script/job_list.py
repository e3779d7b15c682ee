"""The jobs of `jobs/jobs.yaml`: the commands of scripts and modules."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Final

import yaml

from hf_memkit.common.user_script import UserScript

FOLDER: Final = Path(__file__).parent / "jobs"
_WRITTEN: Final = FOLDER / "written"


def typed_jobs() -> dict[str, str]:
    """Name → command."""
    commands: dict[str, str] = yaml.safe_load((FOLDER / "jobs.yaml").read_text())
    quick = commands.pop("quick")
    return {name: line.replace("{quick}", quick) for name, line in commands.items()}


def read_job(typed: str, folder: Path, out: Path, *, on_cpu: bool) -> tuple[UserScript, dict[str, str]]:
    """(the script of a command, the environment variables in front of it).

    Args:
        typed: the command.
        folder: folder with models and data (`jobs/prepare.py`).
        out: output folder.
        on_cpu: whether to keep the arguments that select the CPU.
    """
    places = {"{folder}": folder, "{out}": out, "{written}": _WRITTEN}
    for place, path in places.items():
        typed = typed.replace(place, str(path))
    words = [word for word in shlex.split(typed) if on_cpu or word not in ("--use_cpu", "--cpu")]
    environment = {}
    while "=" in words[0]:
        name, _, environment[name] = words.pop(0).partition("=")
    is_module = words[0] == "-m"
    target, *arguments = words[is_module:]
    return UserScript(target if is_module else str(_WRITTEN / target), is_module, tuple(arguments)), environment
