"""Numbers that ranks exchange through the store of a process group, hosted by a separate process."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import NamedTuple

import pytest
from torch.distributed import TCPStore

from hf_memkit.measuring.callback import numbers_of_ranks
from hf_memkit.measuring.callback.dashboard import over_ranks
from hf_memkit.measuring.callback.numbers_of_ranks import RankNumbers, RankSample, join_ranks

HOST = """
import time
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
time.sleep(600)
"""


class Ranks(NamedTuple):
    host: subprocess.Popen[str]
    first: RankNumbers
    second: RankNumbers
    third: RankNumbers


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ranks]:
    monkeypatch.setattr(numbers_of_ranks, "_INTERVAL_S", 0.02)
    monkeypatch.setattr(numbers_of_ranks, "_TIMEOUT", timedelta(hours=1))  # who waits for a store that hangs, hangs
    # Not a fork: the store's threads would start among locks that threads of other tests' libraries may hold.
    with subprocess.Popen([sys.executable, "-c", HOST], stdout=subprocess.PIPE, text=True) as host:
        assert host.stdout is not None
        store = TCPStore("127.0.0.1", int(host.stdout.readline()), is_master=False)
        started = Ranks(host, *(RankNumbers(store, rank, 3, "a training") for rank in range(3)))
        yield started
        host.kill()
    for rank in started[1:]:
        rank.close()


def until(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(0.01)


def test_ranks_that_have_not_reported_yet_and_that_fall_silent(ranks: Ranks) -> None:
    ranks.first.publish(1, {"peak_allocated_gib": 1.0})
    ranks.second.publish(1, {"peak_allocated_gib": 2.0})
    until(lambda: set(ranks.first.latest()) == {0, 1})
    ranks.third.publish(1, {"peak_allocated_gib": 3.0})
    until(lambda: len(ranks.first.latest()) == 3)
    assert set(ranks.second.latest()) == {1}, "only rank 0 listens"
    ranks.third.close()
    ranks.third.publish(2, {"peak_allocated_gib": 9.0})  # of a rank that has died nothing more comes
    ranks.second.publish(2, {"peak_allocated_gib": 4.0})
    until(lambda: ranks.first.latest()[1].step == 2)
    settled_s = ranks.first.latest()[2].age_s
    until(lambda: ranks.first.latest()[2].age_s > settled_s + 0.1)
    assert (ranks.first.latest()[2].step, ranks.first.latest()[2].numbers) == (1, {"peak_allocated_gib": 3.0})
    ranks.first.publish(7, {})
    assert ranks.first.latest()[0] == RankSample(7, {})


@pytest.mark.parametrize("sent", [signal.SIGSTOP, pytest.param(signal.SIGKILL, marks=pytest.mark.slow)])
def test_a_store_that_hangs_or_is_gone(ranks: Ranks, sent: signal.Signals) -> None:
    """The training thread does not wait for it."""
    ranks.second.publish(1, {"peak_allocated_gib": 2.0})
    until(lambda: 1 in ranks.first.latest())
    ranks.host.send_signal(sent)
    for step in range(2, 12):
        ranks.second.publish(step, {})
        time.sleep(0.03)
        assert list(ranks.second.latest()) == [1] and ranks.second.latest()[1].step == step
    if sent == signal.SIGKILL:
        until(lambda: ranks.second._shared.failure is not None)
    ranks.first.close()  # whose thread waits for an answer


def test_a_blocked_thread_is_abandoned() -> None:
    ends = threading.Event()
    thread = threading.Thread(target=ends.wait)
    thread.start()
    numbers_of_ranks._leave(numbers_of_ranks._Shared(), thread)
    assert thread.is_alive()
    ends.set()


def test_one_process_has_nobody_to_tell() -> None:
    assert join_ranks() is None


def known(step: int, age_s: float = 60.0, **numbers: float) -> RankSample:
    return RankSample(step, numbers, -age_s)


def test_numbers_over_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numbers_of_ranks, "time", SimpleNamespace(monotonic=lambda: 0.0))
    latest = {
        0: known(30, peak_allocated_gib=3.0, peak_reserved_gib=4.0, fragmentation_gib=1.0),
        1: known(29, peak_allocated_gib=5.0, peak_reserved_gib=6.0, fragmentation_gib=1.0),
        2: known(20, peak_allocated_gib=4.0, peak_reserved_gib=8.0, fragmentation_gib=4.0),
        3: known(19, peak_allocated_gib=9.0, peak_reserved_gib=9.0),  # silent since before the last logging step
    }
    assert over_ranks(latest[0].numbers, latest, since_step=20) == pytest.approx(
        {
            "ranks_heard": 3, "peak_allocated_mean_gib": 4.0, "peak_allocated_max_gib": 5.0,
            "peak_allocated_max_rank": 1, "peak_reserved_mean_gib": 6.0, "peak_reserved_max_gib": 8.0,
            "peak_reserved_max_rank": 2,
        }
    )  # fmt: skip
    quick = {**latest, 3: known(19, age_s=1.0, peak_allocated_gib=9.0)}  # steps that are faster than the news of them
    assert over_ranks(latest[0].numbers, quick, since_step=20)["peak_allocated_max_rank"] == 3
    assert over_ranks({"host_rss_gib": 1.0}, {0: known(5, host_rss_gib=1.0)}, since_step=4) == {
        "ranks_heard": 1, "host_rss_mean_gib": 1.0, "host_rss_max_gib": 1.0, "host_rss_max_rank": 0,
    }  # fmt: skip
    assert over_ranks({}, {}, since_step=0) == {}
