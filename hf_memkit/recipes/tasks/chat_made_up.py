"""Conversations about Python's standard library, used without data and hub. Each asks for the parameters of a
function, or for the first line of its help. They are read from the library's source, so that the same Python creates
the same ones, even if other libraries have patched it."""

from __future__ import annotations

import ast
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Final

_LIBRARY: Final = Path(sysconfig.get_path("stdlib"))
_MODULES: Final = (
    "argparse", "base64", "bisect", "calendar", "collections", "copy", "csv", "difflib", "fnmatch", "fractions",
    "functools", "glob", "gzip", "heapq", "html", "inspect", "json", "logging", "operator", "os", "pathlib", "pickle",
    "pprint", "queue", "random", "shlex", "shutil", "statistics", "string", "subprocess", "tempfile", "textwrap",
    "threading", "tokenize", "types", "typing", "urllib.parse", "uuid", "zipfile",
)  # fmt: skip
_SYSTEM: Final = "You know Python's standard library, and answer in one line."
_LONGEST: Final = 200
"""Maximum characters of an answer."""


def made_up_conversations() -> list[list[dict[str, str]]]:
    """Conversations of one or two questions, with a system message in every third."""
    conversations = []
    for number, (name, signature, summary) in enumerate(_functions()):
        system = [{"role": "system", "content": _SYSTEM}] if number % 3 == 0 else []
        purpose = _turn(f"What does {name} do?", summary)
        parameters = _turn(f"Which parameters does {name} take?", signature)
        questions = purpose + parameters
        if number % 2 == 0:
            questions = parameters if number % 4 else purpose
        conversations.append([*system, *questions])
    return conversations


def _functions() -> Iterator[tuple[str, str, str]]:
    """(name, parameters, first line of the help) of each public function and class method with both."""
    for module in _MODULES:
        file = _LIBRARY / module.replace(".", "/")
        file = file / "__init__.py" if file.is_dir() else file.with_suffix(".py")
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            inside = node.body if isinstance(node, ast.ClassDef) and not node.name.startswith("_") else [node]
            prefix = f"{module}.{node.name}" if isinstance(node, ast.ClassDef) else module
            for function in inside:
                if not isinstance(function, ast.FunctionDef) or function.name.startswith("_"):
                    continue
                summary = (ast.get_docstring(function) or "").partition("\n")[0].strip()
                given = function.args
                arguments = (*given.posonlyargs, *given.args, given.vararg, *given.kwonlyargs, given.kwarg)
                names = [one.arg for one in arguments if one is not None and one.arg not in ("self", "cls")]
                if names and summary and len(summary) < _LONGEST:
                    yield f"{prefix}.{function.name}", f"It takes {', '.join(names)}.", summary


def _turn(question: str, answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
