"""What stands below `train()` in a script: an evaluation, adapters that are merged, the final save. It goes on as it
did above, with parameters that are shapes, and its allocations are stretches of the same trace.

By then losses and metrics are made up (NaN), so that nothing may come of them (`leaves_nothing.py`). An evaluation
traces the worst batches, once. Where the script asks for values, trains again, raises, or would leave something
behind, it ends, and a note names the line.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from typing import Any, Final, NoReturn

from transformers import Trainer
from transformers.trainer_utils import TrainOutput

from hf_memkit.prediction.child.evaluations import EvaluationCall, Evaluations, Metrics, without_values
from hf_memkit.prediction.child.leaves_nothing import Ended, Nowhere, with_subclasses
from hf_memkit.prediction.child.library_evaluations import LibraryEvaluations
from hf_memkit.prediction.child.real_and_fake import RealAndFake
from hf_memkit.prediction.child.tracer import StorageTracer
from hf_memkit.prediction.child.users_code import line_of
from hf_memkit.terms import Phase

_LIMIT_S: Final = 60
"""For what stands below `train()`."""

_NAN: Final = float("nan")


class Stretches:
    """Phases after the steps: `after`, and others within it."""

    def __init__(self, tracer: StorageTracer) -> None:
        self._tracer = tracer
        self._phase: Phase = "after"

    @contextlib.contextmanager
    def of(self, phase: Phase) -> Iterator[None]:
        """Within it everything belongs to `phase`, which is in the trace even if nothing is made."""
        outer, self._phase = self._phase, phase
        self.end(outer)
        try:
            yield
        finally:
            self._tracer.ended(phase)
            self._phase = outer

    def end(self, phase: Phase = "after") -> None:
        """What has happened since the last boundary was `phase`, if anything was made."""
        marks, events = self._tracer.trace.marks, self._tracer.trace.events
        done, before = marks[-1]
        self._tracer.ended(phase if any(event > 0 for event in events[done:]) else before, on_host=phase)


class AfterTrain:
    """From the first `train()` to the script's end.

    Args:
        tracer: goes on recording.
        boundary: what is real and what is fake; None: all is real, and what is written is written.
        evaluations: of the script.
        nowhere: where what is written comes to lie; nothing does without a boundary.
    """

    def __init__(
        self,
        tracer: StorageTracer,
        boundary: RealAndFake | None,
        evaluations: Evaluations,
        nowhere: Nowhere,
    ) -> None:
        self._tracer, self._boundary, self._evaluations = tracer, boundary, evaluations
        self._stretches = Stretches(tracer)
        self.nowhere = nowhere
        self.library: LibraryEvaluations | None = None

    def begin(self, trainer: Any) -> TrainOutput:
        """What `train()` gives. From here on the script is on its own."""
        self._tracer.default = "other"
        self._name_phases()
        self._enter()
        if self._boundary is not None:
            self.nowhere.install()
            _limited()
        steps = trainer.args.max_steps if trainer.args.max_steps > 0 else trainer.state.global_step
        names = ("train_runtime", "train_samples_per_second", "train_steps_per_second", "total_flos", "train_loss")
        return TrainOutput(steps, _NAN, Metrics(dict.fromkeys((*names, "epoch"), _NAN)))

    def own_loop(self) -> NoReturn:
        """Where the script trains by itself."""
        raise Ended("a training loop of the script is not predicted")

    def end(self, error: BaseException | None) -> Iterator[str]:
        """Notes on what was left out."""
        signal.setitimer(signal.ITIMER_REAL, 0)
        self._stretches.end()
        if self._boundary is None:
            self._leave()
        if Ended.all:  # the first, whatever the script made of it
            place, said = Ended.all[0]
        elif error is None or isinstance(error, SystemExit):
            return
        else:
            place, said = line_of(error.__traceback__), f"{type(error).__name__}: {error}"
        first = (said.strip().splitlines() or [""])[0][:200]
        yield f"code below train() is predicted up to {place or 'a line of a library'}: {first}"

    def _enter(self) -> None:
        if self._boundary is None:
            self._tracer.__enter__()
        else:
            self._boundary.enter_again()

    def _leave(self) -> None:
        if self._boundary is None:
            self._tracer.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        else:
            self._boundary.leave()

    def _traced(self) -> contextlib.AbstractContextManager[Any]:
        """As within the training: every tensor is fake, and values are made up."""
        return self._tracer if self._boundary is None else self._boundary.all_fake()

    def _name_phases(self) -> None:
        def again(*_: Any, **__: Any) -> None:
            raise Ended("a second train() is not predicted")

        self._evaluations.answer = self._evaluated
        if self.library is not None:
            self.library.phase = functools.partial(self._stretches.of, "evaluate")
        _put({"train": again})
        # What they write and say is made up.
        _put(dict.fromkeys(("create_model_card", "log_metrics", "save_metrics", "save_state"), _nothing))
        self._within(Trainer, "save_model", "save")
        tuners = _module("peft.tuners.tuners_utils")
        for kind in with_subclasses(*_savers()):
            self._within(kind, "save_pretrained", "save")
        for kind in with_subclasses(*([tuners.BaseTuner] if tuners is not None else [])):
            for name in ("merge_and_unload", "merge_adapter"):
                self._within(kind, name, "merge")

    def _evaluated(self, call: EvaluationCall) -> Any:
        with self._stretches.of("evaluate"):
            self._leave()
            try:
                with self._traced():
                    found = self._evaluations.trace(call)
            finally:
                self._enter()
        if call.name == "evaluate":
            return without_values(found)
        if self._boundary is None:
            self._leave()  # all batches, where the worst have been traced
            try:
                return call.run()
            finally:
                self._enter()
        raise Ended("predict() returns values, and a trace has none")

    def _within(self, kind: type, name: str, phase: Phase) -> None:
        method = vars(kind).get(name)
        if method is None:
            return

        @functools.wraps(method)
        def within(*args: Any, **kwargs: Any) -> Any:
            with self._stretches.of(phase):
                return method(*args, **kwargs)

        setattr(kind, name, within)


def _put(methods: Mapping[str, Any]) -> None:
    for name, method in methods.items():
        setattr(Trainer, name, method)


def _nothing(*args: Any, **kwargs: Any) -> None:
    pass


def _module(name: str) -> Any:
    """If it has been imported."""
    return sys.modules.get(name)


def _savers() -> list[type]:
    """Classes whose `save_pretrained` writes weights."""
    found = [_module("transformers.modeling_utils").PreTrainedModel]
    peft = _module("peft.peft_model")
    return [*found, peft.PeftModel] if peft is not None else found


def _limited() -> None:
    """The script ends after so many seconds, even where it hears no signal: the steps' result is written by then."""

    def late(*_: Any) -> None:
        raise Ended(f"it runs for more than {_LIMIT_S} s")

    if threading.current_thread() is threading.main_thread():  # no other hears signals
        signal.signal(signal.SIGALRM, late)
        signal.setitimer(signal.ITIMER_REAL, _LIMIT_S)
    watchdog = threading.Timer(_LIMIT_S + 10, os._exit, (0,))
    watchdog.daemon = True
    watchdog.start()
