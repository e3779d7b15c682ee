"""Tells Trainer that a model's loss is the mean of its micro-batch.

If a model's `forward` accepts any keyword, Trainer assumes that the model divides the summed loss by the labels of the
whole step, and does not divide by the number of micro-batches (transformers 5.23.0: trainer.py 518-528 and 2107-2112).
Whisper accepts any keyword but computes the mean of its micro-batch (modeling_whisper.py): over N accumulated
micro-batches its gradients and its logged loss would be N times too large.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn


def install(model: nn.Module) -> Callable[[], None]:
    """Sets `accepts_loss_kwargs=False` on `model` (in PEFT's wrapper, if any); returns a function that undoes it."""
    get_base: Any = getattr(model, "get_base_model", None)
    inner: Any = model if get_base is None else get_base()
    attributes = vars(inner)
    had = "accepts_loss_kwargs" in attributes
    before = attributes.get("accepts_loss_kwargs")
    inner.accepts_loss_kwargs = False

    def undo() -> None:
        if had:
            inner.accepts_loss_kwargs = before
        else:
            del inner.accepts_loss_kwargs

    return undo
