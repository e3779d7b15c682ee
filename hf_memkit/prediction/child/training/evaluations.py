"""Traces a script's evaluations: the largest batches, and the predictions that Trainer keeps of all others
(`kept_predictions.py`), by the script's method, if any, and Trainer's loop.

| the script evaluates | in the trace |
|---|---|
| above `train()` | traced after the steps, with the optimizer's states; its result is NaN |
| within it, because of its arguments | traced after the steps |
| below it, by its source (`below_train.py`) | Trainer's `eval_dataset` is evaluated after the steps |
| not at all | the same, but it does not affect the verdict |
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
from hf_memkit.prediction.child.training.kept_predictions import KeptPredictions, counting_all_batches
from hf_memkit.prediction.child.training.row_sizes import elements
from hf_memkit.prediction.child.training.traced_batches import Batches, Loader, is_traced, on_host
from hf_memkit.prediction.child.user_code import line_in_traceback

_EVALUATED: Final = 2
_NAN: Final = float("nan")


def is_enabled(strategy: Any) -> bool:
    """Whether `eval_strategy` or `save_strategy` is not "no"."""
    return str(getattr(strategy, "value", strategy)) != "no"


def largest_batch(loader: Any, *, worst: bool) -> Any:
    """The batch of a loader that needs most memory, or the first."""
    loader = on_host(loader)
    return chosen_batches(loader).worst if worst else first_batches(loader, 1)[0]


@dataclass(frozen=True, slots=True)
class EvaluationCall:
    """A call of `evaluate()` or `predict()`: its name, the method of the Trainer's class, and its arguments."""

    name: str
    method: Callable[..., Any]
    trainer: Any
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] | None = None

    def unknown(self) -> Any:
        """A placeholder for its result, which raises Unmodelled if predictions are read."""
        prefix = (self.kwargs or {}).get("metric_key_prefix", "eval" if self.name == "evaluate" else "test")
        metrics = UnknownMetrics({f"{prefix}_loss": _NAN})
        return metrics if self.name == "evaluate" else PredictionOutput(_NoPredictions(), _NoPredictions(), metrics)


def trainers_evaluation(trainer: Any) -> EvaluationCall:
    """The evaluation of the Trainer's `eval_dataset`, as within the training."""
    return EvaluationCall("evaluate", type(trainer).evaluate, trainer)


class UnknownMetrics(dict[str, float]):
    """Metrics that are NaN under any name."""

    def __missing__(self, name: str) -> float:
        return _NAN


class _NoPredictions:
    """Placeholder for predictions; reading them raises Unmodelled."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name not in ("__array__", "__array_interface__", "__array_struct__"):
            raise AttributeError(name)
        raise Unmodelled(
            "the script reads the predictions of an evaluation above train(), and a trace has no values; "
            "omit that evaluation (--do_predict False, or an `if`), or measure with memkit run"
        )

    def __getitem__(self, key: Any) -> Any:
        return self.__array__[key]

    def __len__(self) -> int:
        return int(self.__array__)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.__array__)


def with_nan(result: Any) -> Any:
    """The result of an evaluation with NaN for each number."""
    if isinstance(result, Mapping):
        return UnknownMetrics({name: with_nan(value) for name, value in result.items()})
    if type(result) in (list, tuple):
        return type(result)(map(with_nan, result))
    return result if isinstance(result, bool | str) or not hasattr(result, "__float__") else _NAN


class Evaluations:
    """All evaluations of a script's Trainers."""

    def __init__(self, *, worst: bool) -> None:
        self.answer: Callable[[EvaluationCall], Any] | None = None  # handles calls; None: they run unchanged
        self.notes: dict[str, None] = {}  # sentences for the reader, in order
        self._worst = worst
        self._before: list[EvaluationCall] = []
        self._loops = 0  # loops over batches that reached the last one
        self._in_loop = False
        self._dtype: torch.dtype | None = None

    def install(self) -> None:
        """Sends calls of `evaluate` and `predict` of all Trainers to `answer`, while it is set."""
        for kind in _with_subclasses(Trainer):
            self._watch(kind)
        Trainer.__init_subclass__ = classmethod(lambda kind, **_: self._watch(kind))

    def _watch(self, kind: Any) -> None:
        def watched(name: str, method: Any) -> Any:
            @functools.wraps(method)
            def called(trainer: Any, *args: Any, **kwargs: Any) -> Any:
                if self.answer is None:
                    return method(trainer, *args, **kwargs)
                return self.answer(EvaluationCall(name, method, trainer, args, kwargs))

            return called

        for name in ("evaluate", "predict"):
            method = vars(kind).get(name)
            if callable(method):
                setattr(kind, name, watched(name, method))

    def remember(self, call: EvaluationCall) -> Any:
        """Records an evaluation above `train()`, to be traced after the steps."""
        self._before.append(call)
        return call.unknown()

    def requested(self, trainer: Any, source: Mapping[str, str]) -> list[EvaluationCall]:
        """The evaluations of the training, above it, and below it by the `source` (`calls_not_run`)."""
        data, calls = trainer.eval_dataset, []
        if is_enabled(trainer.args.eval_strategy) or (
            data is not None and (trainer.args.do_eval or "evaluate" in source)
        ):
            calls.append(trainers_evaluation(trainer))
        if data is not None and "predict" in source and (not calls or trainer.compute_metrics is None):
            several = data.values() if isinstance(data, Mapping) else [data]
            calls += [EvaluationCall("predict", type(trainer).predict, trainer, (part,)) for part in several]
        for name in ("evaluate", "predict"):
            if name in source and data is None:
                self.notes[
                    f"not predicted: {name}() ({source[name]}), because the Trainer has no data to evaluate. Give it "
                    "eval_dataset, too"
                ] = None
            elif name in source and not is_enabled(trainer.args.eval_strategy):
                self.notes[f"{name}() ({source[name]}): predicted with the Trainer's eval_dataset"] = None
        for call in self._before:
            if call.trainer is not trainer:
                self.notes[f"{call.name}() of another Trainer, before train(): not predicted"] = None
                continue
            self.notes[f"{call.name}() before train(): predicted after the steps, with the optimizer's states"] = None
            has_data = call.args or set(call.kwargs or {}) - {"metric_key_prefix"}
            if has_data or call.name == "predict" or not calls:
                calls.append(call)
        self._before.clear()
        return calls

    def trace(self, call: EvaluationCall, dtype: torch.dtype | None = None) -> Any:
        """Runs the call with Trainer's loop over the largest batches and without metrics; returns its result. An error
        in the script's method after that loop adds a note. `dtype`: of the batches, if an engine casts them."""
        loops, answer, self.answer = self._loops, self.answer, None
        outer, self._dtype = self._dtype, dtype
        try:
            with self._with_short_loops(call.trainer):
                return call.method(call.trainer, *call.args, **(call.kwargs or {}))
        except Exception as error:
            if self._in_loop or self._loops == loops:
                raise
            self.notes[f"{call.name}() is predicted up to {_place_and_error(error)}"] = None
            return call.unknown()
        finally:
            self.answer, self._dtype, self._in_loop = answer, outer, False

    @contextlib.contextmanager
    def _with_short_loops(self, trainer: Any) -> Iterator[None]:
        loop = Trainer.evaluation_loop
        seen: list[tuple[int, int]] = []  # elements of the largest batch, number of batches

        def short_loop(trainer: Any, dataloader: Any, *args: Any, **kwargs: Any) -> Any:
            loader = dataloader if isinstance(dataloader, Loader) else self._short_loader(trainer, dataloader)
            size = (elements(loader.batches[0]), len(loader) + loader.skipped)
            if any(size[0] <= largest and size[1] <= count for largest, count in seen):  # one of several data sets
                return EvalLoopOutput(_NoPredictions(), _NoPredictions(), {}, 0)
            seen.append(size)
            kept = KeptPredictions(loader.skipped, len(loader), trainer.args.eval_accumulation_steps)
            self._in_loop = True
            with counting_all_batches(kept):
                result = loop(trainer, loader, *args, **kwargs)
            self._in_loop = False
            if kept.containers > 1:  # losses alone are negligible
                after = " after preprocess_logits_for_metrics" if trainer.preprocess_logits_for_metrics else ""
                self.notes[
                    f"for compute_metrics, which is not called, the GPU keeps the predictions of {kept.on_gpu:,} "
                    f"evaluation batches{after}: {format_size(kept.gpu_bytes)}; eval_accumulation_steps=1 moves them "
                    "to RAM"
                ] = None
            return result

        def shortened(make: Any) -> Any:
            return lambda *args, **kwargs: self._short_loader(trainer, make(*args, **kwargs))

        own = {name: value for name, value in vars(trainer).items() if name in _REPLACED}
        for name in ("get_eval_dataloader", "get_test_dataloader"):
            setattr(trainer, name, shortened(getattr(trainer, name)))
        if trainer.compute_metrics is not None:
            trainer.compute_metrics = self._update_metrics_only(trainer.compute_metrics, trainer.args)
        Trainer.evaluation_loop = short_loop
        try:
            yield
        finally:
            Trainer.evaluation_loop = loop
            for name in _REPLACED:
                vars(trainer).pop(name, None)
            vars(trainer).update(own)

    def _update_metrics_only(self, compute: Any, arguments: Any) -> Any:
        """A function that calls the script's metrics only while they get tensors on the GPU, where they use memory."""
        given_tensors = is_traced() and arguments.batch_eval_metrics

        def without_result(prediction: Any, compute_result: bool = True) -> dict[str, float]:
            nonlocal given_tensors
            if given_tensors:
                try:
                    compute(prediction, compute_result=False)
                except Exception as error:
                    given_tensors = False
                    self.notes[f"compute_metrics: predicted up to {_place_and_error(error)}"] = None
            return {}

        return without_result

    def _short_loader(self, trainer: Any, loader: Any) -> Loader:
        """A loader of the largest batches, as real tensors outside the trace."""
        with _disable_current_modes():
            count = len(loader) if has_length(loader) else None
            loader = on_host(loader)
            chosen = chosen_batches(loader) if self._worst else None
            batches: Batches = (
                [chosen.worst, *chosen.others, chosen.worst] if chosen else first_batches(loader, _EVALUATED)
            )
        if count is None:
            self.notes[
                f"evaluations: their data has no length: the predictions of {len(batches)} batches are counted"
            ] = None
        batches = batches[:count]

        def before(number: int) -> None:
            self._loops += number == len(batches) - 1

        skipped = max(0, (count or 0) - len(batches))
        return Loader(batches, trainer.args, self._dtype, before, skipped=skipped)


_REPLACED: Final = ("get_eval_dataloader", "get_test_dataloader", "compute_metrics")


def _place_and_error(error: Exception) -> str:
    message = f"{type(error).__name__}: {error}".splitlines()[0][:200]
    return f"{line_in_traceback(error.__traceback__)}: {message}"


def _with_subclasses(kind: type) -> set[type]:
    return {kind}.union(*map(_with_subclasses, type.__subclasses__(kind)))
