"""`memkit report --follow`: shows a running job until it ends. A terminal shows the newest step above the report; a
log or pipe gets a line for a finished step, at most one per second, and the report at the end. The job runs on this
machine: a look reads only what is new, and the report, which goes over all steps, is made anew when 5 % of them are.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from hf_memkit.common.answer.safe_text import printable
from hf_memkit.common.answer.terminal import render, show
from hf_memkit.measuring.report.answer import report_answer
from hf_memkit.measuring.report.load import Run, RunReader

_LOOK_S: Final = 1.0
_SHARE: Final = 0.05
"""Share of new records with which the report is made anew."""


def follow(run_dir: str | Path, console: Console, *, modules: bool = False) -> Run | None:
    """Shows the run until it ends or Ctrl-C, and returns it; None if there is no record yet.

    Waits for a run that has not started. The end of a run on another machine is known only from its `end` record.
    `modules`: add the table by module at the end. Raises InputError if a file cannot be read.
    """
    reader = RunReader(Path(run_dir))
    with contextlib.suppress(KeyboardInterrupt):
        (_live if console.is_terminal else _lines)(reader, console)
    run = reader.run()
    if run is not None:
        show(report_answer(run, modules=modules), console=console)
    return run


def _wait_text(folder: Path) -> str:
    return f"Waiting for records in {printable(folder)} (memory-rank*.jsonl). Ctrl-C stops."


def _readings(reader: RunReader) -> Iterator[tuple[bool, Run | None]]:
    """(whether the files grew, the run if there is one), once a second until the run has ended."""
    while True:
        grew = reader.read()
        run = reader.run()  # also without new records: the process may have ended
        if run is not None and run.ending.kind != "running" and (run.ending.kind != "unknown" or run.first.end):
            return
        yield grew, run
        time.sleep(_LOOK_S)


def _live(reader: RunReader, console: Console) -> None:
    with Live(Text(_wait_text(reader.folder)), console=console, auto_refresh=False, transient=True) as live:
        live.refresh()
        report, records, why, silent = Group(), 0, "", False
        for grew, run in _readings(reader):
            if run is None:
                continue
            other, why = run.ending.why != why, run.ending.why
            if not grew and not other:
                continue
            count = sum(len(rank.steps) + len(rank.evaluations) + len(rank.saves) for rank in run.ranks)
            if not grew or silent or abs(count - records) >= _SHARE * records:
                report, records, silent = render(report_answer(run), console.width), count, not grew
            newest = [Text(_step_line(run))] if any(rank.steps for rank in run.ranks) else []
            live.update(Group(*newest, report), refresh=True)  # a low terminal cuts the end


def _lines(reader: RunReader, console: Console) -> None:
    waiting, shown = False, None
    for grew, run in _readings(reader):
        if run is None:
            if not waiting:
                waiting = True
                console.print(Text(_wait_text(reader.folder)), soft_wrap=True)
        elif grew and run.first.steps and run.first.steps[-1]["step"] != shown:
            shown = run.first.steps[-1]["step"]
            console.print(Text(_step_line(run)), soft_wrap=True)


_STEP_FIGURES: Final = {
    "peak_allocated_gib": "peak {:.2f} GiB",
    "peak_reserved_gib": "reserved {:.2f} GiB",
    "host_rss_gib": "host {:.2f} GiB",
    "step_time_ms": "{:,.0f} ms",
}


def _step_line(run: Run) -> str:
    """`step 17: peak 13.20 GiB, reserved 14.10 GiB, host 4.10 GiB, 1,214 ms`, the highest over the ranks."""
    newest: list[Mapping[str, Any]] = [rank.steps[-1] for rank in run.ranks if rank.steps]
    parts = []
    for name, words in _STEP_FIGURES.items():
        if known := [step[name] for step in newest if name in step]:
            parts.append(words.format(max(known)))
    return f"step {max(step['step'] for step in newest)}: {', '.join(parts)}"
