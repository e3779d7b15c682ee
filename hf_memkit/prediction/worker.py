"""Starts the child process, sends it cases, and replaces it when it has died.

Loading torch and transformers takes seconds, so one worker serves all setups of a Python process (`shared_worker`),
and the worker of a script is kept for the next script (`lent_worker`). Each case runs in a separate process.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from threading import Lock, RLock
from typing import IO, Any, Final

from hf_memkit.catalog.environments import refuse_too_old_here
from hf_memkit.common import boot
from hf_memkit.common.errors import TraceFailed
from hf_memkit.prediction import wire
from hf_memkit.prediction.trace.request import Case, ReadCommand, ScriptRequest
from hf_memkit.prediction.traced_training import Outcome
from hf_memkit.setup.process_group import LAUNCHER_VARIABLES

_END_S: Final = 10.0  # time for the child to kill the processes of a script

_START: Final = ("-m", "hf_memkit.prediction.child.serve")

_SET: Final = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "CUDA_VISIBLE_DEVICES": ""}
"""Variables of each worker. The predicted GPU is not this machine's; and after torch has looked for a GPU, no forked
process can use it."""


class Worker:
    """A child process that traces trainings, one at a time, with the interpreter `python` of another environment or
    this one. Its output is kept for error messages; a script with a standard input writes to this process's standard
    error."""

    def __init__(self, *, python: str | None = None) -> None:
        self.shim_error: str | None = None  # why fake CUDA tensors are unavailable there, if so; known after `wait`
        self._python = python
        self._lock = RLock()  # two threads would read each other's answers
        self._process: subprocess.Popen[str] | None = None
        self._errors: IO[bytes] | None = None
        self._files: socket.socket | None = None  # sends standard input and output of scripts
        self._variables: dict[str, str] = {}
        self._waited = False

    def start(self) -> None:
        """Starts the process unless it runs, without waiting until it has loaded its libraries."""
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._start()

    def _start(self) -> None:
        self.close()
        if self._python is None:
            refuse_too_old_here()
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        self._files, files = socket.socketpair()
        self._variables = _variables()
        environment = {**os.environ, **_SET}
        for name in LAUNCHER_VARIABLES:
            environment.pop(name, None)  # the traced training is one process, even if the asking one is a rank
        with files:
            self._process = subprocess.Popen(
                boot.command(*_START, str(files.fileno()), python=self._python or sys.executable),
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True, env=environment,
                pass_fds=(files.fileno(),),
            )  # fmt: skip
        self._waited = False

    def wait(self) -> None:
        """Waits until the child has loaded its libraries. Raises TraceFailed if the child died."""
        with self._lock:
            self.start()
            if not self._waited:
                self.shim_error = self._read_answer()["shim"]
                self._waited = True

    def run(self, request: ScriptRequest) -> Outcome:
        """Runs a script and returns its outcome."""
        self.wait()  # from then on the child removes the folder if this process is killed
        with tempfile.TemporaryDirectory() as folder:
            result = Path(folder) / "result.json"
            died = self.run_to_file(request, result)
            # The result is complete if the process ended normally; a process that died may have written part of it.
            with contextlib.suppress(OSError, *([ValueError] if died is not None else [])):
                return wire.loads(Outcome, result.read_text())
            return Outcome(died=died)

    def run_to_file(self, request: ScriptRequest, result: Path) -> str | None:
        """Runs a script; returns how its process died, or None. Its `Outcome` is in `result`, unless the process died
        before it wrote it; the script owns the folder."""
        return self._run(Case(str(result), 0 if request.stdin is None else 2, request), request.stdin)

    def read(self, words: Sequence[str], environment: Mapping[str, str]) -> ReadCommand:
        """Parses a launcher's command."""
        self.wait()
        with tempfile.TemporaryDirectory() as folder:
            result = Path(folder) / "result.json"
            case = Case(str(result), command=tuple(words), environment=environment, folder=str(Path.cwd()))
            died = self._run(case, None)
            with contextlib.suppress(OSError, ValueError):
                return wire.loads(ReadCommand, result.read_text())
            return ReadCommand(error=f"its parser ended: {died}")

    def _run(self, case: Case, stdin: int | None) -> str | None:
        with self._lock:
            self.wait()
            assert self._process is not None and self._process.stdin is not None and self._files is not None
            try:
                if stdin is not None:
                    socket.send_fds(self._files, [b"0"], [stdin, 2])
                self._process.stdin.write(wire.dumps(case) + "\n")
                self._process.stdin.flush()
            except BrokenPipeError:
                raise self._close_dead() from None
            try:
                answer = self._read_answer()
            except KeyboardInterrupt:  # this case's answer would be read as the next one's
                self.close()
                raise
            why: str | None = answer["why"]
            return why

    def is_idle_for(self, python: str | None) -> bool:
        """Whether it runs without a case, with this Python and this process's variables, which libraries read once."""
        process = self._process
        runs = process is not None and process.poll() is None
        return runs and self._python == python and self._variables == _variables() and not self.is_busy()

    def is_busy(self) -> bool:
        """Whether another thread waits for a case."""
        free = self._lock.acquire(blocking=False)
        if free:
            self._lock.release()
        return not free

    def interrupt(self) -> None:
        """Makes the child process and its scripts end, while another thread waits for a case: that gets TraceFailed.
        Does not wait until they have ended."""
        process = self._process
        if process is not None and process.stdin is not None:
            with contextlib.suppress(OSError):
                process.stdin.close()

    def close(self) -> None:
        """Ends the child process, and all that scripts started in it, and waits. The next case starts a new one."""
        process = self._process
        self._process = None
        if process is not None:
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    with contextlib.suppress(OSError):
                        stream.close()
            with contextlib.suppress(subprocess.TimeoutExpired):  # it kills the scripts' processes
                process.wait(_END_S)
            process.kill()
            process.wait()
        for resource in (self._errors, self._files):
            if resource is not None:
                resource.close()
        self._errors = self._files = None

    def _read_answer(self) -> dict[str, Any]:
        assert self._process is not None and self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise self._close_dead()
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _close_dead(self) -> TraceFailed:
        """Cleans up after a child that died; returns the error with its last output."""
        code = self._process.wait() if self._process is not None else None
        lines: list[str] = []
        if self._errors is not None:
            self._errors.seek(0)
            lines = [line for line in self._errors.read().decode(errors="replace").splitlines() if line.strip()]
        self.close()
        if code is not None and code < 0:  # its last output, such as a progress bar, is unrelated
            why = f"was ended by {signal.Signals(-code).name}"
        else:
            why = f"ended with exit code {code}: {lines[-1] if lines else 'no message'}"
        return TraceFailed(f"the process that traces trainings {why}", kind="worker", details="\n".join(lines))


_IRRELEVANT_VARIABLES: Final = {
    "COLUMNS", "HF_TOKEN", "LINES", "OLDPWD", "PWD", "PYTEST_CURRENT_TEST", "_", *_SET, *LAUNCHER_VARIABLES
}  # fmt: skip
"""Variables that no library reads on import, and those that each worker has alike."""


def _variables() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in _IRRELEVANT_VARIABLES}


_idle: list[Worker] = []  # at most one worker

_lending: Final = Lock()


@contextlib.contextmanager
def lent_worker(python: str | None) -> Iterator[Worker]:
    """A worker for exclusive use, which is kept for the next caller. `python`: interpreter; None: this process's."""
    with _lending:
        kept = _idle.pop() if _idle else None
    if kept is not None and not kept.is_idle_for(python):
        kept.close()
        kept = None
    worker = kept or Worker(python=python)
    try:
        yield worker
    finally:
        if worker.is_busy():  # a thread waits for a case that nobody needs
            worker.close()
        with _lending:
            before = _idle.copy()
            _idle[:] = [worker]
        for other in before:
            other.close()


_shared: Worker | None = None


def shared_worker() -> Worker:
    """The worker of this Python process, until `close_workers`."""
    global _shared
    if _shared is None:
        _shared = Worker()
    return _shared


def close_workers() -> None:
    """Ends the workers that are kept, because a training needs the RAM of their libraries."""
    global _shared
    with _lending:
        kept, _idle[:] = _idle.copy(), []
    if _shared is not None:
        kept.append(_shared)
        _shared = None
    for worker in kept:
        worker.close()


atexit.register(close_workers)
