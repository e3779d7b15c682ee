"""Prints single lines and JSON, and knows the command that was typed."""

from __future__ import annotations

import json
import re
import shlex
import sys
from typing import Any, Final

from hf_memkit.cli.environment import command_line

_SECRET: Final = re.compile(r"(?i)^-.*(token|secret|password|api_?key)")


def say(line: str) -> None:
    """Prints a line as it is, however long."""
    print(line, flush=True)


def say_to_stderr(line: str) -> None:
    print(line, file=sys.stderr)


def silent(line: str) -> None:
    """Prints nothing: for ranks other than the first."""


def print_json(content: Any) -> None:
    print(json.dumps(content, indent=2))


def typed_command() -> str:
    """The command that was typed, without passwords and tokens; empty if memkit was called from Python."""
    words = list(command_line)
    for place, word in enumerate(words):
        option, equals, value = word.partition("=")
        if _SECRET.match(option) and value:
            words[place] = f"{option}{equals}…"
        elif _SECRET.match(word) and place + 1 < len(words):
            words[place + 1] = "…"
    return shlex.join(["memkit", *words]) if words else ""
