"""The causes that a verdict can name."""

from __future__ import annotations

from typing import Final, Literal, get_args

__all__ = ["CAUSES", "Cause"]

Cause = Literal[
    "size",
    "fragmentation",
    "cap",
    "another process",
    "context and libraries",
    "host memory",
    "shared memory",
    "kernel resources",
    "unknown",
]

CAUSES: Final[tuple[Cause, ...]] = get_args(Cause)
