"""memkit in the Python that trains, whether it is installed there or not.

```
PYTHON hf_memkit/common/boot.py predict train.py …                       as `memkit predict train.py …`
PYTHON hf_memkit/common/boot.py -m hf_memkit.prediction.child.serve      as `python -m
hf_memkit.prediction.child.serve`
```
Of the environment that memkit is installed in, that Python sees memkit alone; for the command line also the packages
in `_LENT`, which memkit prints with, and never the others: transformers looks for DeepSpeed, Liger kernels and more,
and would take those that lie beside memkit.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

BOOT = str(Path(__file__).resolve())
OLDEST_PYTHON = (3, 11)

_PACKAGE = str(Path(__file__).resolve().parents[2])
_LENT = (
    "annotated_doc", "annotated_types", "click", "cloudpickle", "markdown_it", "mdurl", "packaging", "pydantic",
    "pydantic_core", "pygments", "pynvml", "rich", "shellingham", "typer", "typing_inspection", "yaml", "_yaml",
)  # fmt: skip
_VERSION = "%d.%d" % sys.version_info[:2]  # noqa: UP031 - read by earlier versions of Python, too
is_booted = False
"""Whether this process is a command line that was started through this file."""

_COMPILED = ("pydantic", "pydantic_core")
"""Those of `_LENT` that work with one version of Python only."""

PLACE = "MEMKIT_LENDS"
"""The environment variable that says where `_LENT` lies: memkit's own version of Python and its folder of packages,
such as `3.12:/own/lib/python3.12/site-packages`."""


def command(*arguments: str, python: str = sys.executable) -> list[str]:
    """The command by which that Python runs `memkit ARGUMENTS`, or with `-m` a module of memkit."""
    return [python, BOOT, *arguments]


class _Lent:
    """Finds packages of `_LENT` in memkit's own environment."""

    def __init__(self, place: str) -> None:
        self.place = place
        self.same_version = os.environ[PLACE].startswith(f"{_VERSION}:")

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> Any:
        if path is not None or name not in _LENT or (name in _COMPILED and not self.same_version):
            return None
        found: ModuleSpec | None = PathFinder.find_spec(name, [self.place])
        return found


def place_of(file: str) -> str:
    """The value of `PLACE` for the environment in which a package's `__init__.py` is this file."""
    return f"{_VERSION}:{Path(file).resolve().parents[1]}"


def places() -> list[str]:
    """The folder of `PLACE` in a command line that was started through this file; else none."""
    _, _, place = os.environ.get(PLACE, "").partition(":")
    return [place] if place and is_booted else []


def missing(package: str | None) -> str:
    """What to say if Python finds no such package, and memkit could not lend its own; empty: it is another package."""
    if not places() or package not in _LENT:
        return ""
    version = os.environ[PLACE].partition(":")[0]
    return (
        f"{sys.executable}: no {package}, and memkit's own is made for Python {version}. "
        f"Type: {sys.executable} -m pip install {package}"
    )


def lend() -> None:
    """From here on memkit imports the packages of its own environment, of the versions that it needs."""
    for place in places():
        sys.meta_path.insert(0, _Lent(place))


def take_back() -> None:
    """Before a user's script runs in this process: its imports find what its environment has; what that lacks stays
    lent, for memkit's own lines at the end."""
    lenders = [each for each in sys.meta_path if isinstance(each, _Lent)]
    if not lenders:
        return
    for name in [name for name in sys.modules if name.partition(".")[0] in _LENT]:
        del sys.modules[name]
    sys.meta_path[:] = [*(each for each in sys.meta_path if each not in lenders), *lenders]


def _main() -> None:
    if sys.version_info < OLDEST_PYTHON:
        found, oldest = (".".join(map(str, each[:2])) for each in (sys.version_info, OLDEST_PYTHON))
        print(
            f"memkit: error: {sys.executable}: Python {found}. memkit needs {oldest} or later there.", file=sys.stderr
        )
        sys.exit(2)
    own = sys.path[0] if sys.path and sys.path[0] == str(Path(BOOT).parent) else None
    if own is not None:
        sys.path[0] = _PACKAGE
    else:  # `python -P`
        sys.path.insert(0, _PACKAGE)
    import hf_memkit.common.boot as booted  # its other modules are found through the package's own path from here on

    if own is not None:
        sys.path[0] = str(Path.cwd())  # as with `python -m`
    else:
        del sys.path[0]
    if sys.argv[1:2] == ["-m"]:
        module = sys.argv[2]
        sys.argv = sys.argv[2:]
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        return
    booted.is_booted = True
    booted.lend()
    runpy.run_module("hf_memkit", run_name="__main__")


if __name__ == "__main__":
    _main()
