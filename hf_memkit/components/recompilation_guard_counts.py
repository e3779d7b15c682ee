"""How often torch.compile has compiled and given up in this process, and from when on that is a problem.

Imports nothing of torch: where dynamo is not imported, nothing was compiled.
"""

from __future__ import annotations

import sys
from typing import Any, Final, NamedTuple

SETTLED_AFTER: Final = 50
"""Steps after which no new graph is expected. Assumed."""

MOST_LATE: Final = 8
"""Graphs that may be compiled later without a warning. Assumed."""

_LIMITS: Final = (
    "Dynamo recompile limit exceeded",  # torch 2.11 to 2.14: _dynamo/convert_frame.py, gb_type
    "Dynamo cache limit exceeded",  # torch 2.8 to 2.10
    "recompile_limit reached",  # torch 2.8 to 2.10, RecompileLimitExceeded
    "accumulated_recompile_limit reached",
)
"""First words with which dynamo gives up compiling a function."""


class CompileCounts(NamedTuple):
    """Counts of this process.

    Attributes:
        graphs: compiled graphs.
        given_up: functions that torch compiled too often, and now runs uncompiled.
    """

    graphs: int = 0
    given_up: int = 0


def compile_counts() -> CompileCounts:
    """The counts until now (`torch._dynamo.utils.counters`)."""
    dynamo: Any = sys.modules.get("torch._dynamo.utils")
    if dynamo is None:
        return CompileCounts()
    counters = dynamo.counters
    given_up = 0
    for table in ("unimplemented", "graph_break"):
        reasons = counters.get(table, {})
        given_up += sum(count for reason, count in reasons.items() if reason.startswith(_LIMITS))
    return CompileCounts(counters.get("stats", {}).get("unique_graphs", 0), given_up)
