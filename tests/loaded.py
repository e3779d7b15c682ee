"""A process that has imported the libraries and forks for each command or script, which saves seconds each time.

    python -m tests.loaded       reads jobs as lines of JSON, and answers each with its exit code

Each job has its own working folder, environment variables, output and exit code.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Ran:
    """The result of a job: exit code and output."""

    returncode: int
    stdout: str
    stderr: str

    @property
    def output(self) -> str:
        return self.stdout + self.stderr


class Loaded:
    """The process; `run` runs a job in a fork of it."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        # Keep PYTHONPATH: CI puts an older transformers there.
        path = os.pathsep.join(part for part in (str(ROOT), os.environ.get("PYTHONPATH")) if part)
        environment = {**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "", "COLUMNS": "200"}
        environment |= {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        # Use this environment's ninja: another one would build all operators again.
        environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environment["PATH"]])
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.loaded"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, cwd=ROOT,
        )  # fmt: skip
        assert self._process.stdout is not None
        self._process.stdout.readline()  # wait until the libraries are imported, so that no test's time includes it

    def run(self, arguments: Sequence[str | Path], folder: Path) -> Ran:
        """`["memkit", …]` or `["script.py"]`, in `folder`."""
        assert self._process.stdin is not None and self._process.stdout is not None
        output = Path(tempfile.mkdtemp(dir=self._folder.name))
        job = {"arguments": [str(each) for each in arguments], "folder": str(folder), "output": str(output)}
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        returncode = int(self._process.stdout.readline())
        stdout, stderr = ((output / name).read_text(errors="replace") for name in ("stdout", "stderr"))
        return Ran(returncode, stdout, stderr)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._folder.cleanup()


@contextlib.contextmanager
def loaded() -> Iterator[Loaded]:
    process = Loaded()
    try:
        yield process
    finally:
        process.close()


def serve() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    _load()
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        child = os.fork()
        if child == 0:
            _leave(job)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), file=answers, flush=True)
        _preload(Path(job["output"]) / IMPORTED)


def _load() -> None:
    import deepspeed  # noqa: F401
    import peft  # noqa: F401
    import torch
    import transformers.trainer  # noqa: F401

    import hf_memkit.cli
    import hf_memkit.run.training  # noqa: F401

    torch.set_num_threads(1)
    gc.freeze()  # else each training's collection looks through all of that


IMPORTED = "imported"
"""File with the modules that a job imported."""
PRELOADED = ("hf_memkit.", "rich.", "typer.", "pydantic.", "packaging.", "transformers.models.")
"""Modules which do not depend on a job: each next one has them."""


def _preload(imported: Path) -> None:
    names = imported.read_text().split() if imported.exists() else []
    for name in names:
        if name.startswith(PRELOADED):
            with contextlib.suppress(Exception):
                importlib.import_module(name)
    if names:
        gc.freeze()


def _leave(job: dict[str, Any]) -> NoReturn:
    before = set(sys.modules)
    os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(job["folder"])
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(Path(job["output"]) / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644), number)
    code = 0
    try:
        first, *rest = job["arguments"]
        if first == "memkit":
            from hf_memkit.cli import main

            sys.argv = job["arguments"]
            code = main(rest)
        else:
            sys.argv = job["arguments"]
            sys.path.insert(0, str(Path(first).resolve().parent))
            runpy.run_path(first, run_name="__main__")
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
        code = 1
    for stream in filter(None, (sys.stdout, sys.stderr)):
        stream.flush()
    (Path(job["output"]) / IMPORTED).write_text(" ".join(name for name in sys.modules if name not in before))
    os._exit(code)


if __name__ == "__main__":
    serve()
