"""One HTML page that needs nothing else: the frame of every page that memkit writes. In: HTML, charts. Out: a file.

Nothing is loaded from anywhere: style, script, data and Plotly stand in the page, and its content security policy
forbids all requests and every script but these two, by their hashes. Charts are drawn by the script; all figures are
also text and tables, which need none.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from hf_memkit._version import __version__
from hf_memkit.common.errors import InputError
from hf_memkit.common.resources import documentation
from hf_memkit.measuring.report.html import Html, join
from hf_memkit.measuring.report.palette import CATEGORY_COLOURS, PHASE_COLOURS
from hf_memkit.measuring.report.sanitize import text

_ASSETS: Final = Path(__file__).parent / "assets"
_PLOTLY: Final = _ASSETS / "plotly-basic-4.1.1.min.js.gz"
"""Of the npm package plotly.js-basic-dist-min, compressed (MIT; its licence stands at its beginning). Python's plotly
has only the whole library, five times as large."""

_OURS: Final = b'<meta name="generator" content="memkit'
_HEAD: Final = 1024
"""Bytes at the start of a file in which the generator stands, if memkit made it."""


def document(title: str, body: Html, charts: Mapping[str, Any]) -> str:
    """The page's HTML. A chart (`{"traces", "x", "y", "hovermode"}`: Plotly's traces, the titles of the axes) is drawn
    into the element with the id `chart-NAME`; without any the page has no script."""
    scripts = _scripts(charts) if charts else []
    parts = {
        "version": Html(__version__),
        "policy": Html(_policy(*(run for run, _ in scripts if run))),
        "title": join([title]),
        "style": Html((_ASSETS / "page.css").read_text(encoding="utf-8").replace("{colours}", _colours())),
        "body": body,
        "documentation": join([f"How to read it: {documentation('index.md')}"]),
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


def as_json(value: Any) -> str:
    """JSON that cannot end the element it stands in."""
    made = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return made.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _scripts(charts: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What draws the charts: the text that runs, and the element that holds it."""
    ours, plotly = (_ASSETS / "page.js").read_text(encoding="utf-8"), _PLOTLY.read_bytes()
    held = base64.b64encode(plotly).decode()
    return [
        ("", f'<script type="application/json" id="charts">{as_json(charts)}</script>'),
        (gzip.decompress(plotly).decode(), f'<script type="application/gzip" id="plotly">{held}</script>'),
        (ours, f"<script>{ours}</script>"),
    ]


def _policy(*scripts: str) -> str:
    hashes = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    allowed = " ".join(f"'sha256-{digest}'" for digest in hashes) or "'none'"
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'"
    )


def _colours() -> str:
    lines = [f"  --{category}: {colour};" for category, colour in CATEGORY_COLOURS.items()]
    lines += [f"  --phase-{phase}: {colour};" for phase, colour in PHASE_COLOURS.items()]
    return "\n".join(lines)


def _beginning(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(_HEAD)
