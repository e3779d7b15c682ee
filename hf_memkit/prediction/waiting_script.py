"""Runs a user's script up to its Trainer, where it waits, and traces it from there with different settings.

```
WaitingScript ── settings not used so far ──> a fork of the waiting process (child/script/forks.py)
              └─ all other settings ────────> a new run of the script from its first line, which is announced
```
"""

from __future__ import annotations

import contextlib
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Final, Self

from hf_memkit.common.socket_paths import short_address
from hf_memkit.prediction import wire
from hf_memkit.prediction.running_scripts import (
    ScriptJob,
    name_of,
    refuse_unpredictable,
    run_in_worker,
    script_request,
    script_worker,
    trace_device,
    training_of,
    worker_errors,
)
from hf_memkit.prediction.trace.request import EARLY, LATE, Device, ForkEnded, ForkRequest, ScriptRequest
from hf_memkit.prediction.traced_training import Outcome, TracedTraining
from hf_memkit.prediction.worker import Worker
from hf_memkit.setup.script_overrides import Overrides

_POLL_S: Final = 0.05
_END_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class TraceFile:
    """The result of a trace: the file with its `Outcome`, or how its process died without one."""

    path: Path | None
    died: str | None = None

    def outcome(self) -> Outcome:
        return wire.loads(Outcome, self.path.read_text()) if self.path is not None else Outcome(died=self.died)


class WaitingScript:
    """A context manager: runs the script until it makes its Trainer, where it waits until the context ends.

    Args:
        job: the script and its machine; its GPU's compute capability decides which kernels are traced.
        on_restart: called with the reason before the script starts again from its first line.

    Raises:
        InputError, ScriptFailed: as `predict_script`.
    """

    def __init__(self, job: ScriptJob, on_restart: Callable[[str], None] = lambda _: None) -> None:
        self.job = job
        self._on_restart = on_restart
        self._stack = contextlib.ExitStack()
        self._folders = self._stack.enter_context(contextlib.ExitStack())  # closed last, after the worker
        self._folder = Path()
        self._waiting: dict[str, _WaitingProcess] = {}
        self._fresh: Worker | None = None
        self._script_thread: threading.Thread | None = None
        self._fresh_lock = threading.Lock()
        self._ended = threading.Event()
        self._own: Outcome | None = None  # of a script that did not wait
        self.device: Device = "cuda"
        self.notes: tuple[str, ...] = ()

    def __enter__(self) -> Self:
        refuse_unpredictable(self.job)
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    @property
    def has_ended(self) -> bool:
        return self._ended.is_set()

    def end(self) -> None:
        """Ends all tracing; threads that wait for a trace get CancelledError."""
        self._ended.set()
        for process in self._waiting.values():
            process.close()
        if self._fresh is not None:
            self._fresh.interrupt()

    def __exit__(self, *_: object) -> None:
        for process in self._waiting.values():
            process.close()  # it ends when its socket closes
        if self._script_thread is not None and self._waiting:  # otherwise the script still runs: its worker is closed
            self._script_thread.join(_END_S)
        if self._fresh is not None:
            self._fresh.close()
        self._stack.close()

    def _start(self) -> None:
        script = self.job.script
        worker, stdin = self._stack.enter_context(script_worker(self.job.other))
        self.device, self.notes = trace_device(worker, script)
        # Not before the worker has loaded: from then on it removes the folder if this process is killed.
        self._folder = Path(self._folders.enter_context(tempfile.TemporaryDirectory(prefix="memkit-")))
        request = replace(self.request(), forks=str(self._folder), stdin=stdin)
        ended: Future[Outcome] = Future()

        def run() -> None:
            try:
                ended.set_result(run_in_worker(worker, request))
            except BaseException as error:
                ended.set_exception(error)

        self._script_thread = threading.Thread(target=run, daemon=True)
        self._script_thread.start()
        late = self._folder / LATE
        while not late.exists():
            if ended.done():
                training_of(script, ended.result())
                self._own = ended.result()
                return
            time.sleep(_POLL_S)
        for name in (EARLY, LATE):
            if (self._folder / name).exists():
                self._waiting[name] = _WaitingProcess(self._folder / name)

    def request(self) -> ScriptRequest:
        """The request with which the script starts, without its input and output."""
        return replace(script_request(self.job), for_plan=True, device=self.device)

    def unchanged(self, micro_batch_size: int | None = None) -> TracedTraining:
        """The training of the unchanged script. Raises the errors of `predict_script`.

        Args:
            micro_batch_size: as in `ScriptRequest`.
        """
        traced = self.trace(Overrides(), for_plan=False, micro_batch_size=micro_batch_size)
        training = training_of(self.job.script, traced.outcome())
        return replace(training, notes=(*self.notes, *training.notes, *training.notices))

    def trace(
        self, overrides: Overrides, *, for_plan: bool = True, micro_batch_size: int | None = None
    ) -> TraceFile:  # fmt: skip
        """A trace with these settings. Raises CancelledError after `end`."""
        result = self.new_result()
        if self._own is not None and overrides == Overrides() and micro_batch_size is None:
            result.write_text(wire.dumps(self._own))
            return TraceFile(result)
        asked = ForkRequest(str(result), overrides, for_plan=for_plan, micro_batch_size=micro_batch_size)
        for name in () if overrides.model else (LATE, EARLY):
            process = self._waiting.get(name)
            traced = process.trace(asked) if process is not None else None
            if self._ended.is_set():
                raise CancelledError
            if traced is not None:
                return traced
        with self._fresh_lock:
            if self._ended.is_set():
                raise CancelledError
            if self._fresh is None:
                self._fresh = Worker(python=self.job.other.python if self.job.other is not None else None)
            self._on_restart(f"{name_of(self.job.script)} starts again from its first line: {self._why(overrides)}")
            request = replace(
                self.request(), overrides=overrides, for_plan=for_plan, micro_batch_size=micro_batch_size
            )
            with worker_errors(self.job.script):
                died = self._fresh.run_to_file(request, result)
        return _trace_file(result, died)

    def _why(self, overrides: Overrides) -> str:
        """Why a trace with these settings needs a new run of the script."""
        if self._own is not None:
            return "it computes gradients before it makes its Trainer"
        if overrides.model:
            return f"to change how the model loads: {', '.join(overrides.model)}"
        return f"it may use these arguments before it makes its Trainer: {', '.join(overrides.arguments)}"

    def new_result(self) -> Path:
        """A path in a new folder, in which the traced training also writes its own files."""
        return Path(tempfile.mkdtemp(dir=self._folder)) / "result.json"


def _trace_file(result: Path, died: str | None) -> TraceFile:
    return TraceFile(result if result.exists() else None, died)


class _WaitingProcess:
    """A process of the script that waits at its Trainer, before (EARLY) or after (LATE) a subclass prepares it."""

    def __init__(self, path: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with short_address(path) as address:
            self._socket.connect(address)
        self._lines: IO[bytes] = self._socket.makefile("rb")
        self._lock = threading.Lock()
        self._answers: dict[str, Future[ForkEnded]] = {}
        threading.Thread(target=self._listen, daemon=True).start()

    def trace(self, request: ForkRequest) -> TraceFile | None:
        """A trace by a fork of the process; None if it has used these settings already, or died."""
        answer: Future[ForkEnded] = Future()
        with self._lock:
            self._answers[request.result] = answer
            try:
                self._socket.sendall(wire.dumps(request).encode() + b"\n")
            except OSError:
                return None
        try:
            ended = answer.result()
        except ConnectionError:
            return None
        return None if ended.too_late else _trace_file(Path(request.result), ended.died)

    def _listen(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            for line in self._lines:
                answer = wire.loads(ForkEnded, line.decode())
                self._answers.pop(answer.result).set_result(answer)
        with self._lock:
            for pending in self._answers.values():
                pending.set_exception(ConnectionError())

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
