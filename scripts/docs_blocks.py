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
from collections.abc import Callable, Iterable, Mapping
from contextlib import chdir, redirect_stderr, redirect_stdout
from functools import cache
from pathlib import Path
from string import Formatter
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
sys.path.insert(0, str(ROOT))  # `benchmarks` and `tests` are not installed

Make = Callable[[], str]
Prepare = Callable[[Path], None]
"""Writes the files that a command reads into a folder."""

BLOCKS: dict[tuple[str, str], Make] = {}
"""(page, name of the block) → what makes it."""


def block(page: str, name: str) -> Callable[[Make], Make]:
    """Registers a function that returns the Markdown of a block."""

    def register(make: Make) -> Make:
        BLOCKS[page, name] = make
        return make

    return register


def example(
    page: str, name: str, *parts: tuple[str, str], prepare: Prepare | None = None, errors: bool = False
) -> None:
    """Registers the command that the page shows in a block: it is run, and its output, or `parts` of it, is shown.

    Args:
        page, name: the block.
        parts: see `excerpt`; without any, the whole output.
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


class Template(Formatter):
    """Format strings that show "–" for a value that is None or that the row does not have."""

    def get_field(self, field_name: str, args: Any, kwargs: Any) -> Any:
        try:
            return super().get_field(field_name, args, kwargs)
        except (KeyError, TypeError):
            return None, field_name

    def format_field(self, value: Any, format_spec: str) -> Any:
        return "–" if value is None else super().format_field(value, format_spec)


def filled(template: str, values: Any) -> str:
    """A template, filled from the keys of a mapping, or from an object or a list as `{0.name}` or `{0[1]}`."""
    text = Template().vformat(template, (values,), values if isinstance(values, Mapping) else {})
    return re.sub(r"(?<=\d)%", " %", text)


def table(rows: Iterable[Any], columns: str, template: str = "") -> str:
    """A Markdown table. The headings have ` | ` between them, as have the cells in a row's template (see `filled`);
    without a template each row is its cells, of which None shows as –."""

    def line(row: Any) -> str:
        cells = [filled(cell, row) for cell in template.split(" | ")] if template else row
        texts = ("–" if cell is None else " ".join(str(cell).split()).replace("|", "\\|") for cell in cells)
        texts = (re.sub(r"^–( of –| to –|, –)$", "–", text) for text in texts)
        return f"| {' | '.join(texts)} |"

    return "\n".join([f"| {columns} |", "|---" * (columns.count(" | ") + 1) + "|", *map(line, rows)])


def shown(command: str, output: str) -> str:
    """A command and its output."""
    lines = "\n".join(line.rstrip() for line in output.rstrip().splitlines())
    return f"```bash\n{command}\n```\n\n```text\n{lines}\n```"


def excerpt(output: str, *parts: tuple[str, str]) -> str:
    """Parts of an output, with `…` for what is left out. A part begins at a line that begins with its first text, and
    ends before the next line that begins with its second; it is one line if that is empty."""
    lines, kept, at = output.rstrip().splitlines(), [], 0

    def line_with(text: str, start: int) -> int:
        for number, line in enumerate(lines[start:], start):
            if line.startswith(text):
                return number
        raise SystemExit(f"no line begins with {text!r}:\n{output}")

    for first, after in parts:
        begin = line_with(first, at)
        end = line_with(after, begin + 1) if after else begin + 1
        kept += ["…"] * (begin > at) + "\n".join(lines[begin:end]).rstrip().splitlines()
        at = end
    return "\n".join([*kept, *["…"] * (at < len(lines))])


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
