"""Evaluations of a script: the largest batches are traced, beside the predictions that Trainer keeps of all others
(`kept_predictions.py`), by the script's own method, if it has one, and Trainer's own loop.

| the script evaluates | what happens |
|---|---|
| above `train()` | it is made after the steps, with the optimizer's states, and gives NaN |
| within it, because its arguments ask for it | it is made after the steps |
| below it, by its source (`below_train.py`) | Trainer's `eval_dataset` is evaluated after the steps |
| not at all | the same, and it does not decide the verdict |
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.utils._python_dispatch import _disable_current_modes
from transformers import Trainer
from transformers.trainer_utils import EvalLoopOutput, PredictionOutput, has_length

from hf_memkit.common.errors import Unmodelled
from hf_memkit.common.units import format_size
from hf_memkit.prediction.child.training.batches import chosen_batches, first_batches
from hf_memkit.prediction.child.training.kept_predictions import Kept, as_of_more_batches
from hf_memkit.prediction.child.training.row_sizes import elements
from hf_memkit.prediction.child.training.traced_batches import Batches, Loader, is_traced, on_host
from hf_memkit.prediction.child.users_code import line_of

_EVALUATED: Final = 2
_NAN: Final = float("nan")


def is_asked_for(strategy: Any) -> bool:
    """Of `eval_strategy` or `save_strategy`: whether there is one."""
    return str(getattr(strategy, "value", strategy)) != "no"


def largest_batch(loader: Any, *, worst: bool) -> Any:
    """A batch of a loader: the one that needs most, or the first."""
    loader = on_host(loader)
    return chosen_batches(loader).worst if worst else first_batches(loader, 1)[0]


@dataclass(frozen=True, slots=True)
class EvaluationCall:
    """An `evaluate()` or `predict()`, called `name`: the function itself, of the Trainer's own class, and its
    arguments."""

    name: str
    method: Callable[..., Any]
    trainer: Any
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] | None = None

    def unknown(self) -> Any:
        """What it gives, as long as nobody looks."""
        prefix = (self.kwargs or {}).get("metric_key_prefix", "eval" if self.name == "evaluate" else "test")
        metrics = Metrics({f"{prefix}_loss": _NAN})
        return metrics if self.name == "evaluate" else PredictionOutput(_Unread(), _Unread(), metrics)


def own_evaluation(trainer: Any) -> EvaluationCall:
    """As the training itself makes it, of all of the Trainer's `eval_dataset`."""
    return EvaluationCall("evaluate", type(trainer).evaluate, trainer)


class Metrics(dict[str, float]):
    """Whatever is asked for is not known."""

    def __missing__(self, name: str) -> float:
        return _NAN


class _Unread:
    """Predictions that nobody has made."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name not in ("__array__", "__array_interface__", "__array_struct__"):
            raise AttributeError(name)
        raise Unmodelled(
            "the script reads the predictions of an evaluation above train(), and a trace has no values; "
            "leave that evaluation out (--do_predict False, or an `if`), or measure with memkit run"
        )

    def __getitem__(self, key: Any) -> Any:
        return self.__array__[key]

    def __len__(self) -> int:
        return int(self.__array__)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.__array__)


def without_values(found: Any) -> Any:
    """What an evaluation gave, with NaN for each number of it."""
    if isinstance(found, Mapping):
        return Metrics({name: without_values(each) for name, each in found.items()})
    if type(found) in (list, tuple):
        return type(found)(map(without_values, found))
    return found if isinstance(found, bool | str) or not hasattr(found, "__float__") else _NAN


class Evaluations:
    """All evaluations of a script's Trainers.

    Attributes:
        answer: what happens when the script calls one; None: it runs as it is.
        notes: what a reader has to know of them, once each.
    """

    def __init__(self, *, worst: bool) -> None:
        self.answer: Callable[[EvaluationCall], Any] | None = None
        self.notes: dict[str, None] = {}
        self._worst = worst
        self._before: list[EvaluationCall] = []
        self._loops = 0  # over batches, that have come to the last
        self._in_loop = False
        self._dtype: torch.dtype | None = None

    def install(self) -> None:
        """From here on every Trainer's `evaluate` and `predict` come here first, until `answer` is None."""
        for kind in _with_subclasses(Trainer):
            self._watch(kind)
        Trainer.__init_subclass__ = classmethod(lambda kind, **_: self._watch(kind))

    def _watch(self, kind: Any) -> None:
        for name in ("evaluate", "predict"):
            method = vars(kind).get(name)
            if callable(method):
                setattr(kind, name, self._called(name, method))

    def _called(self, name: str, method: Any) -> Any:
        @functools.wraps(method)
        def called(trainer: Any, *args: Any, **kwargs: Any) -> Any:
            if self.answer is None:
                return method(trainer, *args, **kwargs)
            return self.answer(EvaluationCall(name, method, trainer, args, kwargs))

        return called

    # ---- when ----

    def remember(self, call: EvaluationCall) -> Any:
        """An evaluation above `train()`: it is made after the steps."""
        self._before.append(call)
        return call.unknown()

    def asked(self, trainer: Any, source: Mapping[str, str]) -> list[EvaluationCall]:
        """Those that belong to the training, or stand above it, or elsewhere in the `source` (`calls_not_run`)."""
        data, found = trainer.eval_dataset, []
        if is_asked_for(trainer.args.eval_strategy) or (
            data is not None and (trainer.args.do_eval or "evaluate" in source)
        ):
            found.append(own_evaluation(trainer))
        if data is not None and "predict" in source and (not found or trainer.compute_metrics is None):
            several = data.values() if isinstance(data, Mapping) else [data]
            found += [EvaluationCall("predict", type(trainer).predict, trainer, (each,)) for each in several]
        for name in ("evaluate", "predict"):
            if name in source and data is None:
                self.notes[
                    f"not predicted: {name}() ({source[name]}), because the Trainer has no data to evaluate. Give it "
                    "eval_dataset, too"
                ] = None
            elif name in source and not is_asked_for(trainer.args.eval_strategy):
                self.notes[f"{name}() ({source[name]}): predicted with the Trainer's eval_dataset"] = None
        for call in self._before:
            if call.trainer is not trainer:
                self.notes[f"{call.name}() of another Trainer, before train(): not predicted"] = None
                continue
            self.notes[f"{call.name}() before train(): predicted after the steps, with the optimizer's states"] = None
            own = call.args or set(call.kwargs or {}) - {"metric_key_prefix"}
            if own or call.name == "predict" or not found:
                found.append(call)
        self._before.clear()
        return found

    # ---- one of them ----

    def trace(self, call: EvaluationCall, dtype: torch.dtype | None = None) -> Any:
        """What the call gives: with Trainer's own loop over the largest batches, and no metrics. What the script's
        method does after that loop may fail: a note names the line. `dtype`: of the batches, if an engine casts them.
        """
        loops, answer, self.answer = self._loops, self.answer, None
        outer, self._dtype = self._dtype, dtype
        try:
            with self._shortened(call.trainer):
                return call.method(call.trainer, *call.args, **(call.kwargs or {}))
        except Exception as error:
            if self._in_loop or self._loops == loops:
                raise
            said = f"{type(error).__name__}: {error}".splitlines()[0][:200]
            self.notes[f"{call.name}() is predicted up to {line_of(error.__traceback__)}: {said}"] = None
            return call.unknown()
        finally:
            self.answer, self._dtype, self._in_loop = answer, outer, False

    @contextlib.contextmanager
    def _shortened(self, trainer: Any) -> Iterator[None]:
        loop = Trainer.evaluation_loop
        seen: list[tuple[int, int]] = []  # numbers of the largest batch, and batches

        def short_loop(trainer: Any, dataloader: Any, *args: Any, **kwargs: Any) -> Any:
            loader = dataloader if isinstance(dataloader, Loader) else self._short(trainer, dataloader)
            size = (elements(loader.batches[0]), len(loader) + loader.left_out)
            if any(size[0] <= each[0] and size[1] <= each[1] for each in seen):  # one of several data sets
                return EvalLoopOutput(_Unread(), _Unread(), {}, 0)
            seen.append(size)
            kept = Kept(loader.left_out, len(loader), trainer.args.eval_accumulation_steps)
            self._in_loop = True
            with as_of_more_batches(kept):
                found = loop(trainer, loader, *args, **kwargs)
            self._in_loop = False
            self._say(kept, trainer)
            return found

        def short(make: Any) -> Any:
            return lambda *args, **kwargs: self._short(trainer, make(*args, **kwargs))

        own = {name: each for name, each in vars(trainer).items() if name in _OF_EVALUATIONS}
        for name in ("get_eval_dataloader", "get_test_dataloader"):
            setattr(trainer, name, short(getattr(trainer, name)))
        if trainer.compute_metrics is not None:
            trainer.compute_metrics = self._without_result(trainer.compute_metrics, trainer.args)
        Trainer.evaluation_loop = short_loop
        try:
            yield
        finally:
            Trainer.evaluation_loop = loop
            for name in _OF_EVALUATIONS:
                vars(trainer).pop(name, None)
            vars(trainer).update(own)

    def _without_result(self, compute: Any, arguments: Any) -> Any:
        """The script's function is called where it is given the GPU's tensors, and not arrays: it works there."""
        given_tensors = is_traced() and arguments.batch_eval_metrics

        def without_result(prediction: Any, compute_result: bool = True) -> dict[str, float]:
            nonlocal given_tensors
            if given_tensors:
                try:
                    compute(prediction, compute_result=False)
                except Exception as error:
                    given_tensors = False
                    said = f"{type(error).__name__}: {error}".splitlines()[0][:200]
                    self.notes[f"compute_metrics: predicted up to {line_of(error.__traceback__)}: {said}"] = None
            return {}

        return without_result

    def _short(self, trainer: Any, loader: Any) -> Loader:
        """The largest batches of a loader: tensors of the script, not of the trace."""
        with _disable_current_modes():
            count = len(loader) if has_length(loader) else None
            loader = on_host(loader)
            chosen = chosen_batches(loader) if self._worst else None
            batches: Batches = (
                [chosen.worst, *chosen.others, chosen.worst] if chosen else first_batches(loader, _EVALUATED)
            )
        if count is None:
            said = f"their data has no length: the predictions of {len(batches)} batches are counted"
            self.notes[f"evaluations: {said}"] = None
        batches = batches[:count]

        def before(number: int) -> None:
            self._loops += number == len(batches) - 1

        left_out = max(0, (count or 0) - len(batches))
        return Loader(batches, trainer.args, self._dtype, before, left_out=left_out)

    def _say(self, kept: Kept, trainer: Any) -> None:
        if kept.containers < 2:  # losses alone are nothing
            return
        after = " after preprocess_logits_for_metrics" if trainer.preprocess_logits_for_metrics is not None else ""
        self.notes[
            f"for compute_metrics, which is not called, the GPU keeps the predictions of {kept.on_gpu:,} evaluation "
            f"batches{after}: {format_size(kept.gpu_bytes)}; eval_accumulation_steps=1 moves them to RAM"
        ] = None


_OF_EVALUATIONS: Final = ("get_eval_dataloader", "get_test_dataloader", "compute_metrics")


def _with_subclasses(kind: type) -> set[type]:
    """Each may have a method of its own."""
    return {kind}.union(*map(_with_subclasses, type.__subclasses__(kind)))
