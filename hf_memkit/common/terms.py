"""Names of phases, categories and places of memory, shared by ledgers, predictions, records and evidence."""

from __future__ import annotations

from typing import Final, Literal, get_args

Phase = Literal[
    "load", "resume", "data", "generate", "log_probabilities", "forward", "backward", "optimizer", "evaluate", "save",
    "best_model", "merge", "after",
]  # fmt: skip
"""Part of a training job in which memory is measured.

`resume`: a checkpoint is read before the first step; `generate`: a model writes the answers that it learns from;
`log_probabilities`: forward passes without gradients that the loss needs, of a reference model or of the model itself;
`best_model`: a checkpoint is read after the last step (`load_best_model_at_end`). Only for jobs that ran out of
memory, never in predictions: `merge`: adapters become weights; `after`: the rest of a script after `train()`.
"""

Category = Literal["weights", "gradients", "optimizer", "activations", "loss", "buffers", "other"]
"""Kind of content in memory. `loss`: logits and tensors of the loss; `buffers`: communication buckets, gathered and
prefetched parameters, workspaces; `other`: the rest, so that the categories add up."""

Place = Literal["device", "host", "pinned", "disk"]
"""Where bytes lie: GPU memory, pageable RAM, page-locked RAM, NVMe or other disk."""

PHASES: Final[tuple[Phase, ...]] = get_args(Phase)
CATEGORIES: Final[tuple[Category, ...]] = get_args(Category)


def at(phase: str | None, step: int | None) -> str:
    """A moment of a training in words: `in backward of step 61`, `in the evaluation after step 50`. Empty where
    neither is known. Evaluations and saves have the number of the step before them."""
    if phase in ("evaluate", "save"):
        name = "evaluation" if phase == "evaluate" else "save"
        return f"in the {name} after step {step}" if step else f"in {'an' if phase == 'evaluate' else 'a'} {name}"
    if phase == "data":
        return f"in step {step}, before the model's forward" if step is not None else "before the model's forward"
    if phase:
        return f"in {phase} of step {step}" if step is not None else f"in {phase}"
    return f"in step {step}" if step is not None else ""
