"""The frame of every page that memkit writes, and the file it is written to.

Nothing is loaded from anywhere: style, script, data and Plotly stand in the page, and its content security policy
forbids all requests and every script but these, by their hashes. Charts are drawn by the script; all figures are
also text and tables, which need none.
"""

from __future__ import annotations

import base64
import datetime
import gzip
import hashlib
import html
import json
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from hf_memkit._version import __version__
from hf_memkit.common.answer.html import Html, el, join
from hf_memkit.common.answer.palette import COLOURS
from hf_memkit.common.answer.safe_text import text
from hf_memkit.common.errors import InputError
from hf_memkit.common.resources import documentation

_ASSETS: Final = Path(__file__).parent / "assets"
_PLOTLY: Final = _ASSETS / "plotly-basic-4.1.1.min.js.gz"
"""Of the npm package plotly.js-basic-dist-min, compressed (MIT; its licence stands at its beginning). Python's plotly
has only the whole library, five times as large."""

_OURS: Final = b'<meta name="generator" content="memkit'
_HEAD: Final = 1024
"""Bytes at the start of a file in which the generator stands, if memkit made it."""


def document(
    title: str, body: Html, charts: Mapping[str, Any], *, guide: str, command: str = "", dated: bool = False
) -> str:
    """The page's HTML. A chart (`{"traces", "x", "y", "hovermode"}`: Plotly's traces, the titles of the axes) is drawn
    into the element with the id `chart-NAME`; a page with neither charts nor lines to copy has no script.

    Args:
        guide: page of the documentation that explains it.
        command: what was typed; the foot shows it.
        dated: whether the foot has today's date.
    """
    scripts = _scripts(charts) if charts or '<div class="code">' in body else []
    made = f"memkit {__version__}{f', {datetime.date.today():%d %B %Y}' if dated else ''}"
    foot = [made, *([": ", el("code", text(command, 2000))] if command else [])]
    parts = {
        "version": Html(__version__),
        "policy": Html(_policy(*(run for run, _ in scripts if run))),
        "title": join([title]),
        "style": Html((_ASSETS / "page.css").read_text(encoding="utf-8").replace("{colours}", _colours())),
        "body": body,
        "foot": join([el("p", *foot), el("p", Html(f'<a href="{documentation(guide)}">How to read this page</a>'))]),
        "scripts": Html("".join(f"{written}\n" for _, written in scripts)),
    }
    template = (_ASSETS / "template.html").read_text(encoding="utf-8")
    # In one pass: what is put in is not looked at again.
    return re.sub(r"\{(\w+)\}", lambda match: parts[match[1]], template)


def check_file(path: str | Path) -> None:
    """Raises InputError where the file exists and is not a page of memkit's, or its folder does not exist."""
    path = Path(path)
    try:
        if path.is_symlink() and not path.exists():
            raise InputError(f"{text(path)}: a broken link. Remove it, or give another file: --html FILE")
        if path.exists() and _OURS not in _beginning(path):
            raise InputError(
                f"{text(path)}: not a page written by memkit, so it is not replaced. Give another file: --html FILE"
            )
        if not path.absolute().parent.is_dir():
            folder = text(path.absolute().parent)
            raise InputError(f"{text(path)}: cannot be written: no folder {folder}. Type: mkdir -p {folder}")
    except OSError as error:
        raise InputError(
            f"{text(path)}: cannot be written: {error.strerror or error}. Give another file: --html FILE"
        ) from error


def write_document(path: str | Path, content: str) -> Path:
    """Writes a page over an earlier one of memkit's and returns its path; InputError where that is refused or
    fails."""
    path = Path(path)
    check_file(path)
    try:
        # Beside it, then in its place: whoever opens it while it is written sees the old page whole.
        with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=path.parent, suffix=".tmp", delete=False) as file:
            made = Path(file.name)
            try:
                file.write(content)
                file.flush()
                made.chmod(0o644)  # a temporary file is its owner's alone
                made.replace(path)
            except BaseException:
                made.unlink()
                raise
    except OSError as error:
        raise InputError(
            f"{text(path)}: cannot be written: {error.strerror or error}. Give another file: --html FILE"
        ) from error
    return path


def plotly_text(value: Any) -> str:
    """Text that Plotly, which reads a little HTML, shows as it is: no tag, no link, no template of figures."""
    return html.escape(text(value, 80), quote=False).replace("%{", "%&#123;").replace("$", "&#36;")


def as_json(value: Any) -> str:
    """JSON that cannot end the element it stands in."""
    made = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return made.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _scripts(charts: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The page's script, and where there are charts their data and Plotly: the text that runs, and the element that
    holds it."""
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


def _colours() -> str:
    return "\n".join(f"  --{name}: {colour};" for name, colour in COLOURS.items())


def _beginning(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(_HEAD)
