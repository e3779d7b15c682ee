"""Metrics of an evaluation that keep no logits: each batch is reduced to what the metric needs.

With a metric, Trainer keeps all logits of an evaluation set: samples × tokens × vocabulary numbers. With
`batch_eval_metrics` it passes one batch at a time and keeps none; `preprocess_logits_for_metrics` reduces a row of
logits to a token id before anything is gathered or moved.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import EvalPrediction

_IGNORED = -100  # labels that the loss ignores (torch: cross_entropy, `ignore_index`)

Metric = Callable[[EvalPrediction], dict[str, Any]]


def trainer_options(*, model: nn.Module, processing_class: Any, arguments: Any) -> dict[str, Any]:
    """`compute_metrics` (token accuracy, summed batch by batch) and `preprocess_logits_for_metrics` (argmax).

    Raises:
        ValueError: `batch_eval_metrics` is False, or `prediction_loss_only` is True.
    """
    if not getattr(arguments, "batch_eval_metrics", False):
        raise ValueError("batch_eval_metrics=False: Trainer would keep all predictions. Write batch_eval_metrics=True")
    if getattr(arguments, "prediction_loss_only", False):
        raise ValueError("prediction_loss_only=True: no metric would be computed. Write prediction_loss_only=False")
    shift = not getattr(getattr(model, "config", None), "is_encoder_decoder", False) and _is_causal(model)
    return {"compute_metrics": TokenAccuracy(shift=shift), "preprocess_logits_for_metrics": most_likely}


def most_likely(logits: Tensor | tuple[Any, ...], labels: Tensor) -> Tensor:
    """The most likely class of each row: int64, the shape of `logits` (or of its first tensor) without the last."""
    scores: Any = logits[0] if isinstance(logits, tuple) else logits
    best: Tensor = scores.argmax(dim=-1)
    return best


class TokenAccuracy:
    """`compute_metrics` for `batch_eval_metrics`: the share of correctly predicted labels, from two sums."""

    def __init__(self, *, shift: bool) -> None:
        """`shift`: predictions at position i belong to label i + 1, as in causal language models."""
        self._shift = shift
        self._right = 0
        self._all = 0

    def __call__(self, prediction: EvalPrediction, compute_result: bool) -> dict[str, float]:
        predicted = _array(prediction.predictions)
        labels = _array(prediction.label_ids)
        if self._shift:
            predicted = predicted[..., :-1]
            labels = labels[..., 1:]
        counted = labels != _IGNORED
        self._right += int((predicted[counted] == labels[counted]).sum())
        self._all += int(counted.sum())
        if not compute_result:
            return {}
        accuracy = self._right / max(self._all, 1)
        self._right = self._all = 0
        return {"token_accuracy": accuracy}


def streamed(metric: Metric) -> Callable[..., dict[str, Any]]:
    """Adapts a `compute_metrics` that needs all predictions at once to `batch_eval_metrics`. Predictions (token ids:
    give Trainer `most_likely` as `preprocess_logits_for_metrics`) and labels are kept in RAM as int32, 8 bytes a
    token, padded with -100 to the longest batch, and `metric` is called once, at the end."""
    kept: list[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]] = []

    def compute_metrics(prediction: EvalPrediction, compute_result: bool) -> dict[str, Any]:
        predicted = _array(prediction.predictions)
        labels = _array(prediction.label_ids)
        if predicted.dtype.kind == "f":
            raise ValueError(
                "predictions are logits, which would all be kept. Give Trainer "
                "preprocess_logits_for_metrics=most_likely"
            )
        kept.append((predicted.astype(np.int32), labels.astype(np.int32)))
        if not compute_result:
            return {}
        both = [_joined([pair[side] for pair in kept]) for side in (0, 1)]
        kept.clear()
        return metric(EvalPrediction(predictions=both[0], label_ids=both[1]))

    return compute_metrics


def _joined(arrays: list[np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    if arrays[0].ndim < 2:
        return np.concatenate(arrays)
    width = max(array.shape[1] for array in arrays)
    fill = [(0, 0)] * arrays[0].ndim
    padded = []
    for array in arrays:
        fill[1] = (0, width - array.shape[1])
        padded.append(np.pad(array, fill, constant_values=_IGNORED))
    return np.concatenate(padded)


def _array(values: Any) -> np.ndarray[Any, Any]:
    first = values[0] if isinstance(values, tuple) else values
    if isinstance(first, torch.Tensor):
        moved: np.ndarray[Any, Any] = first.detach().cpu().numpy()
        return moved
    return np.asarray(first)


def _is_causal(model: nn.Module) -> bool:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL

    base: Any = getattr(model, "get_base_model", None)  # under PEFT's wrapper
    inner = model if base is None else base()
    names = {name for value in CAUSAL.values() for name in ((value,) if isinstance(value, str) else value)}
    return type(inner).__name__ in names
