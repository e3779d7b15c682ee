"""One training under the callback, from its first event to its end: records, log keys, advice on an exception, the
report.

A script may catch an exception of training and continue, or leave by `sys.exit`, without an event. Without an `end`
record a report would assume that the training still runs, or was killed. So the record is written when the training's
recorder is collected, its file is used by the next training, or the interpreter shuts down.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import torch

from hf_memkit.measuring.callback.dashboard import Log, add_to_log, over_ranks
from hf_memkit.measuring.callback.exception import record_exception
from hf_memkit.measuring.callback.numbers_of_ranks import RankNumbers, join_ranks
from hf_memkit.measuring.callback.oom_note import OomNote, add_note
from hf_memkit.measuring.callback.oom_watch import ExceptionWatch
from hf_memkit.measuring.memory.error_barrier import ErrorBarrier
from hf_memkit.measuring.memory.facts import is_fsdp2
from hf_memkit.measuring.memory.readers.base import MemoryReader
from hf_memkit.measuring.memory.recorder import RunRecorder
from hf_memkit.measuring.memory.records import RecordWriter
from hf_memkit.measuring.memory.snapshot import record_history, stop_history
from hf_memkit.measuring.record_types import Status
from hf_memkit.measuring.report.answer import PAGE, text_report, write_page
from hf_memkit.measuring.report.load import Run, load_run

_NOT_RECORDED: Final = "recording stopped before training ended: the callback was closed, or another one replaced it"

_EARLY: Final = "training stopped early: the script caught an exception, or called exit"
_STOPPED_EARLY: Final = {"status": "failed", "error": _EARLY}

_INTERRUPTED: Final = {"status": "interrupted", "error_type": "KeyboardInterrupt"}

_open: dict[Path, weakref.finalize[Any, Any]] = {}
"""File → the training whose `end` it waits for. A file never has two: `end` would belong to the wrong one."""

_WIDEST: Final = 120
"""Maximum width of the summary in characters."""

_OTHERS_S: Final = 1.0
"""Seconds that a rank waits for other ranks' records of an out-of-memory error: mostly all fail in the same step."""


@dataclass(frozen=True)
class CallbackOptions:
    """The options of MemoryReportCallback, under the same names."""

    output_dir: str | Path | None
    phases: bool
    log: Log
    summary: bool | Literal["stderr"]
    html: bool
    oom_snapshot: bool
    run_facts: Mapping[str, Any]
    readers: Sequence[MemoryReader] | None
    prediction: Mapping[str, Any] | None


class Training:
    """One training. The callback creates one at each `on_train_begin`, and calls it through `barrier`."""

    def __init__(self, options: CallbackOptions, barrier: ErrorBarrier, args: Any, state: Any) -> None:
        folder = Path(options.output_dir or args.output_dir)
        self.recorder = RunRecorder(
            folder, args, barrier, phases=options.phases, log_everything=options.log == "all", readers=options.readers
        )
        self.advice: OomNote | None = None
        self.interrupted = False
        self.ended = False
        self._options = options
        self._barrier = barrier
        self._args = args
        self._state = state
        self._logged_at: int = state.global_step
        self._ooms_before: float = 0
        self._watch: ExceptionWatch | None = None
        self._ranks: RankNumbers | None = None
        self._snapshot = False

    @property
    def silent(self) -> bool:
        """Whether it has ended, or another callback records its model."""
        return self.ended or self.recorder.superseded

    def begin(self, callback: object, model: Any, optimizer: Any, *, engine: Any, previous: Training | None) -> None:
        """Write the `run` record and start watching. `engine` wraps the model; `previous` is the training before."""
        extra: dict[str, Any] = {"facts": dict(self._options.run_facts)} if self._options.run_facts else {}
        if self._options.prediction is not None:
            extra["prediction"] = dict(self._options.prediction)
        if engine is not None and not is_fsdp2(engine):  # the model itself, whose facts name FSDP2
            extra["engine"] = type(engine).__name__
        self._ooms_before = self.recorder.readers.read().get("allocator_ooms", 0)
        after_oom = self._barrier.call("after oom", self._after_oom, previous) if previous is not None else None
        if after_oom:
            extra |= {"after_oom": after_oom, "train_batch_size": self._state.train_batch_size}
        path = self.recorder.writer.path
        # With auto_find_batch_size the same training starts again, without an end.
        close_open_file(path, ended=bool(after_oom and previous is not None and self._restarts(previous._state)))
        self.recorder.train_begin(self._state, model, optimizer, extra)
        self._watch = ExceptionWatch(callback, self._on_exception_raised)
        expect_end(self.recorder, self.recorder.writer, self._watch)
        self._watch.start()
        self._ranks = self._barrier.call("ranks", join_ranks)
        if self._options.oom_snapshot and torch.cuda.is_available():
            self._barrier.call("snapshot", self._record_blocks)

    def log(self, recorder: RunRecorder, state: Any, logs: dict[str, Any] | None) -> None:
        """Add numbers to a training step's log only: an evaluation's keys become columns of Trainer's model card."""
        if logs is None or "loss" not in logs:
            return
        numbers = recorder.log_numbers()
        if self._ranks is not None:
            self._ranks.publish(state.global_step, numbers)
            numbers |= over_ranks(numbers, self._ranks.latest(), since_step=self._logged_at)
        self._logged_at = state.global_step
        if state.is_world_process_zero and self._options.log != "none":
            add_to_log(numbers, logs, state)

    def finish(self) -> None:
        """End of training."""
        if self.ended:
            return
        if self.recorder.superseded:
            self.recorder.writer.write("end", {"status": "interrupted", "error": _NOT_RECORDED})
        else:
            status: Status = "interrupted" if self.interrupted else "finished"
            self._barrier.call("end", self.recorder.end, status)
        self._end(show=not self.recorder.superseded)

    def close(self) -> None:
        """Remove everything from the model, the process and other ranks. Safe to repeat."""
        if self._watch is not None:
            self._watch.stop()
        if self._ranks is not None:
            self._barrier.call("ranks", self._ranks.close)
        if self._snapshot:
            self._barrier.call("snapshot", stop_history)
            self._snapshot = False
        self._barrier.call("close", self.recorder.close)

    def _on_exception_raised(self, error: BaseException) -> None:
        """Record the exception that ended training."""
        if self.silent:
            return
        self.advice = self._barrier.call(
            "exception",
            record_exception,
            error,
            self.recorder,
            self._barrier,
            global_step=self._state.global_step,
            snapshot=self._snapshot,
            ctrl_c=self._watch is not None and self._watch.ctrl_c,
        )
        if self.advice is not None:
            self._barrier.call("note", add_note, error, self.advice)
        self._end(show=self.advice is not None)

    def _end(self, *, show: bool) -> None:
        """Close the training and report it, after its `end` record."""
        path = self.recorder.writer.path
        if self.recorder.writer.owed is None:
            close_open_file(path, ended=True)
        self.close()
        self.ended = True
        if not show or not path.exists() or not (self._options.html or self._options.summary):
            return
        if not self._state.is_world_process_zero and not self._barrier.call("ranks", self._is_first_to_report):
            return
        run = self._barrier.call("records", load_run, path.parent)
        if run is not None and self._options.html:
            self._barrier.call("page", write_page, run, path.parent / PAGE)
        if run is not None and self._options.summary:
            self._barrier.call("summary", _print_summary, run, on_stderr=self._options.summary == "stderr")

    def _is_first_to_report(self) -> bool:
        """Whether this rank, not rank 0, reports: it ran out of memory, and no lower rank did. Lower ranks then wait
        for gradients, or fail because of that; the launcher ends them when this process ends."""
        if self.advice is None:
            return False
        time.sleep(_OTHERS_S)
        ranks = load_run(self.recorder.writer.path.parent).ranks
        return not any(other.ooms and other.rank < self._args.process_index for other in ranks)

    def _record_blocks(self) -> None:
        record_history()  # raises with an allocator that has no history, such as cudaMallocAsync's
        self._snapshot = True

    def _restarts(self, state_before: Any) -> bool:
        smaller = (self._state.train_batch_size or 0) < (state_before.train_batch_size or 0)
        return bool(self._args.auto_find_batch_size) and smaller

    def _after_oom(self, previous: Training) -> dict[str, Any] | None:
        """Facts about a caught out-of-memory error that ended the previous training. A smaller batch shows it
        (accelerate 1.15: `find_executable_batch_size` catches no other error), or the allocator's count."""
        state = previous._state
        if previous.ended or not (self._restarts(state) or self._ooms_before > previous._ooms_before):
            return None
        phase = previous.recorder.tracker.phase
        return {"step": state.global_step + 1, "phase": phase, "train_batch_size": state.train_batch_size}


def expect_end(recorder: object, writer: RecordWriter, watch: ExceptionWatch) -> None:
    """Register that the file of `writer` needs an `end`; `watch` is stopped when `recorder` is collected."""
    close_open_file(writer.path, ended=False)
    _open[writer.path] = weakref.finalize(recorder, _write_end, writer, watch, os.getpid())


def close_open_file(path: Path, *, ended: bool) -> None:
    """Close the training in `path`, if any; without `ended`, write its `end` record."""
    finalizer = _open.pop(path, None)
    if finalizer is None:
        return
    if ended:
        finalizer.detach()
    else:
        finalizer()


def _write_end(writer: RecordWriter, watch: ExceptionWatch, process: int) -> None:
    _open.pop(writer.path, None)
    if process == os.getpid():
        watch.stop()
    # Not in a forked process, which has a copy of everything, and not in a removed folder.
    if process == os.getpid() and writer.path.exists():
        writer.write("end", writer.owed or (_INTERRUPTED if watch.ctrl_c else _STOPPED_EARLY))
        writer.close()


def _print_summary(run: Run, *, on_stderr: bool) -> None:
    """Print the summary, with the page's name if there is one."""
    from tqdm.auto import tqdm  # type: ignore[import-untyped]

    width = min(shutil.get_terminal_size((100, 24)).columns, _WIDEST)
    stream = sys.stderr if on_stderr else sys.stdout
    # A plain print would break a progress bar; in a file the bar's line is not overwritten.
    behind_a_bar = bool(getattr(tqdm, "_instances", ())) and not stream.isatty()
    tqdm.write("\n" * behind_a_bar + text_report(run, width), stream)
