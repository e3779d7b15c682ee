"""Fails a plain test whose call takes over three seconds of CPU time: the plain level answers in minutes.

Imports do not count, neither in this process nor in the Python processes that the test starts. A slower machine has a
higher limit. On a machine that others use too, the CPU time of one test differs by up to half from run to run: a test
that is over the limit by no more is measured once again, and its second time counts.
"""

from __future__ import annotations

import importlib._bootstrap as bootstrap
import os
import subprocess
import sys
import time
from collections.abc import Collection, Iterator
from functools import cache
from pathlib import Path
from typing import Any, Final

import pytest
from _pytest.runner import runtestprotocol

LIMIT_S: Final = 3.0
IMPORT_S: Final = 6.5
"""CPU seconds of `_import_s` on the machine for which `LIMIT_S` was chosen."""
NOISE: Final = 1.5
"""A test that takes at most so many times its limit is measured again."""
_TICKS: Final = os.sysconf("SC_CLK_TCK")


class CpuLimit:
    """A pytest plugin that measures each test's call.

    Args:
        without_limit: markers of tests that may take longer.
    """

    def __init__(self, without_limit: Collection[str]) -> None:
        self._without_limit = without_limit
        self._importing_s = 0.0
        self._started = 0
        self._is_importing = False
        self._may_be_noise = False
        self._find_and_load = bootstrap._find_and_load
        bootstrap._find_and_load = self._timed_import
        sys.addaudithook(self._count_processes)

    def pytest_unconfigure(self) -> None:
        bootstrap._find_and_load = self._find_and_load

    def _timed_import(self, *arguments: Any) -> Any:
        if self._is_importing:
            return self._find_and_load(*arguments)
        self._is_importing, began = True, time.process_time()
        try:
            return self._find_and_load(*arguments)
        finally:
            self._is_importing = False
            self._importing_s += time.process_time() - began

    def _count_processes(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "subprocess.Popen" and "python" in Path(os.fsdecode(arguments[0])).name:
            self._started += 1

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Function, nextitem: pytest.Item | None) -> bool:
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        self._may_be_noise = False
        reports = runtestprotocol(item, log=False, nextitem=nextitem)
        if self._may_be_noise:
            item._initrequest()  # type: ignore[no-untyped-call]
            reports = runtestprotocol(item, log=False, nextitem=nextitem)
        for report in reports:
            item.ihook.pytest_runtest_logreport(report=report)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        if any(marker.name in self._without_limit for marker in item.iter_markers()):
            return (yield)
        before, imports, processes = cpu_s(), self._importing_s, self._started
        result = yield
        spent = cpu_s() - before - (self._importing_s - imports)
        if spent > LIMIT_S:
            started = self._started - processes
            allowed = LIMIT_S * max(1.0, _import_s() / IMPORT_S)
            spent -= started * _import_s()
            if spent > allowed:
                self._may_be_noise = spent <= NOISE * allowed
                pytest.fail(
                    f"{spent:.1f} s of CPU time, imports apart; a plain test has {allowed:.1f} s. Make it cheaper, or "
                    "mark it slow if a plain test shows its mechanism",
                    pytrace=False,
                )
        return result


def cpu_s() -> float:
    """CPU seconds that this process and its descendants have spent, whether they live or have ended."""
    return sum(os.times()[:4]) + sum(map(_spent_by, _children("self")))


def _children(process: str) -> Iterator[str]:
    for path in Path("/proc", process, "task").glob("*/children"):
        try:
            yield from path.read_text().split()
        except OSError:  # it has ended meanwhile
            continue


def _spent_by(process: str) -> float:
    try:
        fields = Path("/proc", process, "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    own = sum(map(int, fields[11:15])) / _TICKS  # its user and system time, and those of its ended children
    return own + sum(map(_spent_by, _children(process)))


@cache
def _import_s() -> float:
    before = os.times()
    subprocess.run(
        [sys.executable, "-c", "import torch, transformers.trainer, peft, deepspeed"], check=True, capture_output=True
    )
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system
