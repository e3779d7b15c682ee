"""How a run ended: real processes that live, die and give their number to another; and never more than is known."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from hf_memkit.measuring.memory.cgroup import oom_kills, process_start_ticks
from hf_memkit.measuring.report.ending import Ending, Here, judge_ending
from hf_memkit.measuring.report.load import load_run
from hf_memkit.measuring.report.rank_reader import Attempt
from tests.measuring.report import synthetic_records as made


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield child
    child.kill()
    child.wait()


def of_process(pid: int, **host: Any) -> dict[str, Any]:
    started = {"process_started": psutil.Process(pid).create_time(), "process_start_ticks": process_start_ticks(pid)}
    return made.hosted_here(pid=pid, **started, **host)


def ending(folder: Path, *, host: Any, records: int = -1, **last: Any) -> Ending:
    """Of a file without an `end`, written now."""
    result = made.healthy(5, host=host)[:records]
    result[-1] |= {"time": time.time(), **last}
    return load_run(made.write(folder, result)).ending


def test_a_process_that_lives_and_then_does_not(tmp_path: Path, process: subprocess.Popen[bytes]) -> None:
    host = of_process(process.pid)
    alive = ending(tmp_path / "alive", host=host)
    assert alive.kind == "running" and f"process {process.pid}" in alive.why and "step 5 is done" in alive.why
    process.send_signal(signal.SIGKILL)
    while psutil.Process(process.pid).status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.01)
    assert load_run(tmp_path / "alive").ending.kind == "killed", "a zombie has ended"
    process.wait()
    killed = load_run(tmp_path / "alive").ending
    assert killed.kind == "killed" and killed.step == 5 and killed.cause is None
    assert "without recording an exit" in killed.why and "after step 5;" in killed.why
    assert "48.0 GiB left" in killed.why, "host RAM was not short"


@pytest.mark.parametrize(
    ("clock_s", "ticks", "kind"),
    [
        (0.0, 0, "running"),
        (3600.0, 0, "running"),  # the clock was set since
        (0.0, 60, "killed"),  # another process has its number now
        (0.0, None, "running"),  # written by an earlier memkit
        (60.0, None, "killed"),
    ],
)
def test_whether_the_process_is_the_recorded_one(tmp_path: Path, clock_s: float, ticks: int | None, kind: str) -> None:
    host = of_process(os.getpid())
    host["process_started"] -= clock_s
    if ticks is None:
        del host["process_start_ticks"]
    else:
        host["process_start_ticks"] -= ticks
    assert ending(tmp_path, host=host).kind == kind


def test_a_process_that_lives_and_is_silent(tmp_path: Path) -> None:
    silent = ending(tmp_path, host=of_process(os.getpid()), time=time.time() - 3000)
    assert silent.kind == "running" and "50 min" in silent.why
    slow = ending(tmp_path / "slow", host=of_process(os.getpid()), time=time.time() - 3000, step_time_ms=600_000)
    assert slow.kind == "running" and " min" not in slow.why


def test_the_kernel_killed_for_want_of_host_memory(tmp_path: Path, process: subprocess.Popen[bytes]) -> None:
    host = of_process(process.pid, oom_kills=oom_kills() or 0)
    process.kill()
    process.wait()
    records = made.healthy(5, host=host)[:-1]
    attempt = Attempt(run=records[0], last=records[-1], last_step=5)
    nothing = judge_ending(attempt, Here())
    assert (nothing.kind, nothing.cause) == ("killed", None), "the count of this control group has not risen"
    risen = judge_ending(attempt, replace(Here(), count_oom_kills=lambda: host["oom_kills"] + 1))
    assert risen.cause == "host memory" and "kernel killed a process" in risen.why and "likely" in risen.why
    records[-1] |= {"host_available_gib": 0.2}
    short = judge_ending(Attempt(run=records[0], last=records[-1], last_step=5), Here())
    assert short.cause == "host memory" and "0.20 of 62.7 GiB" in short.why and "likely" in short.why
    records[-1] |= {"host_available_gib": 9.0, "host_rss_gib": 15.9}
    records[0]["hardware"]["ram_limit_gib"] = 16.0
    limited = judge_ending(Attempt(run=records[0], last=records[-1], last_step=5), Here())
    assert limited.cause == "host memory" and "15.90 of 16.0 GiB used by this process" in limited.why


def test_what_cannot_be_seen_from_here(tmp_path: Path) -> None:
    elsewhere = ending(tmp_path / "a", host={**of_process(os.getpid()), "hostname": "node-17"})
    assert elsewhere.kind == "unknown" and "node-17" in elsewhere.why
    rebooted = ending(tmp_path / "b", host={**of_process(os.getpid()), "boot_id": "another"})
    assert rebooted.kind == "killed" and "rebooted" in rebooted.why and rebooted.cause is None
    assert ending(tmp_path / "c", host={}).kind == "unknown"
    nameless = ending(tmp_path / "d", host=made.hosted_here())
    assert nameless.kind == "unknown" and nameless.cause is None


def test_before_the_first_step(tmp_path: Path) -> None:
    early = ending(tmp_path, host={**of_process(os.getpid()), "boot_id": "another"}, records=1)
    assert "before its first step" in early.why and early.step is None


@pytest.mark.parametrize(
    ("end", "kind", "why"),
    [
        ({"status": "interrupted"}, "interrupted", "interrupted after step 3"),
        ({"status": "interrupted", "error_type": "KeyboardInterrupt", "error": "KeyboardInterrupt: "}, "interrupted",
         "interrupted by Ctrl-C (SIGINT) after step 3"),
        ({"status": "interrupted", "error_type": "SystemExit", "error": "SystemExit: 3"}, "interrupted",
         "interrupted after step 3: SystemExit: 3"),
        ({"status": "failed", "error_type": "ValueError", "error": "bad"}, "failed", "with ValueError: bad"),
        ({"status": "failed"}, "failed", "failed after step"),
        ({"status": "failed", "error_type": "OutOfMemoryError", "error": "x"}, "out of memory", "ran out of memory"),
        ({}, "failed", "failed after step 3"),
    ],
)  # fmt: skip
def test_by_its_own_word(tmp_path: Path, end: dict[str, str], kind: str, why: str) -> None:
    records = [*made.healthy(3)[:-1], {"kind": "end", **end}]
    result = load_run(made.write(tmp_path, records)).ending
    assert result.kind == kind and why in result.why


def test_an_oom_record_is_an_ending_without_an_end(tmp_path: Path) -> None:
    result = load_run(made.write(tmp_path, made.out_of_memory(5)[:-1])).ending
    assert result.kind == "out of memory" and result.why == "ran out of memory in backward of step 6"
