"""The summary lists the tests that took the most CPU time."""

import os
import subprocess
import sys
import time
from types import SimpleNamespace

from tests import cpu_time


def test_the_slowest_come_first() -> None:
    ended = [SimpleNamespace(nodeid=f"test_{n}", user_properties=[("cpu_s", float(n % 13))]) for n in range(26)]
    first, *lines = cpu_time.slowest([*ended, SimpleNamespace(nodeid="without", user_properties=[])])
    assert "27 tests: 156 s" in first
    assert [line.split() for line in lines[:3]] == [["12.0", "s", f"test_{n}"] for n in (12, 25)] + [
        ["11.0", "s", "test_11"]
    ]
    assert len(lines) == cpu_time.LISTED and cpu_time.slowest([]) == []


def test_a_child_that_lives_counts() -> None:
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as child:
        while not cpu_time._spent_by(str(child.pid)):
            time.sleep(0.01)
        assert str(child.pid) in cpu_time._children(str(os.getpid()))
        child.kill()
