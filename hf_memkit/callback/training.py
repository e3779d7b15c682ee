"""One training under the callback, from its first event to its end, however it ends. In: Trainer's state and objects.
Out: records, log keys, advice on an exception, the report.

The callback makes one of these at each `on_train_begin`, and calls it through the guard.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch

from hf_memkit.callback.closing import print_summary, write_page_beside
from hf_memkit.callback.dashboard import Log, add_to_log, over_ranks
from hf_memkit.callback.exception import record_exception
from hf_memkit.callback.oom_note import OomNote, add_note
from hf_memkit.callback.oom_watch import ExceptionWatch
from hf_memkit.callback.ranks import RankNumbers, join_ranks
from hf_memkit.callback.unfinished import expect_end, settle
from hf_memkit.memory.guard import Guard
from hf_memkit.memory.readers import MemoryReader
from hf_memkit.memory.recorder import RunRecorder
from hf_memkit.memory.snapshot import record_history, stop_history
from hf_memkit.record_types import Status
from hf_memkit.report import load_run

__all__ = ["Options", "Training"]

_NOT_RECORDED: Final = "recording stopped before training did: the callback was closed, or another one took over"

_OTHERS_S: Final = 1.0
"""How long a rank that ran out of memory waits for the records of others: most often all do in the same step."""


@dataclass(frozen=True)
class Options:
    """What the user gave the callback; see there."""

    output_dir: str | Path | None = None
    phases: bool = True
    log: Log = "few"
    summary: bool = True
    html: bool = True
    oom_snapshot: bool = False
    run_facts: Mapping[str, Any] = field(default_factory=dict)
    readers: Sequence[MemoryReader] | None = None
    prediction: Mapping[str, Any] | None = None


class Training:
    """One training.

    Args:
        options: the callback's.
        guard: wall to the training; it counts what goes wrong.
        args, state: Trainer's.
    """

    def __init__(self, options: Options, guard: Guard, args: Any, state: Any) -> None:
        folder = Path(options.output_dir or args.output_dir)
        self.recorder = RunRecorder(
            folder, args, guard, phases=options.phases, log_everything=options.log == "all", readers=options.readers
        )
        self.advice: OomNote | None = None
        self.interrupted = False
        self.ended = False
        self._options = options
        self._guard = guard
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
        """Writes the `run` record and begins to listen.

        Args:
            callback: through which this training's events come.
            model, optimizer: as in Trainer's events.
            engine: what wraps the model for training, where that is known.
            before: the last training of this callback.
        """
        extra: dict[str, Any] = {"facts": dict(self._options.run_facts)} if self._options.run_facts else {}
        if self._options.prediction is not None:
            extra["prediction"] = dict(self._options.prediction)
        if engine is not None:
            extra["engine"] = type(engine).__name__
        self._ooms_before = self._ooms()
        left = self._guard.call("after oom", self._after_oom, before) if before is not None else None
        if left:
            extra |= {"after_oom": left, "train_batch_size": self._state.train_batch_size}
        path = self.recorder.writer.path
        # With auto_find_batch_size it is the same training that begins again, and no end.
        settle(path, ended=bool(left and before is not None and self._begins_again(before._state)))
        self.recorder.train_begin(self._state, model, optimizer, extra)
        self._watch = ExceptionWatch(callback, self._raised)
        expect_end(self.recorder, self.recorder.writer, self._watch)
        self._watch.start()
        self._ranks = self._guard.call("ranks", join_ranks)
        if self._options.oom_snapshot and torch.cuda.is_available():
            self._guard.call("snapshot", self._remember_blocks)

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
            self._guard.call("end", self.recorder.end, status)
        self._end(show=not self.recorder.superseded)

    def close(self) -> None:
        """Takes everything away that reaches into the model, the process or other ranks. Safe to repeat."""
        if self._watch is not None:
            self._watch.stop()
        if self._ranks is not None:
            self._guard.call("ranks", self._ranks.close)
        if self._snapshot:
            self._guard.call("snapshot", stop_history)
            self._snapshot = False
        self._guard.call("close", self.recorder.close)

    def _raised(self, error: BaseException) -> None:
        """Training has ended with this exception."""
        if self.silent:
            return
        step, guard = self._state.global_step, self._guard
        self.advice = guard.call(
            "exception",
            record_exception,
            error,
            self.recorder,
            guard,
            global_step=step,
            snapshot=self._snapshot,
            ctrl_c=self._watch is not None and self._watch.ctrl_c,
        )
        if self.advice is not None:
            self._guard.call("note", add_note, error, self.advice)
        self._end(show=self.advice is not None)

    def _end(self, *, show: bool) -> None:
        """The `end` record has been written, if there was room for it anywhere."""
        path = self.recorder.writer.path
        if self.recorder.writer.owed is None:
            settle(path, ended=True)
        self.close()
        self.ended = True
        if show and path.exists() and (self._state.is_world_process_zero or self._guard.call("ranks", self._speaks)):
            if self._options.html:
                self._guard.call("page", write_page_beside, path.parent)
            if self._options.summary:
                self._guard.call("summary", print_summary, path.parent)

    def _speaks(self) -> bool:
        """Whether this rank, which is not the first, reports: it ran out of memory, and none of those before it did.

        They then wait for gradients that never come, or die of that; the launcher ends them when this process is gone.
        """
        if self.advice is None or not (self._options.html or self._options.summary):
            return False
        time.sleep(_OTHERS_S)
        folder, rank = self.recorder.writer.path.parent, self._args.process_index
        return not any(other.ooms and other.rank < rank for other in load_run(folder).ranks)

    def _remember_blocks(self) -> None:
        record_history()  # raises with an allocator that has no history, such as cudaMallocAsync's
        self._snapshot = True

    def _ooms(self) -> float:
        return self.recorder.readers.read().get("allocator_ooms", 0)

    def _begins_again(self, state_before: Any) -> bool:
        smaller = (self._state.train_batch_size or 0) < (state_before.train_batch_size or 0)
        return bool(self._args.auto_find_batch_size) and smaller

    def _after_oom(self, before: Training) -> dict[str, Any] | None:
        """What is known of an out-of-memory error that ended the training before this one and was caught.

        accelerate catches no other error for `auto_find_batch_size`, and begins again with a smaller batch (accelerate
        1.15: utils/memory.py, `find_executable_batch_size`). Elsewhere the allocator's own count tells.
        """
        state = before._state
        if before.ended or not (self._begins_again(state) or self._ooms_before > before._ooms_before):
            return None
        return {
            "step": state.global_step + 1,
            "phase": before.recorder.tracker.phase,
            "train_batch_size": state.train_batch_size,
        }
