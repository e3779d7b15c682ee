"""Scripts as separate processes, in a separate folder."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
MEMKIT = ("-m", "hf_memkit", "run")


class Ended(NamedTuple):
    """Exit code (of a signal: negative) and output of a process."""

    code: int
    out: str
    err: str


class Started:
    """A process that runs beside the test."""

    def __init__(self, command: list[str], folder: Path, environment: dict[str, str]) -> None:
        # What stands on PYTHONPATH stays: an older transformers, where CI tests against it.
        path = os.pathsep.join(part for part in (str(ROOT), os.environ.get("PYTHONPATH")) if part)
        fixed = {"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
        self._process = subprocess.Popen(
            [sys.executable, *command],
            env={**os.environ, **fixed, **environment},
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def ended(self) -> Ended:
        out, err = self._process.communicate()
        return Ended(self._process.returncode, out, err)


Start = Callable[..., Started]


@pytest.fixture
def start(tmp_path: Path) -> Start:
    """Starts `python COMMAND` in the test's folder."""
    return lambda *command, **environment: Started([*map(str, command)], tmp_path, environment)


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], Path]:
    """Copies a script of this folder into the test's."""

    def copied(name: str) -> Path:
        path = tmp_path / name
        path.write_bytes((HERE / name).read_bytes())
        return path

    return copied
