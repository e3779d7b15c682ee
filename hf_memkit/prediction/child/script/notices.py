"""Lines about what memkit did instead of the script: printed at once, and notes of the answer."""

from __future__ import annotations

from hf_memkit.common.secrets import masked
from hf_memkit.prediction.child.output import say

_notices: dict[str, None] = {}


def notice(line: str) -> None:
    """Prints the line to standard error, once, and keeps it for the answer. A line names the user's line first:
    `"train.py, line 12: results.json was overwritten; …"`."""
    line = masked(line)
    if line not in _notices:
        _notices[line] = None
        say(line)


def notices() -> tuple[str, ...]:
    """The lines so far, in order."""
    return tuple(_notices)
