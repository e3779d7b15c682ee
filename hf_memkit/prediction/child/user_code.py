"""Tells the user's code from libraries' code, and finds the user's line."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
import traceback
import types
from functools import cache
from pathlib import Path
from typing import Final

MEMKIT: Final = str(Path(__file__).resolve().parents[2]) + os.sep  # folder of this package

PYTHON: Final = str(Path(os.__file__).parent)  # folder of Python's standard library

_LIBRARIES: Final = ("site-packages", "dist-packages", "/lib/python3")
_PACKAGES: Final = ("torch", "transformers", "accelerate", "peft", "trl")
"""Libraries in any folder: a checkout (`pip install -e`), or a target folder (`pip install --target`)."""


def calling_line() -> str | None:
    """`"train.py, line 12"` if the first caller outside torch is the user's code; None if it is a library."""
    for frame, line in traceback.walk_stack(sys._getframe(2)):
        file = frame.f_code.co_filename
        if "/torch/" not in file and MEMKIT not in file and not file.startswith("<"):
            return None if is_library(file) else f"{Path(file).name}, line {line}"
    return None


def line_in_traceback(trace: types.TracebackType | None) -> str:
    """`"train.py, line 12"`: the innermost line of the user's code in a traceback; empty if there is none."""
    place = ""
    for frame, line in traceback.walk_tb(trace):
        if not is_library(frame.f_code.co_filename):
            place = f"{Path(frame.f_code.co_filename).name}, line {line}"
    return place


def is_library(file: str) -> bool:
    """Whether a code file belongs to an installed library, not to the user."""
    known = file.startswith(("<", PYTHON, *_package_folders())) or MEMKIT in file
    return known or any(part in file for part in _LIBRARIES) or _is_installed(str(Path(file).parent))


@cache
def _is_installed(folder: str) -> bool:
    """Whether the folder belongs to a package installed by pip (`--target`): a RECORD next to it lists the package."""
    top = Path(folder)
    if not (top / "__init__.py").exists():
        return False
    while (top.parent / "__init__.py").exists():
        top = top.parent
    records = top.parent.glob("*.dist-info/RECORD")
    return any(f"{top.name}/__init__.py," in record.read_text(encoding="utf-8") for record in records)


@cache
def _package_folders() -> tuple[str, ...]:
    specs = map(importlib.util.find_spec, _PACKAGES)
    return tuple(f"{folder}/" for spec in specs if spec for folder in spec.submodule_search_locations or ())


def users_line() -> str:
    """`"train.py, line 12"`: the innermost running line of the user's code; empty if there is none."""
    for frame, line in traceback.walk_stack(sys._getframe(1)):
        if not is_library(frame.f_code.co_filename):
            return f"{Path(frame.f_code.co_filename).name}, line {line}"
    return ""


_EVALUATES: Final = re.compile("evaluat|predict|metric|valid|perplexity|accura|(^|_)(eval|test|infer)", re.IGNORECASE)


def running_evaluation() -> str:
    """`"evaluate_all() (train.py, line 12)"`: the outermost call in the user's code to a function whose name means
    evaluation; empty if there is none."""
    evaluation, called = "", ""
    for frame, line in traceback.walk_stack(sys._getframe(1)):
        file, name = frame.f_code.co_filename, frame.f_code.co_qualname
        if not is_library(file) and _EVALUATES.search(called):
            evaluation = f"{called}() ({Path(file).name}, line {line})"
        if not file.startswith(MEMKIT):
            called = name.split(".<")[0]
    return evaluation
