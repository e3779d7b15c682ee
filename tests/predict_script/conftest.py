"""Scripts that run up to their training, each in a fork of a process with the libraries loaded."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hf_memkit.common.user_script import UserScript
from hf_memkit.prediction.trace.request import ScriptRequest
from hf_memkit.prediction.traced_training import Outcome
from hf_memkit.prediction.worker import Worker

Predict = Callable[..., Outcome]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models and data of the jobs."""
    return prepared(tmp_path_factory.mktemp("jobs"), sys.executable)


def prepared(folder: Path, python: str, *options: str) -> Path:
    """The folder, with what these libraries have saved in it."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    prepare = Path(__file__).parent / "jobs" / "prepare.py"
    subprocess.run([python, str(prepare), str(folder), *options], check=True, env=environment)
    return folder


@pytest.fixture
def predict(worker: Worker, tmp_path: Path) -> Predict:
    """Writes a script into the test's folder and runs it up to its training; returns its outcome."""

    def run(code: str, *arguments: str, environment: dict[str, str] | None = None, **options: Any) -> Outcome:
        (tmp_path / "train.py").write_text(code)
        script = UserScript(str(tmp_path / "train.py"), False, arguments)
        return worker.run(ScriptRequest(script, str(tmp_path), {**os.environ, **(environment or {})}, **options))

    return run
