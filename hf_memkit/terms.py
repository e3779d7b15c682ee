"""The two lists that everything joins on: ledgers, predictions, records and evidence use these names and no others."""

from __future__ import annotations

from typing import Final, Literal, get_args

__all__ = ["CATEGORIES", "PHASES", "Category", "Phase", "Place"]

Phase = Literal["load", "data", "forward", "backward", "optimizer", "evaluate", "save"]
"""What a training job is doing when memory is measured."""

Category = Literal["weights", "gradients", "optimizer", "activations", "loss", "buffers", "other"]
"""What memory holds. `loss`: logits and what the loss makes of them; `buffers`: communication buckets, gathered and
prefetched parameters, workspaces; `other`: what cannot be told apart, so that the categories add up."""

Place = Literal["device", "host", "pinned", "disk"]
"""Where bytes lie: GPU memory, pageable RAM, page-locked RAM, NVMe or other disk."""

PHASES: Final[tuple[Phase, ...]] = get_args(Phase)
CATEGORIES: Final[tuple[Category, ...]] = get_args(Category)
