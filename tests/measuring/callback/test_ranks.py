"""What ranks tell each other, with real processes and the store of a real process group."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from hf_memkit.measuring.callback.dashboard import over_ranks
from hf_memkit.measuring.callback.numbers_of_ranks import Heard, join_ranks

WORKER = Path(__file__).with_name("ranks_worker.py")
PATIENCE_S = 60


class Rank:
    def __init__(self, rank: int, world_size: int, port: int) -> None:
        environment = {
            "RANK": str(rank), "WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        }  # fmt: skip
        path = os.pathsep.join(part for part in (str(WORKER.parents[3]), os.environ.get("PYTHONPATH")) if part)
        self.process = subprocess.Popen(
            [sys.executable, str(WORKER)],
            env={**os.environ, **environment, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"ended with {self.process.wait()}"
        return dict(json.loads(line))

    def until(self, condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            if condition(report := self.read()):
                return report
        raise AssertionError("did not come about")

    def end(self) -> dict[str, Any]:
        """Tells it to end; what it says of that."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        last = self.until(lambda report: "close_s" in report)
        began = time.monotonic()
        assert self.process.wait(PATIENCE_S) == 0
        return {**last, "exit_s": time.monotonic() - began}


@contextmanager
def ranks(count: int) -> Iterator[list[Rank]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    started = [Rank(rank, count, port) for rank in range(count)]
    try:
        yield started
    finally:
        for rank in started:
            rank.process.kill()
            rank.process.wait()


def test_a_rank_that_is_killed_and_one_that_is_stopped() -> None:
    with ranks(3) as (first, second, third):
        first.until(lambda report: set(report["heard"]) == {"0", "1"})
        heard = first.until(lambda report: len(report["heard"]) == 3)["heard"]
        assert heard["2"][1]["peak_allocated_gib"] == 2 + heard["2"][0] / 1000
        second.process.send_signal(signal.SIGKILL)
        third.process.send_signal(signal.SIGSTOP)
        settled = first.until(lambda report: min(report["heard"][rank][2] for rank in "12") > 1)
        later = first.until(lambda report: report["step"] >= settled["step"] + 20)
        assert later["heard"]["0"][0] == later["step"]  # it goes on by itself
        for rank in "12":  # the last known values, and how old they are
            assert later["heard"][rank][:2] == settled["heard"][rank][:2]
            assert later["heard"][rank][2] > settled["heard"][rank][2]
        ended = first.end()
        assert ended["close_s"] < 2 and ended["exit_s"] < 10 and ended["failure"] is None


@pytest.mark.slow
def test_a_store_that_hangs() -> None:
    """Rank 0 hosts the store. While it stands still, so does the store; the training thread of rank 1 does not."""
    with ranks(2) as (first, second):
        first.until(lambda report: len(report["heard"]) == 2)
        first.process.send_signal(signal.SIGSTOP)
        now = second.read()["step"]
        later = second.until(lambda report: report["step"] >= now + 40)
        assert list(later["heard"]) == ["1"] and later["longest_ms"] < 1000
        ended = second.end()
        assert ended["close_s"] < 2 and ended["exit_s"] < 10


@pytest.mark.slow
def test_a_store_that_is_gone() -> None:
    with ranks(2) as (first, second):
        first.until(lambda report: len(report["heard"]) == 2)
        first.process.kill()
        now = second.read()["step"]
        second.until(lambda report: report["step"] >= now + 40)
        ended = second.end()
        assert ended["failure"] is not None and ended["close_s"] < 2 and ended["exit_s"] < 10


def test_one_process_has_nobody_to_tell() -> None:
    assert join_ranks() is None


def known(step: int, age_s: float = 60.0, **numbers: float) -> Heard:
    return Heard(step, numbers, age_s)


def test_numbers_over_ranks() -> None:
    heard = {
        0: known(30, peak_allocated_gib=3.0, peak_reserved_gib=4.0, fragmentation_gib=1.0),
        1: known(29, peak_allocated_gib=5.0, peak_reserved_gib=6.0, fragmentation_gib=1.0),
        2: known(20, peak_allocated_gib=4.0, peak_reserved_gib=8.0, fragmentation_gib=4.0),
        3: known(19, peak_allocated_gib=9.0, peak_reserved_gib=9.0),  # silent since before the last logging step
    }
    assert over_ranks(heard[0].numbers, heard, since_step=20) == pytest.approx(
        {
            "ranks_heard": 3,
            "peak_allocated_mean_gib": 4.0,
            "peak_allocated_max_gib": 5.0,
            "peak_allocated_max_rank": 1,
            "peak_reserved_mean_gib": 6.0,
            "peak_reserved_max_gib": 8.0,
            "peak_reserved_max_rank": 2,
        }
    )
    quick = {**heard, 3: known(19, age_s=1.0, peak_allocated_gib=9.0)}  # steps that are faster than the news of them
    assert over_ranks(heard[0].numbers, quick, since_step=20)["peak_allocated_max_rank"] == 3
    assert over_ranks({"host_rss_gib": 1.0}, {0: known(5, host_rss_gib=1.0)}, since_step=4) == {
        "ranks_heard": 1, "host_rss_mean_gib": 1.0, "host_rss_max_gib": 1.0, "host_rss_max_rank": 0,
    }  # fmt: skip
    assert over_ranks({}, {}, since_step=0) == {}
