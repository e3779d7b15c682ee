"""Another Python environment, with whose libraries trainings are traced, or memkit runs.

In: what `--python` or `--compare-with` names. Out: the interpreter, and the versions of all that is installed for it;
or why trainings cannot be traced there. memkit need not be installed there (`boot.py`).
"""

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
from hf_memkit.common.errors import InputError

_OLDEST_PYTHON: Final = ".".join(map(str, OLDEST_PYTHON))
_LIMIT_S: Final = 60.0

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
"""Of two distributions with one name the first is imported."""


@dataclass(frozen=True, slots=True)
class Environment:
    """A Python interpreter that traces can be made with.

    Attributes:
        python: its path.
        libraries: name of a distribution, in small letters with hyphens → its version.
    """

    python: str
    libraries: Mapping[str, str]


def python_of(given: str | Path, option: str = "--python") -> Path:
    """The interpreter that is meant: by its path, its name, or the folder of its environment; an InputError where
    there is none."""
    path = Path(shutil.which(given) or given)
    if path.is_dir():
        path = path / "bin" / "python"
    if not path.is_file() or not os.access(path, os.X_OK):
        raise InputError(f"{option} {given}: no such program. Give a Python, such as /other/venv/bin/python.")
    return path.absolute()  # not resolved: a venv's Python is a link, and knows by its place which venv


def find_environment(python: str | Path, option: str = "--python") -> Environment:
    """The environment of an interpreter, such as `/other/venv/bin/python`, or of a venv's folder; an InputError where
    training is not traced with what it has, with what to install."""
    path = python_of(python, option)
    try:
        ran = subprocess.run(
            [path, "-c", _PROBE], capture_output=True, text=True, timeout=_LIMIT_S, stdin=subprocess.DEVNULL
        )
        python_version, libraries = json.loads(ran.stdout.splitlines()[-1])
    except (OSError, subprocess.TimeoutExpired, ValueError, IndexError):
        raise InputError(
            f"{option} {python}: not a Python that runs here. Give one, such as /other/venv/bin/python."
        ) from None
    if Version(python_version) < Version(_OLDEST_PYTHON):
        raise InputError(f"{option} {python}: Python {python_version}. memkit needs {_OLDEST_PYTHON} or later there.")
    refuse_too_old(libraries, path, f"{option} {python}")
    return Environment(str(path), libraries)


def refuse_too_old_here() -> None:
    """As `refuse_too_old`, of this environment."""
    found = {}
    for name in OLDEST:
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    refuse_too_old(found, sys.executable, sys.executable)


def missing_here() -> str:
    """Why a verb finds no library that trains, in words; empty: they are all there."""
    try:
        refuse_too_old_here()
    except InputError as error:
        return str(error)
    return ""


def refuse_too_old(libraries: Mapping[str, str], python: str | Path, where: str) -> None:
    """Refuses an environment (library → version) that lacks a library that traces need, or has one that is too old,
    with the oldest that works. `where`: how the user named its interpreter."""
    if not libraries.keys() & OLDEST.keys():
        raise InputError(
            f"{where}: no torch, no transformers. "
            + ("Give a Python that has them." if where.startswith("--") else _ACTIVATE)
        )
    wrong = [
        f"{name} {libraries[name]} is too old: memkit needs {oldest} or later" if name in libraries else f"no {name}"
        for name, oldest in OLDEST.items()
        if name not in libraries or Version(libraries[name]) < Version(oldest)
    ]
    if wrong:
        needed = " ".join(f"'{name}>={oldest}'" for name, oldest in OLDEST.items())
        raise InputError(f"{where}: {'; '.join(wrong)}. Type: {python} -m pip install {needed}")
