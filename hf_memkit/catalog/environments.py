"""Other Python environments, for tracing with their libraries or for running memkit (`--python`, `--compare-with`).
memkit need not be installed there (`boot.py`)."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

from packaging.version import Version

from hf_memkit.catalog.library_versions import OLDEST
from hf_memkit.common.boot import OLDEST_PYTHON
from hf_memkit.common.commands import command
from hf_memkit.common.errors import InputError

_OLDEST_PYTHON: Final = ".".join(map(str, OLDEST_PYTHON))
_LIMIT_S: Final = 60.0  # seconds for an interpreter to answer

_ACTIVATE: Final = "Activate the environment that trains, or give its Python: --python PATH"

_PROBE: Final = """
import sys, json
found = {}
if sys.version_info >= (3, 8):
    from importlib.metadata import distributions
    for each in distributions():
        name = each.metadata["Name"]
        if name:
            found.setdefault(name.lower().replace("_", "-"), each.version)
print(json.dumps(["%d.%d.%d" % sys.version_info[:3], found]))
"""
"""Prints the Python version, and name → version of each distribution (the first of two, as Python imports)."""


@dataclass(frozen=True, slots=True)
class Environment:
    """A Python interpreter that trainings can be traced with.

    Attributes:
        python: its path.
        libraries: name of a distribution, in lower case with hyphens → its version.
    """

    python: str
    libraries: Mapping[str, str]


def python_of(given: str | Path, option: str = "--python") -> Path:
    """Path of the interpreter given by its path, its name, or its environment's folder. Raises InputError if none."""
    path = Path(shutil.which(given) or given)
    if path.is_dir():
        path = path / "bin" / "python"
    if not path.is_file() or not os.access(path, os.X_OK):
        raise InputError(f"{option} {given}: no such program. Give a Python, such as /other/venv/bin/python.")
    return path.absolute()  # not resolved: a venv's Python is a link whose path identifies the venv


def find_environment(python: str | Path, option: str = "--python") -> Environment:
    """The environment of an interpreter such as `/other/venv/bin/python`, or of a venv's folder. Raises InputError if
    there is no Python, or libraries are missing or too old; with the packages to install."""
    path = python_of(python, option)
    try:
        completed = subprocess.run(
            [path, "-c", _PROBE], capture_output=True, text=True, timeout=_LIMIT_S, stdin=subprocess.DEVNULL,
            cwd=os.sep,  # the first entry of its path
        )  # fmt: skip
        python_version, libraries = json.loads(completed.stdout.splitlines()[-1])
    except (OSError, subprocess.TimeoutExpired, ValueError, IndexError):
        raise InputError(
            f"{option} {python}: not a Python that runs here. Give one, such as /other/venv/bin/python."
        ) from None
    if Version(python_version) < Version(_OLDEST_PYTHON):
        raise InputError(f"{option} {python}: Python {python_version}. memkit needs {_OLDEST_PYTHON} or later there.")
    refuse_too_old(libraries, path, f"{option} {python}")
    return Environment(str(path), libraries)


def refuse_too_old_here() -> None:
    """`refuse_too_old` for this environment."""
    libraries = {}
    for name in OLDEST:
        with contextlib.suppress(PackageNotFoundError):
            libraries[name] = version(name)
    refuse_too_old(libraries, sys.executable, sys.executable)


def missing_here() -> str:
    """Why this environment cannot trace trainings; empty if it can."""
    try:
        refuse_too_old_here()
    except InputError as error:
        return str(error)
    return ""


def refuse_too_old(libraries: Mapping[str, str], python: str | Path, where: str) -> None:
    """Check that an environment has all libraries that traces need, in versions that work.

    Args:
        libraries: library → version.
        python: its interpreter, for the command in the message.
        where: the interpreter as the user named it.

    Raises:
        InputError: one is missing or too old; names the oldest version that works.
    """
    if not libraries.keys() & OLDEST.keys():
        fix = "Give a Python that has them." if where.startswith("--") else _ACTIVATE
        raise InputError(f"{where}: no torch, no transformers. {fix}")
    wrong = [
        f"{name} {libraries[name]} is too old: memkit needs {oldest} or later" if name in libraries else f"no {name}"
        for name, oldest in OLDEST.items()
        if name not in libraries or Version(libraries[name]) < Version(oldest)
    ]
    if wrong:
        install = command(python, "-m", "pip", "install", *(f"{name}>={oldest}" for name, oldest in OLDEST.items()))
        raise InputError(f"{where}: {'; '.join(wrong)}. Type: {install}")
