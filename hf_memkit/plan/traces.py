"""Traces of one script with other arguments: what it does before it makes its Trainer is done once.

```
ScriptTraces ── what nothing has acted on ──> a fork of the script that waits (child/script/forks.py)
             └─ all others ───────────────────> the script from its first line, with the settings in place of its own
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
    asked,
    checked,
    device_of,
    here,
    own_worker,
    refuse_engine,
    script_request,
)
from hf_memkit.prediction.trace.request import EARLY, LATE, Device, ForkEnded, ForkRequest, ScriptRequest
from hf_memkit.prediction.traced_training import Outcome
from hf_memkit.prediction.worker import Worker
from hf_memkit.setup.script_overrides import Overrides

_POLL_S: Final = 0.05
_END_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class TraceFile:
    """What came of a candidate: the file with its `Outcome`, or how its process died without one."""

    path: Path | None
    died: str | None = None

    def outcome(self) -> Outcome:
        return wire.read(Outcome, self.path.read_text()) if self.path is not None else Outcome(died=self.died)


class ScriptTraces:
    """One script on one kind of GPU.

    Args:
        job: the script on its machine; of the GPU the compute capability decides what is traced.
        keeps: whether traces of earlier plans are taken, and these kept for later ones (`kept_traces.py`).

    Raises:
        InputError, ScriptFailed: as `predict_script`; from `start`.
    """

    def __init__(self, job: ScriptJob, *, keeps: bool = False) -> None:
        self._keeps = keeps
        self._kept: KeptTraces | None = None
        self._job, self._script = job, job.script
        self._stack = contextlib.ExitStack()
        self._folder = Path()
        self._waiting: dict[str, _Waiting] = {}
        self._fresh: Worker | None = None
        self._runs: threading.Thread | None = None
        self._one_fresh = threading.Lock()
        self._done: dict[str, Future[TraceFile]] = {}
        self._asking = threading.Lock()
        self._ended = threading.Event()
        self.device: Device = "cuda"
        self.notes: tuple[str, ...] = ()

    def __enter__(self) -> Self:
        self._folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="memkit-plan-")))
        return self

    def end(self) -> None:
        """Ends what is being traced, from another thread: whoever waits for it gets CancelledError."""
        self._ended.set()
        for each in self._waiting.values():
            each.close()
        if self._fresh is not None:
            self._fresh.end()

    def __exit__(self, *_: object) -> None:
        for each in self._waiting.values():
            each.close()
        if self._runs is not None:
            self._runs.join(_END_S)  # the processes that waited end by themselves
        if self._fresh is not None:
            self._fresh.close()
        self._stack.close()

    def start(self) -> None:
        """Runs the script up to where it makes its Trainer."""
        refuse_engine(self._script, self._job.environment)
        worker, stdin = self._stack.enter_context(own_worker(None))
        self.device, self.notes = device_of(worker, self._script)
        request = replace(self._request(), forks=str(self._folder), device=self.device, stdin=stdin)
        script: Future[Outcome] = Future()

        def run() -> None:
            try:
                script.set_result(asked(worker, request))
            except BaseException as error:
                script.set_exception(error)

        self._runs = threading.Thread(target=run, daemon=True)
        self._runs.start()
        late = self._folder / LATE
        while not late.exists():
            if script.done():
                checked(self._script, script.result())
                raise InputError(
                    f"{self._script}: ended before it created a Trainer. Plan a script that calls Trainer.train()"
                )
            time.sleep(_POLL_S)
        for name in (EARLY, LATE):
            if (self._folder / name).exists():
                self._waiting[name] = _Waiting(self._folder / name)

    def of(self, overrides: Overrides) -> TraceFile:
        """The trace of the script with these settings changed; each is made once. Raises CancelledError after
        `end`."""
        key = json.dumps(overrides.to_json(), sort_keys=True)
        with self._asking:
            begins = key not in self._done
            done = self._done.setdefault(key, Future())
        if begins:
            try:
                done.set_result(self._traced(overrides))
            except BaseException as error:
                done.set_exception(error)
        return done.result()

    def _traced(self, overrides: Overrides) -> TraceFile:
        own = overrides == Overrides()
        if self._kept is not None and not own:
            result = self._result()
            if self._kept.find(overrides, result):
                return TraceFile(result)
        found = self._traced_now(overrides)
        training = found.outcome().training if self._keeps else None
        if training is not None and found.path is not None:
            if own and training.facts.rows_digest:
                self._kept = KeptTraces(training, self._request())
            elif self._kept is not None:
                self._kept.keep(overrides, found.path)
        return found

    def _traced_now(self, overrides: Overrides) -> TraceFile:
        try:
            return self._asked(overrides)
        finally:
            if self._ended.is_set():
                raise CancelledError

    def _asked(self, overrides: Overrides) -> TraceFile:
        if not overrides.model:
            for name in (LATE, EARLY):
                waiting = self._waiting.get(name)
                found = waiting.ask(overrides, self._result()) if waiting is not None else None
                if found is not None:
                    return found
                if self._ended.is_set():
                    raise CancelledError
        return self._from_its_first_line(overrides)

    def _from_its_first_line(self, overrides: Overrides) -> TraceFile:
        with self._one_fresh:
            if self._ended.is_set():
                raise CancelledError
            if self._fresh is None:
                self._fresh = Worker()
            request = replace(self._request(), device=self.device, overrides=overrides)
            result = self._result()
            with here(self._script):
                died = self._fresh.write(request, result)
        return _file(result, died)

    def _request(self) -> ScriptRequest:
        return replace(script_request(self._job), for_plan=True)

    def _result(self) -> Path:
        """In a folder of its own: a traced training writes beside it."""
        return Path(tempfile.mkdtemp(dir=self._folder)) / "result.json"


def _file(result: Path, died: str | None) -> TraceFile:
    return TraceFile(result if result.exists() else None, died)


class _Waiting:
    """The process that waits at one of the two moments."""

    def __init__(self, path: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with short_address(path) as address:
            self._socket.connect(address)
        self._lines: IO[bytes] = self._socket.makefile("rb")
        self._lock = threading.Lock()
        self._answers: dict[str, Future[ForkEnded]] = {}
        threading.Thread(target=self._listen, daemon=True).start()

    def ask(self, overrides: Overrides, result: Path) -> TraceFile | None:
        """The trace with these fields and adapters; None: it is too late for them, or the process that waits is
        gone."""
        answer: Future[ForkEnded] = Future()
        request = ForkRequest(str(result), overrides)
        with self._lock:
            self._answers[str(result)] = answer
            try:
                self._socket.sendall(wire.written(request).encode() + b"\n")
            except OSError:
                return None
        try:
            ended = answer.result()
        except ConnectionError:
            return None
        return None if ended.too_late else _file(result, ended.died)

    def _listen(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            for line in self._lines:
                answer = wire.read(ForkEnded, line.decode())
                self._answers.pop(answer.result).set_result(answer)
        with self._lock:
            for each in self._answers.values():
                each.set_exception(ConnectionError())

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
