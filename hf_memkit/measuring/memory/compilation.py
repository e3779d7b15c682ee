"""What torch.compile has done since a training began.

Reads dynamo's counters and lists of reasons, which torch keeps anyway (names of torch 2.8 to 2.14). Where dynamo is
not imported, nothing was compiled.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Final

from hf_memkit.components.recompilation_guard_counts import compile_counts
from hf_memkit.measuring.record_types import CompilationCounts, Compiled

_REASONS: Final = 3
_LONGEST: Final = 160

_COMPILE_ID: Final = re.compile(r"^\W?\d+/\w+: ")
"""Prefix of a recompilation's reason: the number of the graph that did not apply."""


class CompileWatch:
    """Follows torch.compile through one training."""

    def __init__(self) -> None:
        self._start = _read_totals()
        self._last = compile_counts()

    def news(self) -> Compiled:
        """The fields of a record; none if torch neither compiled nor gave up since the last call."""
        counts = compile_counts()
        if counts == self._last:
            return {}
        new_graphs = max(0, counts.graphs - self._last.graphs)
        self._last = counts
        return {**self.totals(), "compiled_graphs": new_graphs}

    def totals(self) -> Compiled:
        """The figures since training began; none if nothing was compiled."""
        now = _read_totals()
        # A difference of counters has none below zero: `torch._dynamo.reset` sets totals back to zero.
        numbers = now.numbers - self._start.numbers
        breaks = now.breaks - self._start.breaks
        failed_guards = now.failed_guards - self._start.failed_guards
        if not (numbers["graphs"] or numbers["given_up"]):
            return {}

        figures: CompilationCounts = {
            "graphs": numbers["graphs"],
            "graph_breaks": breaks.total(),
            "recompilations": numbers["recompilations"],
            "given_up": numbers["given_up"],
            "compile_time_ms": numbers["microseconds"] / 1000,
        }
        if breaks:
            figures["graph_break_reasons"] = list(breaks)[:_REASONS]
        if failed_guards:
            figures["recompile_reasons"] = list(failed_guards)[:_REASONS]
        return {"compilation": figures}


@dataclass(frozen=True, slots=True)
class _Totals:
    """Totals of this process: numbers, and how often each graph break and each failed guard occurred, in order."""

    numbers: Counter[str]
    breaks: Counter[str] = field(default_factory=Counter)
    failed_guards: Counter[str] = field(default_factory=Counter)


def _read_totals() -> _Totals:
    totals = _Totals(Counter(compile_counts()._asdict()))
    utils: Any = sys.modules.get("torch._dynamo.utils")
    frames: Any = sys.modules.get("torch._dynamo.convert_frame")
    if utils is None or frames is None:
        return totals

    for each in utils.graph_break_reasons:
        frame = each.user_stack[-1] if each.user_stack else None
        reason = _reason(each.reason, frame.filename, frame.lineno) if frame else _first_line(each.reason)
        totals.breaks[reason] += 1
    for code, reasons in utils.guard_failures.items():
        for reason in reasons:
            text = _COMPILE_ID.sub("", str(reason))
            totals.failed_guards[_reason(text, code.co_filename, code.co_firstlineno)] += 1

    compiled_again = sum(count - 1 for count in frames.FRAME_COMPILE_COUNTER.values())
    totals.numbers["recompilations"] = compiled_again - totals.numbers["given_up"]  # which torch refused
    totals.numbers["microseconds"] = round(1e6 * utils.calculate_time_spent()["total_wall_time"])
    return totals


def _reason(reason: str, file: str, line: int | None) -> str:
    """`train.py:10: Call to …`. A library's file has its path inside site-packages."""
    inside = re.split(r"[/\\](?:site|dist)-packages[/\\]", file)
    shown = inside[-1] if len(inside) > 1 else re.split(r"[/\\]", file)[-1]
    return _first_line(f"{shown}:{line}: {reason}")


def _first_line(text: str) -> str:
    return text.partition("\n")[0][:_LONGEST]
