"""transformers' Seq2SeqTrainer with Trainer's argument `optimizer_cls_and_kwargs`.

The constructor of Seq2SeqTrainer lacks it, and supports only optimizers of `optim` (transformers 5.23.0).
"""

from __future__ import annotations

from typing import Any

from transformers import Seq2SeqTrainer


class GeneratingTrainer(Seq2SeqTrainer):  # type: ignore[misc]
    """Seq2SeqTrainer that takes `optimizer_cls_and_kwargs` as Trainer does."""

    def __init__(self, *args: Any, optimizer_cls_and_kwargs: tuple[type, dict[str, Any]] | None = None, **kwargs: Any):
        super().__init__(*args, **kwargs)
        if optimizer_cls_and_kwargs is not None:
            # Trainer reads it when it creates the optimizer, at the start of training.
            self.optimizer_cls_and_kwargs = optimizer_cls_and_kwargs
