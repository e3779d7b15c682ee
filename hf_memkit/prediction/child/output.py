"""Prints beside a script's own output, which the script may have closed or replaced."""

from __future__ import annotations

import contextlib
import sys


def say(line: str) -> None:
    """Prints a line to standard error."""
    with contextlib.suppress(ValueError, OSError):
        if sys.stderr is not None:
            print(f"memkit: {line}", file=sys.stderr, flush=True)


def flush_output() -> None:
    """Writes what Python still holds of standard output and error."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(ValueError, OSError, AttributeError):
            stream.flush()
