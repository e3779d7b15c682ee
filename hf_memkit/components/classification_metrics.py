"""Accuracy and macro F1 of a classifier from one number per example, its most likely class, instead of its logits.

Trainer keeps the result of `preprocess_logits_for_metrics` (transformers 5.23.0: trainer.py, `evaluation_loop`): 8
bytes an example here, for any number of classes. It is computed on the GPU, before anything is gathered.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor
from transformers import EvalPrediction


def likeliest_class(logits: Tensor | tuple[Any, ...], labels: Tensor) -> Tensor:
    """The class with the largest logit of each example: int64, (examples,). The first of several outputs counts."""
    scores: Any = logits[0] if isinstance(logits, tuple) else logits
    best: Tensor = scores.argmax(dim=-1)
    return best


def last_of_each(classes: Sequence[str], share: float) -> list[int]:
    """Indices of the examples to hold out: the last `share` of each class, at least one per class. They are shuffled,
    so that the first N have all classes in about the same proportions."""
    by_class: dict[str, list[int]] = {}
    for number, name in enumerate(classes):
        by_class.setdefault(name, []).append(number)
    held = sorted(
        number for members in by_class.values() for number in members[-max(1, round(share * len(members))) :]
    )
    return [held[number] for number in np.random.default_rng(0).permutation(len(held))]


def accuracy_and_f1(prediction: EvalPrediction) -> dict[str, float]:
    """`accuracy`: the share of correct predictions. `macro_f1`: the mean of the classes' F1 scores. F1 of a class is 2
    × correct / (predicted + actual). As in scikit-learn (`f1_score(average="macro")`) every class that is predicted or
    occurs counts, with 0 if no prediction of it is correct."""
    predicted = np.asarray(prediction.predictions).ravel()
    actual = np.asarray(prediction.label_ids).ravel()
    if not len(actual):
        return {}
    classes = int(max(predicted.max(), actual.max())) + 1
    correct = np.bincount(actual[predicted == actual], minlength=classes)
    either = np.bincount(predicted, minlength=classes) + np.bincount(actual, minlength=classes)
    seen = either > 0
    return {
        "accuracy": float(correct.sum() / len(actual)),
        "macro_f1": float(np.mean(2 * correct[seen] / either[seen])),
    }
