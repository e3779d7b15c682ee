"""The frame of memkit's pages, and the file of a page.

A page loads nothing: it contains style, script, data and Plotly, and its content security policy forbids all requests
and all other scripts. The script draws charts; all figures are also in text and tables.
"""

from __future__ import annotations

import base64
import contextlib
import datetime
import gzip
import hashlib
import html
import json
import re
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from hf_memkit._version import __version__
from hf_memkit.common.answer.html import Html, el, join
from hf_memkit.common.answer.palette import COLOURS
from hf_memkit.common.answer.safe_text import printable
from hf_memkit.common.commands import command
from hf_memkit.common.errors import InputError
from hf_memkit.common.resources import documentation
from hf_memkit.common.user_files import replace_text

_ASSETS: Final = Path(__file__).parent / "assets"
_PLOTLY: Final = _ASSETS / "plotly-basic-4.1.1.min.js.gz"
"""The npm package plotly.js-basic-dist-min, compressed (MIT; it begins with its licence). Python's plotly has only
the whole library, five times as large."""

_GENERATOR: Final = b'<meta name="generator" content="memkit'
_HEAD: Final = 1024
"""Bytes at the start of a page that contain the generator."""


def document(
    title: str, body: Html, charts: Mapping[str, Any], *, guide: str, command: str = "", dated: bool = False
) -> str:
    """The page's HTML.

    Args:
        charts: NAME → `{"traces", "x", "y", "hovermode"}` with Plotly's traces and titles of the axes; drawn into the
            element with the id `chart-NAME`.
        guide: page of the documentation that explains it.
        command: the typed command, for the foot.
        dated: whether the foot has today's date.
    """
    scripts = _scripts(charts) if charts or '<div class="code">' in body else []
    made = f"memkit {__version__}{f', {datetime.date.today():%d %B %Y}' if dated else ''}"
    foot = [made, *([": ", el("code", printable(command, 2000))] if command else [])]
    colours = "\n".join(f"  --{name}: {colour};" for name, colour in COLOURS.items())
    parts = {
        "version": Html(__version__),
        "policy": Html(_policy(*(run for run, _ in scripts if run))),
        "title": join([title]),
        "style": Html((_ASSETS / "page.css").read_text(encoding="utf-8").replace("{colours}", colours)),
        "body": body,
        "foot": join([el("p", *foot), el("p", Html(f'<a href="{documentation(guide)}">How to read this page</a>'))]),
        "scripts": Html("".join(f"{written}\n" for _, written in scripts)),
    }
    template = (_ASSETS / "template.html").read_text(encoding="utf-8")
    # In one pass, so that braces in the values are not replaced.
    return re.sub(r"\{(\w+)\}", lambda match: parts[match[1]], template)


def check_file(path: str | Path) -> None:
    """Refuses an existing file that is not a page of memkit, and a folder that no file can be written to."""
    path, name = Path(path), printable(path)
    with _write_errors(path):
        if path.is_symlink() and not path.exists():
            raise InputError(f"{name}: a broken link. Remove it, or give another file: --html FILE")
        if path.exists():
            with path.open("rb") as file:
                is_page = _GENERATOR in file.read(_HEAD)
            if not is_page:
                why = "not a page written by memkit, so it is not replaced"
                raise InputError(f"{name}: {why}. Give another file: --html FILE")
        if not path.absolute().parent.is_dir():
            folder = path.absolute().parent
            make = command("mkdir", "-p", folder)
            raise InputError(f"{name}: cannot be written: no folder {printable(folder)}. Type: {make}")
        tempfile.TemporaryFile(dir=path.absolute().parent).close()


def write_document(path: str | Path, content: str) -> Path:
    """Writes a page, replacing an earlier one, and returns its path. Raises InputError if that is refused or fails."""
    path = Path(path)
    check_file(path)
    with _write_errors(path):
        replace_text(path, content)  # a reader never sees half a page
    return path


@contextlib.contextmanager
def _write_errors(path: Path) -> Iterator[None]:
    """Turns an OSError into an InputError."""
    try:
        yield
    except OSError as error:
        why = f"cannot be written: {error.strerror or error}"
        raise InputError(f"{printable(path)}: {why}. Give another file: --html FILE") from error


def plotly_text(value: Any) -> str:
    """Text without tags, links and templates, which Plotly would interpret."""
    return html.escape(printable(value, 80), quote=False).replace("%{", "%&#123;").replace("$", "&#36;")


def as_json(value: Any) -> str:
    """JSON that cannot end the HTML element that contains it."""
    made = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return made.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _scripts(charts: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(text that runs, its element) of the page's script; with charts also of their data and Plotly."""
    ours = (_ASSETS / "page.js").read_text(encoding="utf-8")
    run = [(ours, f"<script>{ours}</script>")]
    if not charts:
        return run
    plotly = _PLOTLY.read_bytes()
    held = base64.b64encode(plotly).decode()
    return [
        ("", f'<script type="application/json" id="charts">{as_json(charts)}</script>'),
        (gzip.decompress(plotly).decode(), f'<script type="application/gzip" id="plotly">{held}</script>'),
        *run,
    ]


def _policy(*scripts: str) -> str:
    hashes = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    allowed = " ".join(f"'sha256-{digest}'" for digest in hashes) or "'none'"
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'"
    )
