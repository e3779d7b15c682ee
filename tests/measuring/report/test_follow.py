"""`memkit report --follow` on a job that really runs: in a pipe, on a terminal, before it begins, and when it dies."""

from __future__ import annotations

import io
import os
import pty
import re
import select
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from hf_memkit.measuring.report import following
from hf_memkit.measuring.report.answer import report_answer
from tests.conftest import ROOT
from tests.measuring.report import synthetic_records as made

JOB = """
import json, sys, time, psutil, os, pathlib
sys.path.insert(0, {root!r})
from tests.measuring.report import synthetic_records as made
from hf_memkit.measuring.memory.records import RecordWriter
writer = RecordWriter(sys.argv[1] + "/memory-rank0.jsonl")
host = made.hosted_here(pid=os.getpid(), process_started=psutil.Process().create_time())
for record in made.healthy(int(sys.argv[2]), host=host):
    if record["kind"] == "step":
        time.sleep(float(sys.argv[3]))
    writer.write(record.pop("kind"), record)
"""

Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts processes, and ends those that a failed test leaves."""
    started: list[subprocess.Popen[str]] = []

    def begin(*command: str, **options: object) -> subprocess.Popen[str]:
        settings = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, **options}
        process: subprocess.Popen[str] = subprocess.Popen([sys.executable, *command], cwd=ROOT, **settings)  # type: ignore[call-overload]
        started.append(process)
        return process

    yield begin
    for process in started:
        process.kill()
        process.wait()


def job(start: Start, folder: Path, steps: int, step_s: float) -> subprocess.Popen[str]:
    return start("-c", textwrap.dedent(JOB).format(root=str(ROOT)), str(folder), str(steps), str(step_s))


def line_that_has(process: subprocess.Popen[str], words: str) -> str:
    assert process.stdout is not None
    for line in process.stdout:
        if words in line:
            return line
    raise AssertionError(f"it ended without {words!r}")


def test_in_a_pipe_from_before_the_job_begins_to_its_end(tmp_path: Path, start: Start) -> None:
    folder = tmp_path / "not there yet"
    look = start("-m", "hf_memkit", "report", str(folder), "--follow", "--html", str(tmp_path / "page.html"))
    assert line_that_has(look, "Waiting for records in").endswith("Ctrl-C stops.\n")
    job(start, folder, 4, 0.6)
    output, _ = look.communicate()
    steps = [int(n) for n in re.findall(r"^step (\d+): peak [\d.]+ GiB, reserved [\d.]+ GiB", output, re.M)]
    assert steps and steps == sorted(set(steps)) and steps[-1] <= 4
    assert "Finished after step 4." in output and "\x1b" not in output and look.returncode == 0
    assert (tmp_path / "page.html").is_file()


@pytest.mark.slow
def test_a_job_that_is_killed_ends_it(tmp_path: Path, start: Start) -> None:
    running = job(start, tmp_path, 100_000, 0.1)
    look = start("-m", "hf_memkit", "report", str(tmp_path), "--follow")
    line_that_has(look, "step ")
    running.kill()
    running.wait()
    output, _ = look.communicate()
    assert "Ended without" in output and look.returncode == 0


def test_on_a_terminal_it_is_drawn_anew_and_ctrl_c_ends_only_the_looking(tmp_path: Path, start: Start) -> None:
    running = job(start, tmp_path, 100_000, 0.2)
    while not (tmp_path / "memory-rank0.jsonl").exists():
        time.sleep(0.05)
    parent, child = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "90", "LINES": "40"}
    terminal = {"stdin": child, "stdout": child, "stderr": child, "env": environment}
    look = start("-m", "hf_memkit", "report", str(tmp_path), "--follow", **terminal)
    os.close(child)
    shown = b""
    interrupted = False
    while True:
        if select.select([parent], [], [], 0.5)[0]:
            try:
                shown += os.read(parent, 65536)
            except OSError:  # the other end is closed
                break
        if not interrupted and len(set(re.findall(rb"step (\d+) is done", shown))) >= 2:
            interrupted = True
            look.send_signal(signal.SIGINT)
    os.close(parent)
    assert look.wait() == 0
    assert interrupted, "it was not drawn anew"
    text = shown.decode()
    assert "\x1b[38;" in text and "█" in text, "colours, and bars"
    assert "Running (process" in text[-4000:] and running.poll() is None, "the job goes on"


def test_ctrl_c_while_waiting_is_no_failure(tmp_path: Path, start: Start) -> None:
    look = start("-m", "hf_memkit", "report", str(tmp_path), "--follow")
    line_that_has(look, "Waiting for records")
    look.send_signal(signal.SIGINT)
    assert look.wait() == 0


def test_on_a_terminal_each_step_is_shown_and_few_make_the_report_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The report goes over all steps, on the machine that trains."""
    *records, end = made.healthy(240, host=made.hosted_here(pid=os.getpid()))
    written, later = records[:-40], iter([*records[-40:], end])
    made.write(tmp_path, written)
    reports: list[int] = []
    monkeypatch.setattr(following, "time", SimpleNamespace(sleep=lambda _: made.write(tmp_path, [next(later)])))
    monkeypatch.setattr(following, "report_answer", lambda run, **_: reports.append(1) or report_answer(run))
    console = Console(file=io.StringIO(), force_terminal=True, width=90, height=200)
    run = following.follow(tmp_path, console)
    assert run is not None and run.ending.kind == "finished" and next(later, None) is None
    shown = {int(step) for step in re.findall(r"step (\d+): peak", console.file.getvalue())}
    assert shown >= set(range(202, 241)), "each step"
    assert len(reports) < 8, "the first, the last, and one for 5 % more steps"
