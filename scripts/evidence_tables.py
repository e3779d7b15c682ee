"""Pages whose tables and examples stand between `<!-- evidence: NAME -->`, or `fields: NAME`, and `<!-- end -->`:
filled, or only compared. What a command prints, for such an example."""

from __future__ import annotations

import difflib
import io
import os
import re
import shlex
import sys
import tempfile
from collections.abc import Iterable, Mapping
from contextlib import chdir, redirect_stderr, redirect_stdout
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
sys.path.insert(0, str(ROOT))  # for `benchmarks`, which no installation has
_SHOWN = 40
"""Lines of a page's changes that --check prints."""


def update(tables: Mapping[Path, Mapping[str, str] | str], script: str, *, check: bool) -> int:
    """Writes `{page: {name: table}}` into the pages, or a whole file; `check` only says which are stale. The exit
    status."""
    pages = {page: new if isinstance(new, str) else filled(page, new) for page, new in tables.items()}
    stale = {page: text for page, text in pages.items() if text != page.read_text()}
    for page, text in stale.items():
        if check:
            print(f"{page.relative_to(ROOT)} is not current: run scripts/{script}")
            changes = difflib.ndiff(page.read_text().splitlines(), text.splitlines())
            print(*[line for line in changes if line[0] in "+-"][:_SHOWN], sep="\n")
        else:
            page.write_text(text)
    return 1 if stale and check else 0


def filled(page: Path, blocks: Mapping[str, str]) -> str:
    """The page with these tables.

    Raises:
        SystemExit: it has no place for one of them.
    """
    text = page.read_text()
    for name, table in blocks.items():
        block = re.compile(f"(<!-- (?:evidence|fields): {name} -->\n).*?(<!-- end -->)", re.DOTALL)
        if not block.search(text):
            raise SystemExit(f"{page}: no block for {name}")
        text = block.sub(lambda found, table=table: f"{found[1]}{table}\n{found[2]}", text)
    return text


def table(columns: str, rows: Iterable[Iterable[object]], line: str = "---") -> str:
    """Of Markdown. `columns`: the first row without its outer bars; `line`: what is below each but the first."""
    count = columns.count(" | ") + 1
    lines = [f"| {' | '.join(map(str, cells))} |" for cells in rows]
    return "\n".join([f"| {columns} |", f"|{'|'.join(['---', *[line] * (count - 1)])}|", *lines])


def output_of(command: str, folder: Path = ROOT, *, with_errors: bool = False) -> str:
    """What `memkit …` prints there, in 80 columns, without the hub and without what this user has of it; if asked for,
    also what it says on standard error, last. In this process, which imports torch once.

    Raises:
        SystemExit: it printed nothing else.
    """
    prepare()
    from hf_memkit.cli import main

    out, errors = io.StringIO(), io.StringIO()
    with chdir(folder), redirect_stdout(out), redirect_stderr(errors):
        main(shlex.split(command.replace("\\\n", " "))[1:])
    if not out.getvalue():
        raise SystemExit(errors.getvalue())
    return out.getvalue() + (errors.getvalue() if with_errors else "")


@cache
def prepare() -> tempfile.TemporaryDirectory[str]:
    """Sets the variables that libraries read when they are imported, and removes those that change an answer; the
    cache is empty, and removed at the end."""
    from hf_memkit.setup.techniques.allocator import OLD_VARIABLES, VARIABLE

    hub = tempfile.TemporaryDirectory()
    for name in ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", VARIABLE, *OLD_VARIABLES):
        os.environ.pop(name, None)
    os.environ |= {"PYTHONPATH": str(ROOT), "COLUMNS": "80", "HF_HUB_OFFLINE": "1", "HF_HOME": hub.name}
    return hub


def excerpt(output: str, *parts: tuple[str, str]) -> str:
    """Of each part the lines from one that begins with its first text to the one before that begins with its second,
    or only the first line if that is empty; `…` for what is left out.

    Raises:
        SystemExit: no line begins so.
    """
    lines, found, at = output.rstrip().splitlines(), [], 0

    def next_line(text: str, start: int) -> int:
        for number in range(start, len(lines)):
            if lines[number].startswith(text):
                return number
        raise SystemExit(f"no line begins with {text!r}:\n{output}")

    for first, behind in parts:
        begin = next_line(first, at)
        end = next_line(behind, begin + 1) if behind else begin + 1
        found += ["…"] * (begin > at) + "\n".join(lines[begin:end]).rstrip().splitlines()
        at = end
    return "\n".join([*found, *["…"] * (at < len(lines))])


def shown(command: str, output: str) -> str:
    """A command and its output, as a page has them."""
    return f"```bash\n{command}\n```\n\n```text\n{trimmed(output)}\n```"


def trimmed(output: str) -> str:
    """Without blanks at the ends of lines."""
    return "\n".join(line.rstrip() for line in output.rstrip().splitlines())
