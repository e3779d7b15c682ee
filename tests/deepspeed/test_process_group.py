"""Leaving the process group: no thread of it is left that could need the interpreter while it shuts down."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hf_memkit.setup.process_group import leave_process_group
from tests.conftest import ROOT


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "threads_left"),
    [
        pytest.param("leave", 0, id="leave_process_group"),
        # Why it is needed: torch's own function joins nothing while parameters refer to the group, and some die.
        pytest.param("destroy", 10, id="destroy_process_group", marks=pytest.mark.exhaustive),
    ],
)
def test_threads_of_the_group_are_joined(tmp_path: Path, how: str, threads_left: int) -> None:
    command = [sys.executable, "-W", "ignore", "-m", "tests.deepspeed.leaving_worker", str(tmp_path), "5", how]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-3000:]
    output = json.loads(ran.stdout.splitlines()[-1])
    assert output["with_threads"] == threads_left
    if how == "leave":
        assert output["died"] == 0, ran.stderr[-3000:]
        leave_process_group()  # there is none: nothing happens
