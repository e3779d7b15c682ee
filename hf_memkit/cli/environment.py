"""Runs memkit with the libraries of the Python that trains, also if memkit is not installed there.

```
--python, else the active environment, else memkit's own ──> this process becomes the same command there (boot.py)
```
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from typer.core import TyperCommand

from hf_memkit.catalog.environments import python_of, refuse_too_old_here
from hf_memkit.cli.options import more
from hf_memkit.common import boot
from hf_memkit.common.errors import InputError

command_line: list[str] = []
"""Arguments of this process if it is a command line; set by `main_and_exit`."""

_ACTIVE: Final = ("VIRTUAL_ENV", "CONDA_PREFIX")
_TRAINS: Final = "import importlib.util, sys; sys.exit(importlib.util.find_spec('transformers') is None)"
_LIMIT_S: Final = 60.0


def _switch_python(context: typer.Context, python: str | None) -> None:
    """Continues in the environment that trains, unless this process already runs there."""
    if not boot.is_booted and (command_line or python):
        there = None
        if python is not None:
            there = python_of(python)
        elif getattr(sys.modules["__main__"], "__spec__", None) is None:  # not `OTHER/bin/python -m hf_memkit`
            there = _active()
        if there is not None and not _is_this(there):
            _become(there, "--python" if python is not None else "the active environment")
    if isinstance(context.command, Trains):
        refuse_without_libraries(python)


def refuse_without_libraries(python: str | None = None) -> None:
    """Refuses an environment without torch, transformers and accelerate, or with older ones than memkit supports.
    `python`: the user's `--python`."""
    try:
        refuse_too_old_here()
    except InputError as error:
        active = next(filter(None, map(os.environ.get, _ACTIVE)), None)
        if boot.is_booted or python is not None or active is None or _is_this(Path(active, "bin", "python")):
            raise
        raise InputError(f"the active environment, {active}: no transformers, and {error}") from None


def _become(there: Path, which: str) -> None:
    if not command_line:
        raise InputError(f"--python {there}: only on the command line. Call memkit's functions with that Python.")
    print(f"memkit: with the libraries of {there} ({which})", file=sys.stderr, flush=True)
    os.environ[boot.PLACE] = boot.place_of(typer.__file__)
    # As in an active environment, so that launchers are found.
    os.environ["PATH"] = os.pathsep.join([str(there.parent), os.environ.get("PATH", os.defpath)])
    try:
        os.execv(there, boot.command(*command_line, python=str(there)))
    except OSError as error:
        raise InputError(f"--python {there}: cannot be started: {error.strerror}") from None


def _active() -> Path | None:
    """The interpreter of the active environment, if that has transformers."""
    for name in _ACTIVE:
        folder = os.environ.get(name)
        python = Path(folder or "", "bin", "python")
        if folder and python.exists() and (_is_this(python) or _trains(python)):
            return python.absolute()
    return None


def _is_this(python: Path) -> bool:
    return python.parent.parent.resolve() == Path(sys.prefix).resolve()


def _trains(python: Path) -> bool:
    folder = python.parent.parent
    if any(folder.glob("lib/python3*/site-packages/transformers/__init__.py")):
        return True
    try:  # it may be installed from a checkout, or in an environment that this one extends
        # `cwd`: the first entry of its path.
        ran = subprocess.run([python, "-c", _TRAINS], capture_output=True, timeout=_LIMIT_S, cwd=os.sep)
        return ran.returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


_PYTHON = more(
    "Python of the environment that trains. Default: the active environment's, else memkit's own.",
    metavar="PATH",
    is_eager=True,
    expose_value=False,
    callback=_switch_python,
)


def _verb(python: Annotated[str | None, _PYTHON] = None) -> None:
    """Has the option `--python`, which `InEnvironment` copies."""


class InEnvironment(TyperCommand):
    """A verb that needs installed libraries: it has the option `--python` and runs in that environment."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        app = typer.Typer(add_completion=False)
        app.command()(_verb)
        command: Any = typer.main.get_command(app)
        self.params.append(next(each for each in command.params if each.name == "python"))


class Trains(InEnvironment):
    """A verb that needs torch, transformers and accelerate there."""
