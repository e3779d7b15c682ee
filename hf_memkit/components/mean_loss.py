"""Tells Trainer that a model's loss is the mean of its own micro-batch.

Trainer takes a model whose `forward` accepts any keyword for one that divides the summed loss by the labels of the
whole step, and then leaves out the division by the number of micro-batches (transformers 5.23.0: trainer.py 518-528
and 2107-2112). Whisper accepts any keyword and takes the mean all the same (modeling_whisper.py,
`WhisperForConditionalGeneration.forward`): with accumulation its gradients and its logged loss would be as many times
too large as there are micro-batches.

This file needs torch only, so that it can lie beside a script.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn


def install(model: nn.Module) -> Callable[[], None]:
    """Sets `accepts_loss_kwargs=False` on `model` (in PEFT's wrapper, if any); returns a function that undoes it."""
    get_base: Any = getattr(model, "get_base_model", None)
    inner: Any = model if get_base is None else get_base()
    own = vars(inner)
    had, before = "accepts_loss_kwargs" in own, own.get("accepts_loss_kwargs")
    inner.accepts_loss_kwargs = False

    def undo() -> None:
        if had:
            inner.accepts_loss_kwargs = before
        else:
            del inner.accepts_loss_kwargs

    return undo
