"""Lines about what memkit did instead of the script: printed at once, and notes of the answer."""

from __future__ import annotations

import contextlib
import sys

from hf_memkit.common.secrets import masked

_notices: dict[str, None] = {}


def notice(line: str) -> None:
    """Prints the line to standard error, once, and keeps it for the answer. A line names the user's line first:
    `"train.py, line 12: results.json was overwritten; …"`."""
    line = masked(line)
    if line not in _notices:
        _notices[line] = None
        with contextlib.suppress(OSError, ValueError):  # the script has closed it
            print(f"memkit: {line}", file=sys.stderr, flush=True)


def notices() -> tuple[str, ...]:
    """The lines so far, in order."""
    return tuple(_notices)
