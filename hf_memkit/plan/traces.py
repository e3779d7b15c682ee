"""Traces one script with different settings; runs the part before its Trainer only once where possible.

```
ScriptTraces ── settings not used so far ──> a fork of the waiting script (child/script/forks.py)
             └─ all other settings ────────> a new run of the script from its first line
```
"""

from __future__ import annotations

import contextlib
import json
import socket
import tempfile
import threading
import time
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Final, Self

from hf_memkit.common.errors import InputError
from hf_memkit.common.socket_paths import short_address
from hf_memkit.plan.kept_traces import KeptTraces
from hf_memkit.prediction import wire
from hf_memkit.prediction.running_scripts import (
    ScriptJob,
    refuse_engine,
    run_in_worker,
    script_request,
    script_worker,
    trace_device,
    training_of,
    worker_errors,
)
from hf_memkit.prediction.trace.request import EARLY, LATE, Device, ForkEnded, ForkRequest, ScriptRequest
from hf_memkit.prediction.traced_training import Outcome
from hf_memkit.prediction.worker import Worker
from hf_memkit.setup.script_overrides import Overrides

_POLL_S: Final = 0.05
_END_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class TraceFile:
    """The result of tracing a candidate: the file with its `Outcome`, or how its process died without one."""

    path: Path | None
    died: str | None = None

    def outcome(self) -> Outcome:
        return wire.loads(Outcome, self.path.read_text()) if self.path is not None else Outcome(died=self.died)


class ScriptTraces:
    """Traces of one script on one kind of GPU.

    Args:
        job: the script and its machine; its GPU's compute capability decides which kernels are traced.
        keeps: whether to use the cache of traces (`kept_traces.py`).

    Raises:
        InputError, ScriptFailed: as `predict_script`; from `start`.
    """

    def __init__(self, job: ScriptJob, *, keeps: bool = False) -> None:
        self._keeps = keeps
        self._kept: KeptTraces | None = None
        self._job, self._script = job, job.script
        self._stack = contextlib.ExitStack()
        self._folders = contextlib.ExitStack()
        self._folder = Path()
        self._waiting: dict[str, _WaitingProcess] = {}
        self._fresh: Worker | None = None
        self._script_thread: threading.Thread | None = None
        self._fresh_lock = threading.Lock()
        self._done: dict[str, Future[TraceFile]] = {}
        self._done_lock = threading.Lock()
        self._ended = threading.Event()
        self.device: Device = "cuda"
        self.notes: tuple[str, ...] = ()

    def __enter__(self) -> Self:
        self._folders = self._stack.enter_context(contextlib.ExitStack())  # closed last, after the worker
        return self

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

    def start(self) -> None:
        """Runs the script until it makes its Trainer."""
        refuse_engine(self._script, self._job.environment)
        worker, stdin = self._stack.enter_context(script_worker(None))
        self.device, self.notes = trace_device(worker, self._script)
        # Not before the worker is ready: from now on it removes the folder if this process is killed.
        self._folder = Path(self._folders.enter_context(tempfile.TemporaryDirectory(prefix="memkit-plan-")))
        request = replace(self._request(), forks=str(self._folder), device=self.device, stdin=stdin)
        script: Future[Outcome] = Future()

        def run() -> None:
            try:
                script.set_result(run_in_worker(worker, request))
            except BaseException as error:
                script.set_exception(error)

        self._script_thread = threading.Thread(target=run, daemon=True)
        self._script_thread.start()
        late = self._folder / LATE
        while not late.exists():
            if script.done():
                training_of(self._script, script.result())
                raise InputError(
                    f"{self._script}: ended before it created a Trainer. Plan a script that calls Trainer.train()"
                )
            time.sleep(_POLL_S)
        for name in (EARLY, LATE):
            if (self._folder / name).exists():
                self._waiting[name] = _WaitingProcess(self._folder / name)

    def of(self, overrides: Overrides) -> TraceFile:
        """The trace of the script with these overrides, which is made only once. Raises CancelledError after `end`."""
        key = json.dumps(overrides.to_json(), sort_keys=True)
        with self._done_lock:
            begins = key not in self._done
            done = self._done.setdefault(key, Future())
        if begins:
            try:
                done.set_result(self._cached_or_traced(overrides))
            except BaseException as error:
                done.set_exception(error)
        return done.result()

    def _cached_or_traced(self, overrides: Overrides) -> TraceFile:
        own = overrides == Overrides()
        if self._kept is not None and not own:
            result = self._new_result()
            if self._kept.find(overrides, result):
                return TraceFile(result)
        try:
            traced = self._trace(overrides)
        finally:
            if self._ended.is_set():
                raise CancelledError
        training = traced.outcome().training if self._keeps else None
        if training is not None and traced.path is not None:
            if own and training.facts.rows_digest:
                self._kept = KeptTraces(training, self._request())
            elif self._kept is not None:
                self._kept.keep(overrides, traced.path)
        return traced

    def _trace(self, overrides: Overrides) -> TraceFile:
        """A trace by a fork of a waiting process; by a new run of the script if both wait too late."""
        if not overrides.model:
            for name in (LATE, EARLY):
                process = self._waiting.get(name)
                traced = process.trace(overrides, self._new_result()) if process is not None else None
                if traced is not None:
                    return traced
                if self._ended.is_set():
                    raise CancelledError
        with self._fresh_lock:
            if self._ended.is_set():
                raise CancelledError
            if self._fresh is None:
                self._fresh = Worker()
            request = replace(self._request(), device=self.device, overrides=overrides)
            result = self._new_result()
            with worker_errors(self._script):
                died = self._fresh.run_to_file(request, result)
        return _trace_file(result, died)

    def _request(self) -> ScriptRequest:
        return replace(script_request(self._job), for_plan=True)

    def _new_result(self) -> Path:
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

    def trace(self, overrides: Overrides, result: Path) -> TraceFile | None:
        """A trace by a fork of the process; None if it has used these settings already, or died."""
        answer: Future[ForkEnded] = Future()
        request = ForkRequest(str(result), overrides)
        with self._lock:
            self._answers[str(result)] = answer
            try:
                self._socket.sendall(wire.dumps(request).encode() + b"\n")
            except OSError:
                return None
        try:
            ended = answer.result()
        except ConnectionError:
            return None
        return None if ended.too_late else _trace_file(result, ended.died)

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
