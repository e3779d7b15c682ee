"""The parent's side of the child process: it starts it, hands it cases, and replaces it when it is gone. Loading torch
and transformers takes seconds, so one worker serves all setups of a Python process (`shared_worker`), and the worker
of a script is kept for the next script (`lent_worker`). Each case runs in a process of its own."""

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

_END_S: Final = 10.0
"""How long the child may take to end what a script has started."""

_START: Final = ("-m", "hf_memkit.prediction.child.serve")


class Worker:
    """A child process that traces trainings, one at a time. What it writes is kept, to be shown if it fails. A script
    whose request has a standard input writes to this process's standard error.

    Args:
        python: the interpreter of another environment; None: this one.

    Attributes:
        without_shim: why fake CUDA tensors cannot be used there; None if they can. Known after `wait`.
    """

    def __init__(self, *, python: str | None = None) -> None:
        self.without_shim: str | None = None
        self._python = python
        self._lock = RLock()  # one line out, one line in: two threads would read each other's
        self._process: subprocess.Popen[str] | None = None
        self._errors: IO[bytes] | None = None
        self._files: socket.socket | None = None  # through which scripts get standard input and output
        self._variables: dict[str, str] = {}
        self._waited = False

    def start(self) -> None:
        """Starts the process, if it does not run, and comes back at once: it loads its libraries meanwhile."""
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._start()

    def _start(self) -> None:
        self.close()
        if self._python is None:
            refuse_too_old_here()
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the process
        self._files, files = socket.socketpair()
        self._variables = _variables()
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        # The predicted GPU is another one than this machine's; and once torch has looked for a GPU, no process that
        # is forked can use it.
        environment["CUDA_VISIBLE_DEVICES"] = ""
        for name in LAUNCHER_VARIABLES:
            environment.pop(name, None)  # the traced training is one process, whatever the one that asks is
        with files:
            self._process = subprocess.Popen(
                boot.command(*_START, str(files.fileno()), python=self._python or sys.executable),
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True, env=environment,
                pass_fds=(files.fileno(),),
            )  # fmt: skip
        self._waited = False

    def wait(self) -> None:
        """Waits until the child has loaded its libraries.

        Raises:
            TraceFailed: it died of that.
        """
        with self._lock:
            self.start()
            if not self._waited:
                self.without_shim = self._answer()["shim"]
                self._waited = True

    def run(self, request: ScriptRequest) -> Outcome:
        """What came of a script."""
        with tempfile.TemporaryDirectory() as folder:
            result = Path(folder) / "result.json"
            died = self.write(request, result)
            # A script has written what there is before it goes on; what else a process that died has written may be
            # half.
            with contextlib.suppress(OSError, *([ValueError] if died is not None else [])):
                return wire.read(Outcome, result.read_text())
            return Outcome(died=died)

    def write(self, request: ScriptRequest, result: Path) -> str | None:
        """How a script's process ended, None if well. What came of it, an `Outcome`, is at `result` unless the process
        ended without a word; its folder is the script's."""
        return self._run(Case(str(result), 0 if request.stdin is None else 2, request), request.stdin)

    def read(self, words: Sequence[str], environment: Mapping[str, str]) -> ReadCommand:
        """What a launcher's command would start."""
        with tempfile.TemporaryDirectory() as folder:
            result = Path(folder) / "result.json"
            case = Case(str(result), command=tuple(words), environment=environment, folder=str(Path.cwd()))
            died = self._run(case, None)
            with contextlib.suppress(OSError, ValueError):
                return wire.read(ReadCommand, result.read_text())
            return ReadCommand(error=f"its parser ended: {died}")

    def _run(self, case: Case, stdin: int | None) -> str | None:
        with self._lock:
            self.wait()  # from here on the child removes the folder, should this process be killed
            assert self._process is not None and self._process.stdin is not None and self._files is not None
            try:
                if stdin is not None:
                    socket.send_fds(self._files, [b"0"], [stdin, 2])
                self._process.stdin.write(wire.written(case) + "\n")
                self._process.stdin.flush()
            except BrokenPipeError:
                raise self._gone() from None
            try:
                ended = self._answer()
            except KeyboardInterrupt:  # what comes of this case would be taken for the next one's
                self.close()
                raise
            why: str | None = ended["why"]
            return why

    def is_idle_for(self, python: str | None) -> bool:
        """Whether it runs, for nobody, with this Python and this process's variables: libraries read them once."""
        process = self._process
        runs = process is not None and process.poll() is None
        return runs and self._python == python and self._variables == _variables() and not self.is_busy()

    def is_busy(self) -> bool:
        """Whether another thread waits for a case."""
        free = self._lock.acquire(blocking=False)
        if free:
            self._lock.release()
        return not free

    def end(self) -> None:
        """Ends what runs in the child process, and that, from a thread that does not wait for it."""
        process = self._process
        if process is not None and process.stdin is not None:
            with contextlib.suppress(OSError):
                process.stdin.close()

    def close(self) -> None:
        """Ends the child process, and all that scripts have started in it."""
        process, self._process = self._process, None
        if process is not None:
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    with contextlib.suppress(OSError):
                        stream.close()
            with contextlib.suppress(subprocess.TimeoutExpired):  # it ends what scripts have started
                process.wait(_END_S)
            process.kill()
            process.wait()
        for each in (self._errors, self._files):
            if each is not None:
                each.close()
        self._errors = self._files = None

    def _answer(self) -> dict[str, Any]:
        assert self._process is not None and self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise self._gone()
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _gone(self) -> TraceFailed:
        """What is said of a child that went away; the next case starts another one."""
        code = self._process.wait() if self._process is not None else None
        lines: list[str] = []
        if self._errors is not None:
            self._errors.seek(0)
            lines = [line for line in self._errors.read().decode(errors="replace").splitlines() if line.strip()]
        self.close()
        if code is not None and code < 0:  # what it said last, a progress bar say, has nothing to do with that
            why = f"was ended by {signal.Signals(-code).name}"
        else:
            why = f"ended with exit code {code}: {lines[-1] if lines else 'no message'}"
        return TraceFailed(f"the process that traces trainings {why}", kind="worker", details="\n".join(lines))


_CHANGE: Final = ("COLUMNS", "LINES", "OLDPWD", "PWD", "PYTEST_CURRENT_TEST", "_")
"""Variables that no library reads when it is imported."""


def _variables() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in _CHANGE}


_idle: list[Worker] = []
"""At most one."""

_lending: Final = Lock()


@contextlib.contextmanager
def lent_worker(python: str | None) -> Iterator[Worker]:
    """A worker that nobody else uses meanwhile; it is kept for the next one that asks.

    Args:
        python: as of a `Worker`.
    """
    with _lending:
        kept = _idle.pop() if _idle else None
    if kept is not None and not kept.is_idle_for(python):
        kept.close()
        kept = None
    worker = kept or Worker(python=python)
    try:
        yield worker
    finally:
        if worker.is_busy():  # a thread waits for a case that nobody wants any more
            worker.close()
        with _lending:
            before = _idle.copy()
            _idle[:] = [worker]
        for each in before:
            each.close()


_shared: Worker | None = None


def shared_worker() -> Worker:
    """The worker of this Python process, until `close_workers`."""
    global _shared
    if _shared is None:
        _shared = Worker()
    return _shared


def close_workers() -> None:
    """Ends the workers that are kept: a training needs the RAM that their libraries take."""
    global _shared
    with _lending:
        kept, _idle[:] = _idle.copy(), []
    if _shared is not None:
        kept.append(_shared)
        _shared = None
    for worker in kept:
        worker.close()


atexit.register(close_workers)
