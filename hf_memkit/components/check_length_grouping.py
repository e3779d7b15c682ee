"""Stops a run whose samples are not grouped by length; warns if all samples have the same length.

Trainer cannot group an IterableDataset, which has no length: it logs a warning and keeps the data set's order
(transformers 5.23.0: trainer.py 1075-1086).
"""

from __future__ import annotations

import warnings
from typing import Any

from torch import nn
from transformers import TrainerCallback
from transformers.trainer_pt_utils import LengthGroupedSampler


def trainer_options(*, model: nn.Module, processing_class: Any, arguments: Any) -> dict[str, Any]:
    """A callback that raises RuntimeError before the first step if no sampler groups by length."""
    return {"callbacks": [CheckLengthGrouping()]}


class CheckLengthGrouping(TrainerCallback):  # type: ignore[misc]
    """Raises RuntimeError in `on_train_begin` if no sampler groups, and warns if all samples have one length."""

    def on_train_begin(self, args: Any, state: Any, control: Any, train_dataloader: Any = None, **kwargs: Any) -> None:
        if train_dataloader is None:
            return
        sampler = getattr(train_dataloader, "batch_sampler", None)
        for _ in range(4):  # inside the wrappers that accelerate adds with several processes (BatchSamplerShard)
            if sampler is None or isinstance(sampler, LengthGroupedSampler):
                break
            sampler = getattr(sampler, "batch_sampler", None) or getattr(sampler, "sampler", None)
        if not isinstance(sampler, LengthGroupedSampler):
            raise RuntimeError(
                "length-grouped has no effect: the training data set has no length (an IterableDataset). Give a data "
                "set with a length, or omit length-grouped"
            )
        lengths = set(sampler.lengths)
        if len(lengths) == 1:
            warnings.warn(
                f"grouping by length has no effect: every sample has {lengths.pop()} tokens (cut, padded or packed "
                "before)",
                stacklevel=2,
            )
