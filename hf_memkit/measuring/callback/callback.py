"""The callback that measures memory in an existing Trainer: records, log keys and a report from Trainer's events.

```python
trainer = Trainer(…, callbacks=[MemoryReportCallback()])   # records, report, console, trainer_state.json
attach(trainer)                                            # instead: the numbers also reach TensorBoard and others
```
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Concatenate, Literal, ParamSpec, Protocol

from transformers import TrainerCallback

from hf_memkit.common.errors import SettingError, did_you_mean
from hf_memkit.common.terms import Phase
from hf_memkit.components.resuming import restores_all_weights
from hf_memkit.measuring.callback.dashboard import LOG, Log
from hf_memkit.measuring.callback.lost_weights import resumed_checkpoint, why_not_resumed, why_not_the_best
from hf_memkit.measuring.callback.one_training import CallbackOptions, Training
from hf_memkit.measuring.callback.oom_note import OomNote
from hf_memkit.measuring.memory.error_barrier import ErrorBarrier
from hf_memkit.measuring.memory.readers.base import MemoryReader
from hf_memkit.measuring.memory.recorder import RunRecorder

P = ParamSpec("P")


class PredictionLike(Protocol):
    """A prediction, which this module does not import."""

    def to_json(self) -> dict[str, Any]: ...


_logger = logging.getLogger(__name__)


class MemoryReportCallback(TrainerCallback):  # type: ignore[misc]  # transformers' types are not followed
    """Records memory at every optimizer step, evaluation and save of a Trainer, and reports it when training ends.

    The callback never raises into training, changes no results and never synchronises the device. It counts its own
    errors, logs the first and reports the count in the `end` record.

    When training runs out of memory, the callback records that moment and adds a note with the most useful changes to
    the exception, which continues unchanged. Python reports only uncaught exceptions to the callback: in a notebook,
    or inside a `try`, write `with oom_advice(): trainer.train()`.

    A copied or pickled callback is a new one with the same options.

    Args:
        output_dir: folder of the records. Default: the Trainer's `output_dir`.

    The other options are those of MemoryReportCallback.

    Raises:
        SettingError: `log` is not `"few"`, `"all"` or `"none"`.
    """

    def __init__(
        self,
        output_dir: str | Path | None = None,
        *,
        phases: bool = True,
        log: Log = "few",
        summary: bool | Literal["stderr"] = True,
        html: bool = True,
        oom_snapshot: bool = False,
        run_facts: Mapping[str, Any] | None = None,
        readers: Sequence[MemoryReader] | None = None,
        prediction: Mapping[str, Any] | PredictionLike | None = None,
    ) -> None:
        if log not in LOG:
            known = ", ".join(repr(name) for name in LOG)
            close = did_you_mean(str(log), LOG)
            raise SettingError(f"MemoryReportCallback(log={log!r}): unknown value. Write one of {known}{close}")
        if prediction is not None and not isinstance(prediction, Mapping):
            prediction = prediction.to_json()
        self._options = CallbackOptions(
            output_dir, phases, log, summary, html, oom_snapshot, dict(run_facts or {}), readers, prediction
        )
        self._barrier = ErrorBarrier()
        self._training: Training | None = None
        self._trainer: weakref.ref[Any] | None = None
        self._warned_about_dashboards = False

    def __getstate__(self) -> dict[str, Any]:
        return {"_options": self._options}

    def __setstate__(self, state: dict[str, Any]) -> None:
        MemoryReportCallback.__init__(self)
        self.__dict__.update(state)

    @property
    def callback_errors(self) -> int:
        """Number of errors in the callback's own measuring, in the current or last training."""
        return self._barrier.count

    @property
    def path(self) -> Path | None:
        """The records file of the current or last training."""
        return self._training.recorder.writer.path if self._training is not None else None

    @property
    def phase(self) -> Phase | None:
        """The phase of training now; after an exception, the phase in which it was raised."""
        return self._training.recorder.tracker.phase if self._training is not None else None

    @property
    def advice(self) -> OomNote | None:
        """The note on the out-of-memory error that ended the last training; None without such an error."""
        return self._training.advice if self._training is not None else None

    def mark_interrupted(self) -> None:
        """Marks the training as interrupted in its `end` record."""
        if self._training is not None:
            self._training.interrupted = True

    def close(self) -> None:
        """Removes all hooks. Needed only after a training that raised; safe to repeat."""
        if self._training is not None:
            self._barrier.call("close", self._training.close)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.close()  # auto_find_batch_size, or a training after one that raised, starts without an end
        previous = self._training
        self._training = None
        self._barrier = ErrorBarrier()
        trainer = self._trainer() if self._trainer is not None else None
        callbacks = trainer.callback_handler.callbacks if trainer is not None else ()
        if any(isinstance(other, MemoryReportCallback) and other is not self for other in callbacks):
            return  # two would reset each other's counters
        self._barrier.call("on_train_begin", self._begin, args, state, kwargs, previous)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._record_event("on_step_begin", lambda recorder: recorder.tracker.step_begin())

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._record_event("on_substep_end", RunRecorder.substep_end)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._record_event("on_pre_optimizer_step", lambda recorder: recorder.tracker.pre_optimizer_step())

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._record_event("on_optimizer_step", RunRecorder.optimizer_step, kwargs.get("optimizer"))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._record_event("on_step_end", RunRecorder.step_end, state)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if self._training is not None:
            self._record_event("on_log", self._training.log, state, logs)

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._record_event("on_prediction_step", lambda recorder: recorder.tracker.prediction_step())

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
        self._record_event("on_evaluate", RunRecorder.evaluate, state, metrics)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._record_event("on_save", RunRecorder.save, state)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._training is not None:
            self._barrier.call("on_train_end", self._training.finish)
        self.close()

    def _begin(self, args: Any, state: Any, kwargs: Mapping[str, Any], previous: Training | None) -> None:
        self._training = Training(self._options, self._barrier, args, state)
        self._barrier.call("dashboards", self._warn_about_dashboards, args, state)
        trainer = self._trainer() if self._trainer is not None else None
        if state.is_world_process_zero and not restores_all_weights(trainer):
            self._barrier.call("lost weights", self._warn_about_lost_weights, args, state, kwargs["model"])
        engine = trainer.model_wrapped if trainer is not None else None
        self._training.begin(self, kwargs["model"], kwargs.get("optimizer"), engine=engine, previous=previous)

    def _warn_about_lost_weights(self, args: Any, state: Any, model: Any) -> None:
        """Warn if Trainer has resumed, or will load its best model, without all weights."""
        checkpoint = resumed_checkpoint(args, state)
        sentences = [why_not_resumed(model, checkpoint)] if checkpoint is not None else []
        for sentence in (*sentences, why_not_the_best(model, args)):
            if sentence:
                _logger.warning("memkit: %s", sentence)

    def _warn_about_dashboards(self, args: Any, state: Any) -> None:
        """Warn once that a callback passed to a Trainer runs after its integrations."""
        is_attached = self._trainer is not None
        if is_attached or self._warned_about_dashboards or self._options.log == "none" or not args.report_to:
            return
        self._warned_about_dashboards = True
        if state.is_world_process_zero:
            _logger.warning(
                "memkit: memory numbers do not reach %s, which runs before this callback; the console, "
                "trainer_state.json and the report have them. To add them, remove callbacks=[MemoryReportCallback()] "
                "and, after you create the Trainer, write `attach(trainer)` (from hf_memkit import attach)",
                " and ".join(args.report_to),
            )

    def _record_event(
        self, event: str, method: Callable[Concatenate[RunRecorder, P], object], *args: P.args, **kwargs: P.kwargs
    ) -> None:
        """Call the recorder, unless the training has ended or another callback records it."""
        training = self._training

        def record() -> None:
            if training is not None and not training.silent:
                method(training.recorder, *args, **kwargs)

        self._barrier.call(event, record)


def attach(
    trainer: Any,
    output_dir: str | Path | None = None,
    *,
    phases: bool = True,
    log: Log = "few",
    summary: bool | Literal["stderr"] = True,
    html: bool = True,
    oom_snapshot: bool = False,
    run_facts: Mapping[str, Any] | None = None,
    readers: Sequence[MemoryReader] | None = None,
    prediction: Mapping[str, Any] | PredictionLike | None = None,
) -> MemoryReportCallback:
    """Adds and returns a MemoryReportCallback that runs before other callbacks: its numbers reach the dashboards.

    Trainer runs callbacks in order, and a dashboard sees only what callbacks before it have logged. A
    MemoryReportCallback that the Trainer already has is replaced; if all options here are defaults, it keeps its own
    options and moves to the front.

    Args:
        trainer: a `transformers.Trainer` or a subclass.
        output_dir: folder of the records. Default: the Trainer's `output_dir`.
        phases: measure each phase of a step, which resets torch's peak counter.
        log: numbers under `memory/` in the logs: `"few"`, `"all"` or `"none"`.
        summary: print a summary at the end; `"stderr"`: on standard error.
        html: write `memory-report.html` to the folder of the records.
        oom_snapshot: write the allocator's blocks when memory runs out. Costs time at every allocation.
        run_facts: plain data for the `run` record, under `facts`.
        readers: sources of the counters. Default: this machine's.
        prediction: a prediction for this training, which the report compares with the measurements.

    Raises:
        SettingError: `log` is not `"few"`, `"all"` or `"none"`.
    """
    callback = MemoryReportCallback(
        output_dir, phases=phases, log=log, summary=summary, html=html, oom_snapshot=oom_snapshot,
        run_facts=run_facts, readers=readers, prediction=prediction,
    )  # fmt: skip
    callbacks = trainer.callback_handler.callbacks
    existing = [other for other in callbacks if isinstance(other, MemoryReportCallback)]
    if existing and callback._options == MemoryReportCallback()._options:
        callback = existing[-1]
    callback._trainer = weakref.ref(trainer)
    callbacks[:] = [callback, *(other for other in callbacks if not isinstance(other, MemoryReportCallback))]
    return callback
