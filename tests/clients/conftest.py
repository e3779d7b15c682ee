"""Runs each client script in separate processes, once without memkit and once with it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from tests.clients.clients import Client
from tests.conftest import ROOT

BOTH = ("without", "with")


@pytest.fixture(scope="session")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.clients.inputs import make_inputs

    folder = tmp_path_factory.mktemp("inputs")
    make_inputs(folder)
    return folder


@pytest.fixture(scope="session")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Environment variables: no GPU, no network, separate caches."""
    variables = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    variables["PYTHONHASHSEED"] = "0"  # peft writes a set of names into adapter_config.json
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        variables.pop(name, None)
    path = os.pathsep.join(part for part in (str(ROOT), os.environ.get("PYTHONPATH")) if part)
    return {**variables, "PYTHONPATH": path, "HF_HOME": str(tmp_path_factory.mktemp("cache"))}


def write_jobs(
    clients: Sequence[Client], ways: Sequence[str], further: Mapping[str, Sequence[str]], folder: Path, inputs: Path
) -> Path:
    """A folder for each client and way, and the list of jobs for `tests.clients.drive`."""
    jobs: list[dict[str, Any]] = []
    for client in clients:
        # The warm-up prints what libraries print only once in a process, so that no comparison sees it.
        for way in (*(() if jobs else ("warm-up",)), *ways, *further.get(client.name, ())):
            place = folder / client.name / way
            place.mkdir(parents=True)
            arguments = [argument.format(inputs=inputs) for argument in client.arguments]
            source = client.in_way(way)
            (place / "script.py").write_text(source)
            job = {"folder": str(place), "source": source, "arguments": arguments, "times": client.times}
            jobs.append({**job, "counted": way == "counted"})
    path = folder / "jobs.json"
    path.write_text(json.dumps(jobs))
    return path


@pytest.fixture(scope="session")
def drive(inputs: Path, environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Runs all clients in one process, or in those of torchrun, and returns the folder with their folders."""

    def run(
        clients: Sequence[Client],
        *,
        ways: Sequence[str] = BOTH,
        further: Mapping[str, Sequence[str]] = MappingProxyType({}),
        processes: int = 1,
    ) -> Path:
        folder = tmp_path_factory.mktemp("clients")
        launcher = ["torch.distributed.run", "--standalone", "--nproc_per_node", str(processes), "-m"]
        command = [sys.executable, "-m", *(launcher if processes > 1 else []), "tests.clients.drive"]
        jobs = write_jobs(clients, ways, further, folder, inputs)
        ran = subprocess.run([*command, str(jobs)], env=environment, capture_output=True, text=True, timeout=300)
        assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-5000:]
        return folder

    return run
