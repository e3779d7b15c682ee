"""Another Python environment, whose libraries are traced in place of this one's.

In: what `--python` names. Out: the interpreter, and the versions of all that is installed for it; or why it cannot be
traced there. memkit itself need not be installed there: its own folder runs in it, of which the child process imports
nothing that transformers and accelerate do not bring.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from packaging.specifiers import SpecifierSet

from hf_memkit.errors import InputError

__all__ = ["Environment", "find_environment"]

# The same as in pyproject.toml, of which an installed package knows nothing in another environment.
_PYTHON: Final = SpecifierSet(">=3.11")
_SUPPORTED: Final = {
    "torch": SpecifierSet(">=2.6"),
    "transformers": SpecifierSet(">=4.57,<6"),
    "accelerate": SpecifierSet(">=1.3"),
}
_LIMIT_S: Final = 60.0

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


def find_environment(python: str | Path) -> Environment:
    """The environment of an interpreter, such as `/other/venv/bin/python`, or of a venv's folder.

    Raises:
        InputError: there is none, or training is not traced with what it has; says what to install.
    """
    path = Path(shutil.which(python) or python)
    if path.is_dir() and (path / "bin" / "python").exists():
        path = path / "bin" / "python"
    if not path.is_file() or not os.access(path, os.X_OK):
        raise InputError(f"--python {python}: no such program; give a Python, such as /other/venv/bin/python")
    path = path.absolute()  # not resolved: a venv's Python is a link, and knows by its place which venv
    try:
        ran = subprocess.run(
            [path, "-c", _PROBE], capture_output=True, text=True, timeout=_LIMIT_S, stdin=subprocess.DEVNULL
        )
        version, libraries = json.loads(ran.stdout.splitlines()[-1])
    except (OSError, subprocess.TimeoutExpired, ValueError, IndexError):
        raise InputError(
            f"--python {python}: not a Python that runs here; give one, such as /other/venv/bin/python"
        ) from None
    if not _PYTHON.contains(version):
        raise InputError(f"--python {python}: Python {version}; traces need {_PYTHON}")
    wrong = [
        f"has {name} {libraries[name]}, and traces need {asked}" if name in libraries else f"has no {name}"
        for name, asked in _SUPPORTED.items()
        if name not in libraries or not asked.contains(libraries[name], prereleases=True)
    ]
    if wrong:
        needed = " ".join(f"'{name}{asked}'" for name, asked in _SUPPORTED.items())
        raise InputError(f"--python {python}: {'; '.join(wrong)}: {path} -m pip install {needed}")
    return Environment(str(path), libraries)
