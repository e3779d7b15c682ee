"""Accuracy and macro F1 of a classifier, without its logits: of each example one number is kept, its likeliest class.

Trainer keeps what `preprocess_logits_for_metrics` leaves of a batch (transformers 5.23.0: trainer.py,
`evaluation_loop`): 8 bytes an example here, whatever the number of classes. It is made on the GPU, before anything is
gathered.

This file needs numpy, torch and transformers only, so that it can lie beside a script.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor
from transformers import EvalPrediction


def likeliest_class(logits: Tensor | tuple[Any, ...], labels: Tensor) -> Tensor:
    """The class with the largest logit of each example: int64, (examples,). Encoder-decoder models give their hidden
    states besides, which are dropped."""
    scores: Any = logits[0] if isinstance(logits, tuple) else logits
    best: Tensor = scores.argmax(dim=-1)
    return best


def last_of_each(classes: Sequence[str], share: float) -> list[int]:
    """Indices of the examples to hold out: the last `share` of each class, at least one of it.

    In an order in which any first part has all classes in about their shares.
    """
    by_class: dict[str, list[int]] = {}
    for number, name in enumerate(classes):
        by_class.setdefault(name, []).append(number)
    held = sorted(number for found in by_class.values() for number in found[-max(1, round(share * len(found))) :])
    return [held[number] for number in np.random.default_rng(0).permutation(len(held))]


def accuracy_and_f1(prediction: EvalPrediction) -> dict[str, float]:
    """`accuracy`: the share of correct predictions. `macro_f1`: the mean of the classes' F1 scores.

    F1 of a class is 2 × correct / (predicted + actual). As in scikit-learn (`f1_score(average="macro")`) every class
    that was predicted or occurs counts, with 0 if none was correct.
    """
    found, there = np.asarray(prediction.predictions).ravel(), np.asarray(prediction.label_ids).ravel()
    if not len(there):
        return {}
    classes = int(max(found.max(), there.max())) + 1
    right = np.bincount(there[found == there], minlength=classes)
    either = np.bincount(found, minlength=classes) + np.bincount(there, minlength=classes)
    seen = either > 0
    return {"accuracy": float(right.sum() / len(there)), "macro_f1": float(np.mean(2 * right[seen] / either[seen]))}
