"""A pytest plugin: the summary lists the tests that took the most CPU time, child processes included.

No test fails for it: the figures differ by half from run to run where other programs run too.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest

LISTED: Final = 10
_BEGAN: Final = pytest.StashKey[float]()
_TICKS: Final = os.sysconf("SC_CLK_TCK")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    item.stash[_BEGAN] = cpu_s()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """A test's properties travel in its report, also from a process of xdist."""
    try:
        return (yield)
    finally:
        item.user_properties.append(("cpu_s", cpu_s() - item.stash[_BEGAN]))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    ended = [report for outcome in ("passed", "failed") for report in terminalreporter.stats.get(outcome, [])]
    for line in slowest(ended):
        terminalreporter.write_line(line)


def slowest(reports: Iterable[Any]) -> list[str]:
    """The lines of the summary. A test's fixtures count for the first test that needs them."""
    spent = {each.nodeid: dict(each.user_properties).get("cpu_s", 0.0) for each in reports}
    longest = sorted(spent, key=spent.__getitem__, reverse=True)[:LISTED]
    lines = [f"{spent[name]:6.1f} s  {name}" for name in longest]
    return [f"CPU time of {len(spent)} tests: {sum(spent.values()):.0f} s. The slowest:", *lines] if spent else []


def cpu_s() -> float:
    """CPU seconds that this process and its descendants have spent, whether they live or have ended; without what
    processes spent that live, and that another thread than the first started."""
    return sum(os.times()[:4]) + sum(map(_spent_by, _children(str(os.getpid()))))


def _children(process: str) -> list[str]:
    try:
        return Path(f"/proc/{process}/task/{process}/children").read_text().split()
    except OSError:  # it has ended meanwhile
        return []


def _spent_by(process: str) -> float:
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    own = sum(map(int, fields[11:15])) / _TICKS  # its user and system time, and those of its ended children
    return own + sum(map(_spent_by, _children(process)))
