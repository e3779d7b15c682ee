"""The registry of generated blocks of pages, and what their functions share: tables, and commands with their output.

A block stands between `<!-- KIND: NAME -->` and `<!-- end -->`. What fills it is registered here: a function
that returns Markdown (`@block`), or the output of the command that the page shows there (`example`).
"""

from __future__ import annotations

import difflib
import io
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from contextlib import chdir, redirect_stderr, redirect_stdout
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
sys.path.insert(0, str(ROOT))  # `benchmarks` and `tests` are not installed

Make = Callable[[], str]
Prepare = Callable[[Path], None]
"""Writes the files that a command reads into a folder."""

Part = str | tuple[str, str]
"""A part of an output: one line, by its beginning; or lines, by the beginnings of the first and of the one after."""

BLOCKS: dict[tuple[str, str], Make] = {}
"""(page, name of the block) → what makes it."""


def block(page: str, name: str) -> Callable[[Make], Make]:
    """Registers a function that returns the Markdown of a block."""

    def register(make: Make) -> Make:
        BLOCKS[page, name] = make
        return make

    return register


def example(page: str, name: str, *parts: Part, prepare: Prepare | None = None, errors: bool = False) -> None:
    """Registers the command that the page shows in a block: it runs, and the page shows its output, or parts of it.

    Args:
        page, name: the block.
        parts: of the output, in its order; without any, the whole output.
        prepare: writes the files that the command reads.
        errors: whether the page also shows standard error, after the output.
    """

    def make() -> str:
        command = re.search(r"```bash\n(.*?)\n```", block_in(page, name), re.DOTALL)
        if command is None:
            raise SystemExit("the block shows no command")
        output = output_of(command[1], prepare, errors)
        return shown(command[1], excerpt(output, *parts) if parts else output)

    BLOCKS[page, name] = make


def table(columns: str, rows: Iterable[Iterable[Any]]) -> str:
    """A Markdown table: the headings with ` | ` between them, and the cells of each row. None shows as –."""
    lines = [f"| {columns} |", "|---" * (columns.count(" | ") + 1) + "|"]
    for row in rows:
        cells = ["–" if cell is None else " ".join(str(cell).split()).replace("|", "\\|") for cell in row]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def shown(command: str, output: str) -> str:
    """A command and its output."""
    lines = "\n".join(line.rstrip() for line in output.rstrip().splitlines())
    return f"```bash\n{command}\n```\n\n```text\n{lines}\n```"


def excerpt(output: str, *parts: Part) -> str:
    """Parts of an output, in their order, with `…` for what is left out."""
    lines = output.rstrip().splitlines()
    kept: list[str] = []
    position = 0

    def find(text: str, start: int) -> int:
        for number, line in enumerate(lines[start:], start):
            if line.startswith(text):
                return number
        raise SystemExit(f"no line begins with {text!r}:\n{output}")

    for part in parts:
        begin = find(part if isinstance(part, str) else part[0], position)
        end = begin + 1 if isinstance(part, str) else find(part[1], begin + 1)
        if begin > position:
            kept.append("…")
        kept.append("\n".join(lines[begin:end]).rstrip())
        position = end
    if position < len(lines):
        kept.append("…")
    return "\n".join(kept)


@cache
def output_of(command: str, prepare: Prepare | None, errors: bool) -> str:
    """What a command prints. `memkit` runs in this process, which imports torch once; other commands in a shell."""
    with tempfile.TemporaryDirectory() as folder, chdir(folder), mock.patch.dict(os.environ):
        if prepare is not None:
            prepare(Path(folder))
        if not command.startswith("memkit "):
            return subprocess.run(command, shell=True, capture_output=True, text=True, check=True).stdout
        from hf_memkit.cli import main

        out, error = io.StringIO(), io.StringIO()
        with redirect_stdout(out), redirect_stderr(error):
            main(shlex.split(command.replace("\\\n", " "))[1:])
    if not out.getvalue():
        raise SystemExit(error.getvalue())
    return out.getvalue() + error.getvalue() * errors


@cache
def set_environment() -> tempfile.TemporaryDirectory[str]:
    """Sets what libraries read when they are imported and removes what changes an output; the hub's cache is empty."""
    from hf_memkit.setup.techniques.allocator import OLD_VARIABLES, VARIABLE

    hub = tempfile.TemporaryDirectory()
    for name in ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", VARIABLE, *OLD_VARIABLES):
        os.environ.pop(name, None)
    os.environ |= {"PYTHONPATH": str(ROOT), "COLUMNS": "80", "HF_HUB_OFFLINE": "1", "HF_HOME": hub.name}
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return hub


def _pattern(name: str) -> re.Pattern[str]:
    return re.compile(rf"(?<=<!-- )(\w+: {re.escape(name)} -->\n)(.*?)(?=<!-- end -->)", re.DOTALL)


def block_in(page: str, name: str) -> str:
    """A block as it stands in the page."""
    if not (match := _pattern(name).search((ROOT / page).read_text())):
        raise SystemExit(f"{page} has no <!-- KIND: {name} -->")
    return match[2]


def compact_json(content: Any, *, sections: bool = False) -> str:
    """JSON with each list on a line; with `sections` also each object that holds no other."""
    text = re.sub(r"\[[^]]*\]", lambda each: " ".join(each[0].split()), json.dumps(content, indent=1))
    return (re.sub(r"\{[^{}]*\}", lambda each: " ".join(each[0].split()), text) if sections else text) + "\n"


def write(page: Path, text: str, *, check: bool) -> bool:
    """Writes a file; with `check` only prints how it would change. Whether it was current, or now is."""
    before = page.read_text()
    if not check:
        page.write_text(text)
    if not check or text == before:
        return True
    changes = [line for line in difflib.ndiff(before.splitlines(), text.splitlines()) if line[0] in "+-"]
    print(f"{page.relative_to(ROOT)} is not current:", *changes[:40], sep="\n")
    return False


def fill(page: str, name: str, *, check: bool) -> bool:
    """Makes a block and writes it into its page, as `write` does."""
    new = BLOCKS[page, name]()
    block_in(page, name)  # fails without the block
    text = _pattern(name).sub(lambda match: f"{match[1]}{new}\n", (ROOT / page).read_text())
    return write(ROOT / page, text, check=check)
