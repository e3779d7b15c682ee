"""Conversations about Python's standard library, made of what is installed: for where there is no data and no hub.

Each asks for the parameters of a function, or for the first line of its help, and gets the answer. The same Python
makes the same ones.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from importlib import import_module
from typing import Any, Final

__all__ = ["made_up_conversations"]

_MODULES: Final = (
    "argparse", "base64", "bisect", "calendar", "collections", "copy", "csv", "datetime", "decimal", "difflib",
    "fnmatch", "fractions", "functools", "glob", "gzip", "hashlib", "heapq", "html", "inspect", "io", "itertools",
    "json", "logging", "math", "operator", "os", "os.path", "pathlib", "pickle", "pprint", "random", "re", "shlex",
    "shutil", "statistics", "string", "struct", "subprocess", "tempfile", "textwrap", "threading", "time", "tokenize",
    "types", "unittest", "urllib.parse", "uuid", "zipfile",
)  # fmt: skip
_SYSTEM: Final = "You know Python's standard library, and answer in one line."
_LONGEST: Final = 200
"""Characters of an answer."""


def made_up_conversations() -> list[list[dict[str, str]]]:
    """Conversations of one or two questions, with a system message in every third."""
    made = []
    for number, (name, signature, summary) in enumerate(_functions()):
        system = [{"role": "system", "content": _SYSTEM}] if number % 3 == 0 else []
        what = _turn(f"What does {name} do?", summary)
        how = _turn(f"Which parameters does {name} take?", signature)
        made.append([*system, *(what + how if number % 2 else how if number % 4 else what)])
    return made


def _functions() -> Iterator[tuple[str, str, str]]:
    """(name, parameters, first line of the help) of each function that says both."""
    for module_name in _MODULES:
        module: Any = import_module(module_name)
        for name in sorted(getattr(module, "__all__", None) or vars(module)):
            function = getattr(module, name, None)
            if name.startswith("_") or not inspect.isroutine(function):
                continue
            summary = (inspect.getdoc(function) or "").partition("\n")[0].strip()
            try:
                parameters = ", ".join(inspect.signature(function).parameters)
            except (ValueError, TypeError):
                continue
            if parameters and summary and len(summary) < _LONGEST:
                yield f"{module_name}.{name}", f"It takes {parameters}.", summary


def _turn(question: str, answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
