"""One training under the callback, from its first event to its end, however it ends. In: Trainer's state and objects.
Out: records, log keys, advice on an exception, the report.

A script may catch what training raised and go on, or leave by `sys.exit`; nobody is told then. Without a word in the
file a report would take that training for one that still runs, or was killed. So the word is written when the training
is gone: its recorder collected, its file taken over by the next training, or the interpreter shut down in order.
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
from hf_memkit.measuring.memory.readers.base import MemoryReader
from hf_memkit.measuring.memory.recorder import RunRecorder
from hf_memkit.measuring.memory.records import RecordWriter
from hf_memkit.measuring.memory.snapshot import record_history, stop_history
from hf_memkit.measuring.record_types import Status
from hf_memkit.measuring.report.answer import PAGE, text_report, write_page
from hf_memkit.measuring.report.load import Run, load_run

_NOT_RECORDED: Final = "recording stopped before training ended: the callback was closed, or another one replaced it"

_WHAT_IS_KNOWN: Final = {
    "status": "failed",
    "error": "training stopped early: the script caught an exception, or called exit",
}

_INTERRUPTED: Final = {"status": "interrupted", "error_type": "KeyboardInterrupt"}

_open: dict[Path, weakref.finalize[Any, Any]] = {}
"""The training that each file is waiting for. A file never has two: `end` would end the wrong one."""

_WIDEST: Final = 120
"""Characters of the summary."""

_OTHERS_S: Final = 1.0
"""How long a rank that ran out of memory waits for the records of others: most often all do in the same step."""


@dataclass(frozen=True)
class CallbackOptions:
    """What the user gave the callback; see there."""

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
    """One training. The callback makes one at each `on_train_begin`, and calls it through `barrier`."""

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
        """It has ended, or another callback has taken over its model."""
        return self.ended or self.recorder.superseded

    def begin(self, callback: object, model: Any, optimizer: Any, *, engine: Any, before: Training | None) -> None:
        """Writes the `run` record and begins to listen. `engine` wraps the model; `before`: the last training here."""
        extra: dict[str, Any] = {"facts": dict(self._options.run_facts)} if self._options.run_facts else {}
        if self._options.prediction is not None:
            extra["prediction"] = dict(self._options.prediction)
        if engine is not None:
            extra["engine"] = type(engine).__name__
        self._ooms_before = self.recorder.readers.read().get("allocator_ooms", 0)
        left = self._barrier.call("after oom", self._after_oom, before) if before is not None else None
        if left:
            extra |= {"after_oom": left, "train_batch_size": self._state.train_batch_size}
        path = self.recorder.writer.path
        # With auto_find_batch_size it is the same training that begins again, and no end.
        settle(path, ended=bool(left and before is not None and self._begins_again(before._state)))
        self.recorder.train_begin(self._state, model, optimizer, extra)
        self._watch = ExceptionWatch(callback, self._raised)
        expect_end(self.recorder, self.recorder.writer, self._watch)
        self._watch.start()
        self._ranks = self._barrier.call("ranks", join_ranks)
        if self._options.oom_snapshot and torch.cuda.is_available():
            self._barrier.call("snapshot", self._remember_blocks)

    def log(self, recorder: RunRecorder, state: Any, logs: dict[str, Any] | None) -> None:
        """Adds to what a training step logs. Not to other logs: of each key in those of an evaluation, Trainer makes a
        column of its model card."""
        if logs is None or "loss" not in logs:
            return
        numbers = recorder.log_numbers()
        if self._ranks is not None:
            self._ranks.publish(state.global_step, numbers)
            numbers |= over_ranks(numbers, self._ranks.heard(), since_step=self._logged_at)
        self._logged_at = state.global_step
        if state.is_world_process_zero and self._options.log != "none":
            add_to_log(numbers, logs, state)

    def finish(self) -> None:
        """Training has come to its end."""
        if self.ended:
            return
        if self.recorder.superseded:
            self.recorder.writer.write("end", {"status": "interrupted", "error": _NOT_RECORDED})
        else:
            status: Status = "interrupted" if self.interrupted else "finished"
            self._barrier.call("end", self.recorder.end, status)
        self._end(show=not self.recorder.superseded)

    def close(self) -> None:
        """Takes everything away that reaches into the model, the process or other ranks. Safe to repeat."""
        if self._watch is not None:
            self._watch.stop()
        if self._ranks is not None:
            self._barrier.call("ranks", self._ranks.close)
        if self._snapshot:
            self._barrier.call("snapshot", stop_history)
            self._snapshot = False
        self._barrier.call("close", self.recorder.close)

    def _raised(self, error: BaseException) -> None:
        """Training has ended with this exception."""
        if self.silent:
            return
        step, barrier = self._state.global_step, self._barrier
        self.advice = barrier.call(
            "exception",
            record_exception,
            error,
            self.recorder,
            barrier,
            global_step=step,
            snapshot=self._snapshot,
            ctrl_c=self._watch is not None and self._watch.ctrl_c,
        )
        if self.advice is not None:
            self._barrier.call("note", add_note, error, self.advice)
        self._end(show=self.advice is not None)

    def _end(self, *, show: bool) -> None:
        """The `end` record has been written, if there was room for it anywhere."""
        path = self.recorder.writer.path
        if self.recorder.writer.owed is None:
            settle(path, ended=True)
        self.close()
        self.ended = True
        if show and path.exists() and (self._state.is_world_process_zero or self._barrier.call("ranks", self._speaks)):
            self._show(path.parent)

    def _show(self, folder: Path) -> None:
        if not (self._options.html or self._options.summary):
            return
        run = self._barrier.call("records", load_run, folder)
        if run is not None and self._options.html:
            self._barrier.call("page", write_page, run, folder / PAGE)
        if run is not None and self._options.summary:
            self._barrier.call("summary", _print_summary, run, on_stderr=self._options.summary == "stderr")

    def _speaks(self) -> bool:
        """Whether this rank, not the first, reports: it ran out of memory, and none before it did. Those then wait for
        gradients that never come, or die of that; the launcher ends them when this process is gone."""
        if self.advice is None or not (self._options.html or self._options.summary):
            return False
        time.sleep(_OTHERS_S)
        folder, rank = self.recorder.writer.path.parent, self._args.process_index
        return not any(other.ooms and other.rank < rank for other in load_run(folder).ranks)

    def _remember_blocks(self) -> None:
        record_history()  # raises with an allocator that has no history, such as cudaMallocAsync's
        self._snapshot = True

    def _begins_again(self, state_before: Any) -> bool:
        smaller = (self._state.train_batch_size or 0) < (state_before.train_batch_size or 0)
        return bool(self._args.auto_find_batch_size) and smaller

    def _after_oom(self, before: Training) -> dict[str, Any] | None:
        """What is known of a caught out-of-memory error that ended the training before this one: by a smaller batch
        (accelerate 1.15: utils/memory.py, `find_executable_batch_size`, which catches no other error), or by the
        allocator's own count."""
        state = before._state
        if before.ended or not (self._begins_again(state) or self._ooms_before > before._ooms_before):
            return None
        return {
            "step": state.global_step + 1,
            "phase": before.recorder.tracker.phase,
            "train_batch_size": state.train_batch_size,
        }


def expect_end(recorder: object, writer: RecordWriter, watch: ExceptionWatch) -> None:
    """From now on the file of `writer` has an `end` to come; `watch` is stopped with the training of `recorder`."""
    settle(writer.path, ended=False)
    _open[writer.path] = weakref.finalize(recorder, _write_end, writer, watch, os.getpid())


def settle(path: Path, *, ended: bool) -> None:
    """The training in `path`, if there is one, has `ended`; one that has not is written down as broken off."""
    waiting = _open.pop(path, None)
    if waiting is None:
        return
    if ended:
        waiting.detach()
    else:
        waiting()


def _write_end(writer: RecordWriter, watch: ExceptionWatch, process: int) -> None:
    _open.pop(writer.path, None)
    if process == os.getpid():
        watch.stop()
    # A forked process has a copy of everything; and a folder that somebody removed is not made anew for this.
    if process == os.getpid() and writer.path.exists():
        writer.write("end", writer.owed or (_INTERRUPTED if watch.ctrl_c else _WHAT_IS_KNOWN))
        writer.close()


def _print_summary(run: Run, *, on_stderr: bool) -> None:
    """Prints the summary, which names the page if there is one."""
    from tqdm.auto import tqdm  # type: ignore[import-untyped]

    width = min(shutil.get_terminal_size((100, 24)).columns, _WIDEST)
    stream = sys.stderr if on_stderr else sys.stdout
    # A plain print would land in the middle of a progress bar; in a file the bar's line is not overwritten.
    behind_a_bar = bool(getattr(tqdm, "_instances", ())) and not stream.isatty()
    tqdm.write("\n" * behind_a_bar + text_report(run, width), stream)
