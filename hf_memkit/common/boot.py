"""Run memkit in another Python, whether or not memkit is installed there.

```
PYTHON hf_memkit/common/boot.py predict train.py …                       as `memkit predict train.py …`
PYTHON hf_memkit/common/boot.py -m hf_memkit.prediction.child.serve      as `python -m
hf_memkit.prediction.child.serve`
```
From memkit's environment that Python imports memkit only; for the command line also the packages in `_LENT`, which
memkit prints with. It must see no others: transformers looks for DeepSpeed, Liger kernels and more, and would use
those installed next to memkit.
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":  # before an import that a file of the current folder could answer
    _own = not getattr(sys.flags, "safe_path", False)  # whether the first entry is this file's folder
    sys.path[:_own] = [os.path.realpath(f"{__file__}/../../..")]
    from hf_memkit.common.search_path import omit_current_folder  # later ones come through the package's path

    sys.path[:1] = [os.path.realpath(f"{sys.executable}/..")] * _own
    omit_current_folder()

import runpy
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

BOOT = str(Path(__file__).resolve())
OLDEST_PYTHON = (3, 11)

_LENT = (
    "annotated_doc", "annotated_types", "click", "cloudpickle", "markdown_it", "mdurl", "packaging", "pydantic",
    "pydantic_core", "pygments", "pynvml", "rich", "shellingham", "typer", "typing_inspection", "yaml", "_yaml",
)  # fmt: skip
_VERSION = "%d.%d" % sys.version_info[:2]  # noqa: UP031 - read by earlier versions of Python, too
is_booted = False
"""Whether this process is a command line started through this file."""

_COMPILED = ("pydantic", "pydantic_core")
"""Packages of `_LENT` that work with one version of Python only."""

PLACE = "MEMKIT_LENDS"
"""Environment variable with the version of memkit's Python and its folder of packages, such as
`3.12:/own/lib/python3.12/site-packages`."""


def command(*arguments: str, python: str = sys.executable) -> list[str]:
    """The command line that runs `memkit ARGUMENTS` (with `-m` first: a module of memkit) in `python`."""
    return [python, BOOT, *arguments]


class _Lent:
    """Finder for packages of `_LENT` in memkit's environment."""

    def __init__(self, place: str) -> None:
        self.place = place
        self.same_version = os.environ[PLACE].startswith(f"{_VERSION}:")

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> Any:
        if path is not None or name not in _LENT or (name in _COMPILED and not self.same_version):
            return None
        spec: ModuleSpec | None = PathFinder.find_spec(name, [self.place])
        return spec


def place_of(file: str) -> str:
    """The value of `PLACE` for the environment that has this package's `__init__.py`."""
    return f"{_VERSION}:{Path(file).resolve().parents[1]}"


def places() -> list[str]:
    """The folder in `PLACE` if this process is a command line started through this file; else none."""
    _, _, place = os.environ.get(PLACE, "").partition(":")
    return [place] if place and is_booted else []


def missing(package: str | None) -> str:
    """Error line for a package of `_LENT` that neither Python has; empty for other packages."""
    if not places() or package not in _LENT:
        return ""
    version = os.environ[PLACE].partition(":")[0]
    return (
        f"{sys.executable}: no {package}, and memkit's copy of it is for Python {version}. "
        f"Type: {sys.executable} -m pip install {package}"
    )


def lend() -> None:
    """Import packages of `_LENT` from memkit's environment, in the versions that memkit needs."""
    for place in places():
        sys.meta_path.insert(0, _Lent(place))


def take_back() -> None:
    """Give a user's script the packages of its environment; memkit's remain as a fallback for memkit's last lines."""
    lenders = [finder for finder in sys.meta_path if isinstance(finder, _Lent)]
    if not lenders:
        return
    for name in [name for name in sys.modules if name.partition(".")[0] in _LENT]:
        del sys.modules[name]
    sys.meta_path[:] = [*(finder for finder in sys.meta_path if finder not in lenders), *lenders]


def _main() -> None:
    if sys.version_info < OLDEST_PYTHON:
        print(
            f"memkit: error: {sys.executable}: Python {_VERSION}. memkit needs %d.%d or later there." % OLDEST_PYTHON,
            file=sys.stderr,
        )
        sys.exit(2)
    import hf_memkit.common.boot as booted

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
