"""Evaluations of a traced training: the largest batches, and what the predictions of all others keep."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch.utils._pytree import tree_leaves

from hf_memkit.prediction.child.batches import chosen_batches, first_batches
from hf_memkit.prediction.child.row_sizes import elements
from hf_memkit.prediction.child.traced_batches import Batches, Loader, on_host

__all__ = [
    "evaluate", "evaluated_again", "evaluation_of", "is_asked_for", "keep_evaluation", "largest_batch",
]  # fmt: skip

_EVALUATED: Final = 2


def is_asked_for(strategy: Any) -> bool:
    """Of `eval_strategy` or `save_strategy`: whether there is one."""
    return str(getattr(strategy, "value", strategy)) != "no"


def _keeps_predictions(trainer: Any) -> bool:
    """Whether an evaluation keeps what the model gives on the GPU, until its last batch."""
    arguments = trainer.args
    if trainer.compute_metrics is None or arguments.prediction_loss_only or arguments.batch_eval_metrics:
        return False
    return arguments.eval_accumulation_steps is None


def evaluation_of(trainer: Any, notes: list[str], *, worst: bool) -> tuple[Batches, int]:
    """Batches to evaluate with, none if no evaluation is asked for; and of how many more the predictions are kept."""
    before = getattr(trainer, "memkit_evaluates", False)
    if before:
        notes.append("evaluate() before train(): predicted after the steps, with the optimizer's states")
    if not before and not is_asked_for(trainer.args.eval_strategy):
        return (), 0
    batches, more = _evaluation_batches(trainer, worst=worst)
    if not _keeps_predictions(trainer):
        return batches, 0
    notes.append(
        f"compute_metrics is not called; for it the GPU keeps the predictions of {more + len(batches)} evaluation "
        "batches; eval_accumulation_steps=1 moves them to RAM"
    )
    return batches, more


def _evaluation_batches(trainer: Any, *, worst: bool) -> tuple[Batches, int]:
    """Batches to evaluate with, and how many more there are; of several data sets those of the one that needs most."""
    several = isinstance(trainer.eval_dataset, Mapping)
    found = []
    for name in trainer.eval_dataset if several else (None,):
        loader = trainer.get_eval_dataloader(name) if several else trainer.get_eval_dataloader()
        count = len(loader) if hasattr(loader, "__len__") else _EVALUATED
        loader = on_host(loader)
        chosen = chosen_batches(loader) if worst else None
        batches = [chosen.worst, *chosen.others, chosen.worst] if chosen else first_batches(loader, _EVALUATED)
        found.append((batches, max(0, count - len(batches))))
    if several:
        trainer.eval_dataset = range(_EVALUATED)
    return max(found, key=lambda pair: (pair[1] + len(pair[0])) * elements(pair[0][0]))


def largest_batch(loader: Any, *, worst: bool) -> Any:
    """A batch of a loader: the one that needs most, or the first."""
    loader = on_host(loader)
    return chosen_batches(loader).worst if worst else first_batches(loader, 1)[0]


def evaluate(
    trainer: Any, batches: Batches, dtype: torch.dtype | None, left_out: int, *, predicts: bool = False
) -> None:
    """An evaluation of `batches`, while the predictions of `left_out` more are there; then they are joined, which
    makes them once more (transformers 5.23.0: trainer_pt_utils.py, `nested_concat`)."""
    arguments = trainer.args
    if trainer.compute_metrics is not None:
        trainer.compute_metrics = lambda prediction, compute_result=True: {}
    trainer.get_eval_dataloader = lambda *args, **kwargs: Loader(batches, arguments, dtype)
    trainer.get_test_dataloader = trainer.get_eval_dataloader
    kept: list[torch.Tensor] = []
    step, seen = trainer.prediction_step, itertools.count(1)

    def prediction_step(*args: Any, **kwargs: Any) -> Any:
        found = step(*args, **kwargs)
        if left_out and not kept:
            kept.extend(_times(each, left_out) for each in tree_leaves(found[1:]) if isinstance(each, torch.Tensor))
        if next(seen) == len(batches) and arguments.eval_do_concat_batches:
            joined = [torch.empty_like(each) for each in kept]
            del joined
        return found

    trainer.prediction_step = prediction_step
    trainer.predict(range(len(batches))) if predicts else trainer.evaluate()


def evaluated_again(
    trainer: Any,
    dataset: Any,
    traced: Callable[[], contextlib.AbstractContextManager[Any]],
    *,
    predicts: bool,
    worst: bool,
) -> None:
    """An evaluation after the training, of the Trainer's own data set or another; of it alone, not of the batches, are
    tensors made within `traced`. `predicts`: it is `predict()`, which keeps predictions in any case."""
    as_it_was = keep_evaluation(trainer)
    if dataset is not None:
        trainer.eval_dataset = dataset
    try:
        batches, left_out = _evaluation_batches(trainer, worst=worst)
        keeps = trainer.args.eval_accumulation_steps is None if predicts else _keeps_predictions(trainer)
        with traced():
            evaluate(trainer, batches, None, left_out if keeps else 0, predicts=predicts)
    finally:
        as_it_was()


_OF_EVALUATIONS: Final = (
    "get_eval_dataloader", "get_test_dataloader", "prediction_step", "compute_metrics", "eval_dataset",
)  # fmt: skip


def keep_evaluation(trainer: Any) -> Callable[[], None]:
    """Returns what puts back what an evaluation has replaced in the Trainer since."""
    own = {name: each for name, each in vars(trainer).items() if name in _OF_EVALUATIONS}

    def put_back() -> None:
        for name in _OF_EVALUATIONS:
            vars(trainer).pop(name, None)
        vars(trainer).update(own)

    return put_back


def _times(tensor: torch.Tensor, count: int) -> torch.Tensor:
    return tensor.new_empty((count, *tensor.shape))
