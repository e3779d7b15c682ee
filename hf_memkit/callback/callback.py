"""The callback that adds memory to an existing Trainer. In: Trainer's events. Out: records and log keys.

```python
trainer = Trainer(…, callbacks=[MemoryReportCallback()])   # records, console, trainer_state.json
attach(trainer)                                            # instead: TensorBoard and others see the keys too
```
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Concatenate, ParamSpec

from transformers import TrainerCallback

from hf_memkit.memory.guard import Guard
from hf_memkit.memory.readers import MemoryReader
from hf_memkit.memory.recorder import RunRecorder
from hf_memkit.terms import Phase

__all__ = ["MemoryReportCallback", "attach"]

P = ParamSpec("P")


class MemoryReportCallback(TrainerCallback):  # type: ignore[misc]  # transformers' types are not followed
    """Records memory at every optimizer step, evaluation and save of a Trainer.

    It never raises into training, never changes results and never synchronises the device. What goes wrong in it is
    counted, logged once, and reported in the `end` record.

    Args:
        output_dir: folder of the records; default: the Trainer's `output_dir`.
        phases: tell the phases of a step apart. This resets torch's peak counter
            (`torch.cuda.reset_peak_memory_stats`) at each boundary, so that others who read
            `torch.cuda.max_memory_allocated` see the peak of a phase; `phases=False` leaves the counter alone, and
            the peaks are then those since the process began.
        run_facts: plain data for the `run` record, under `facts`.
        readers: where counters come from; default: this machine's.
    """

    def __init__(
        self,
        output_dir: str | Path | None = None,
        *,
        phases: bool = True,
        run_facts: Mapping[str, Any] | None = None,
        readers: Sequence[MemoryReader] | None = None,
    ) -> None:
        self._output_dir = Path(output_dir) if output_dir is not None else None
        self._phases = phases
        self._run_facts = dict(run_facts or {})
        self._given_readers = readers
        self._guard = Guard()
        self._interrupted = False
        self._recorder: RunRecorder | None = None
        self._trainer: weakref.ref[Any] | None = None

    @property
    def callback_errors(self) -> int:
        """How often measuring has gone wrong in the current or last training."""
        return self._guard.count

    @property
    def path(self) -> Path | None:
        """The file of the current or last training."""
        return self._recorder.writer.path if self._recorder is not None else None

    @property
    def phase(self) -> Phase | None:
        """What training is doing now; after an exception, what it was doing then."""
        return self._recorder.tracker.phase if self._recorder is not None else None

    def mark_interrupted(self) -> None:
        """The training is being stopped early: its `end` record will say so."""
        self._interrupted = True

    def write_record(self, kind: str, fields: Mapping[str, Any]) -> bool:
        """Adds a record of another kind (an OOM, say) to the file of the current or last training."""
        return self._recorder is not None and self._recorder.writer.write(kind, fields)

    def close(self) -> None:
        """Takes the hooks off the model after a training that raised; else training's end has done it."""
        if self._recorder is not None:
            self._guard.call("close", RunRecorder.close, self._recorder)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.close()  # auto_find_batch_size begins again without an end; so does a training after one that raised
        self._guard, self._recorder, self._interrupted = Guard(), None, False
        self._guard.call("on_train_begin", self._begin, args, state, kwargs)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._tell("on_step_begin", RunRecorder.step_begin)

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._tell("on_substep_end", RunRecorder.substep_end)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._tell("on_pre_optimizer_step", RunRecorder.pre_optimizer_step, **_model_and_optimizer(kwargs))

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._tell("on_optimizer_step", RunRecorder.optimizer_step, **_model_and_optimizer(kwargs))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._tell("on_step_end", RunRecorder.step_end, state)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self._tell("on_log", RunRecorder.log, state, logs)

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._tell("on_prediction_step", RunRecorder.prediction_step)

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
        self._tell("on_evaluate", RunRecorder.evaluate, state, metrics)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._tell("on_save", RunRecorder.save, state)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        status = "interrupted" if self._interrupted else "finished"
        self._tell("on_train_end", RunRecorder.train_end, state, kwargs.get("optimizer"), status)
        self.close()

    def _begin(self, args: Any, state: Any, kwargs: Mapping[str, Any]) -> None:
        folder = self._output_dir if self._output_dir is not None else Path(args.output_dir)
        self._recorder = RunRecorder(folder, args, self._guard, phases=self._phases, readers=self._given_readers)
        extra: dict[str, Any] = {"facts": self._run_facts} if self._run_facts else {}
        trainer = self._trainer() if self._trainer is not None else None
        if trainer is not None:
            extra["engine"] = type(trainer.model_wrapped).__name__
        self._recorder.train_begin(state, kwargs["model"], kwargs.get("optimizer"), extra)

    def _tell(
        self,
        event: str,
        method: Callable[Concatenate[RunRecorder, P], None],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> None:
        """Has the recorder do its part, unless it has ended or another one has taken over."""
        if self._recorder is not None and not self._recorder.superseded:
            self._guard.call(event, method, self._recorder, *args, **kwargs)


def _model_and_optimizer(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    return {"model": kwargs.get("model"), "optimizer": kwargs.get("optimizer")}


def attach(trainer: Any, **kwargs: Any) -> MemoryReportCallback:
    """Adds a MemoryReportCallback in front of the Trainer's other callbacks, replacing one that is there.

    In front, because dashboards are told in order: what comes after them reaches none of them. `kwargs` are those of
    MemoryReportCallback.
    """
    callback = MemoryReportCallback(**kwargs)
    callback._trainer = weakref.ref(trainer)
    callbacks = trainer.callback_handler.callbacks
    callbacks[:] = [callback, *(other for other in callbacks if not isinstance(other, MemoryReportCallback))]
    return callback
