"""Texts in every Python installation, for a rehearsal: they show that a model learns, not a useful result."""

from __future__ import annotations

import dis
import inspect
import io
import re
from collections.abc import Iterator
from importlib import import_module
from typing import Any, Final

_MODULES: Final = (
    "argparse", "ast", "calendar", "collections", "configparser", "csv", "datetime", "decimal", "difflib",
    "email.message", "fractions", "functools", "heapq", "inspect", "ipaddress", "json", "logging", "math", "os",
    "os.path", "pathlib", "random", "re", "shutil", "socket", "statistics", "string", "subprocess", "tarfile",
    "tempfile", "textwrap", "threading", "typing", "unittest.mock", "urllib.parse", "uuid", "zipfile",
)  # fmt: skip
_CHARACTERS: Final = 400
_ADDRESS: Final = re.compile(r" at 0x[0-9a-f]+")
"""Address of an object in memory, different in every process."""


def help_texts() -> list[str]:
    """The text of Python's own help."""
    from pydoc_data.topics import topics

    return [topics[name] for name in sorted(topics)]


def summaries() -> list[dict[str, Any]]:
    """`{"source", "target"}`: help of a standard library function, and its first sentence."""
    by_source = {}
    for name, described in _described():
        first, _, rest = described.partition("\n\n")
        sentence, rest = " ".join(first.split()), " ".join(rest.split())
        if 10 <= len(sentence) <= 100 and len(rest) >= 40:
            by_source[f"{name}: {rest[:_CHARACTERS]}"] = sentence
    return [{"source": source, "target": by_source[source]} for source in _mixed(by_source)]


def kinds_of_text() -> list[dict[str, Any]]:
    """`{"text", "label"}`: pieces of Python's standard library that are code, documentation or bytecode."""
    labels: dict[str, str] = {}
    for name in ("argparse", "ast", "calendar", "csv", "difflib", "inspect", "logging", "shutil", "textwrap"):
        module = import_module(name)
        for _, function in sorted(inspect.getmembers(module, inspect.isfunction)):
            if function.__module__ != name:
                continue
            labels[inspect.getsource(function)[:_CHARACTERS]] = "code"
            bytecode = io.StringIO()
            dis.dis(function, file=bytecode, depth=0)
            labels[_ADDRESS.sub("", bytecode.getvalue())[:_CHARACTERS]] = "bytecode"
    for _, described in _described():
        if len(described) >= 60:
            labels[described[:_CHARACTERS]] = "documentation"
    fewest = min(list(labels.values()).count(label) for label in set(labels.values()))
    rows: list[dict[str, Any]] = []
    for label in sorted(set(labels.values())):
        rows += [{"text": text, "label": label} for text in _mixed(labels) if labels[text] == label][:fewest]
    return rows


def _described() -> Iterator[tuple[str, str]]:
    """(name, docstring) of the modules' objects."""
    for name in _MODULES:
        module = import_module(name)
        for owner, members in [(name, vars(module)), *((f"{name}.{kind.__name__}", vars(kind)) for kind in
                                                       vars(module).values() if inspect.isclass(kind))]:  # fmt: skip
            for member, value in sorted(members.items(), key=lambda item: item[0]):
                text = inspect.getdoc(value) if callable(value) and not member.startswith("_") else None
                if text:
                    yield f"{owner}.{member}", text


def _mixed(texts: dict[str, Any]) -> list[str]:
    """The texts in an order independent of their origin, the same everywhere."""
    import hashlib

    return sorted(texts, key=lambda text: hashlib.sha256(text.encode()).hexdigest())
