"""The trainings that several tests look at: made once, in one process each way."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hf_memkit.catalog.models import ModelFacts, describe
from hf_memkit.deepspeed import ops
from tests.conftest import ROOT
from tests.operators import EVERY_OPERATOR

Results = Callable[[str], list[dict[str, Any]]]
"""Name of a case → what each of its processes came to."""


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.engine.tiny_training import save_initial_weights

    folder = tmp_path_factory.mktemp("presets")
    save_initial_weights(folder / "initial")
    return folder


@pytest.fixture(scope="session")
def model(folder: Path) -> ModelFacts:
    return describe(str(folder / "initial"), use_hub=False)


@pytest.fixture(scope="session")
def single(folder: Path, pytestconfig: pytest.Config) -> Results:
    driver = [sys.executable, "-m", "tests.engine.preset_driver"]
    return drive(pytestconfig, folder, [*driver, "--half", "0"], [*driver, "--half", "1"])


@pytest.fixture(scope="session")
def double(folder: Path, pytestconfig: pytest.Config) -> Results:
    launcher = ["torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m", "tests.engine.preset_driver"]
    return drive(pytestconfig, folder, [sys.executable, "-m", *launcher], processes=2)


def drive(config: pytest.Config, folder: Path, *commands: list[str], processes: int = 1) -> Results:
    """Trains the cases, and returns their results. An error fails the cases that it stopped.

    It takes a minute or two: a dot a case is printed.
    """
    ops.build(EVERY_OPERATOR, print, cpu=True)
    place = folder / str(processes)
    place.mkdir()
    (place / "initial").symlink_to(folder / "initial")
    # Several processes wait for each other: threads that spin while they do so would keep the others from running.
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        environment.pop(name, None)
    further = ["--exhaustive"] if config.option.exhaustive else []
    capture = config.pluginmanager.getplugin("capturemanager")
    with (place / "log.txt").open("w+") as log:
        ran = [
            subprocess.Popen([*command, *further, str(place)], env=environment, stdout=log, stderr=log)
            for command in commands
        ]
        reported = 0
        while any(each.poll() is None for each in ran):
            time.sleep(0.5)
            done = len(list(place.glob("*/rank0.json")))
            with capture.global_and_fixture_disabled():
                print("." * (done - reported), end="", flush=True)
            reported = done
        for each in ran:
            each.kill()
        returncodes = [each.wait() for each in ran]
    message = (place / "log.txt").read_text()[-8000:]

    def results(case: str) -> list[dict[str, Any]]:
        found = [json.loads(path.read_text()) for path in sorted((place / case).glob("rank*.json"))]
        assert len(found) == processes, message
        for result in found:
            assert result["error"] is None, result["error"]
        return found

    assert not any(returncodes), message
    return results
