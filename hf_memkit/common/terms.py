"""The two lists that everything joins on: ledgers, predictions, records and evidence use these names and no others."""

from __future__ import annotations

from typing import Final, Literal, get_args

Phase = Literal[
    "load", "resume", "data", "generate", "log_probabilities", "forward", "backward", "optimizer", "evaluate", "save",
    "best_model", "merge", "after",
]  # fmt: skip
"""What a training job is doing when memory is measured. `resume`: a checkpoint is read before the first step;
`generate`: a model writes the answers that it learns from; `log_probabilities`: passes without gradients, of a
reference model or of the model itself, that the loss needs;
`best_model`: one is read after the last step (`load_best_model_at_end`); of jobs that ran out of memory, not in
predictions: `merge`: adapters become weights; `after`: what else a script does below `train()`."""

Category = Literal["weights", "gradients", "optimizer", "activations", "loss", "buffers", "other"]
"""What memory holds. `loss`: logits and what the loss makes of them; `buffers`: communication buckets, gathered and
prefetched parameters, workspaces; `other`: what cannot be told apart, so that the categories add up."""

Place = Literal["device", "host", "pinned", "disk"]
"""Where bytes lie: GPU memory, pageable RAM, page-locked RAM, NVMe or other disk."""

PHASES: Final[tuple[Phase, ...]] = get_args(Phase)
CATEGORIES: Final[tuple[Category, ...]] = get_args(Category)


def at(phase: str | None, step: int | None) -> str:
    """A moment of a training in words: `in backward of step 61`, `in the evaluation after step 50`.

    Empty where neither is known. Evaluations and saves come after the step whose number they have.
    """
    if phase in ("evaluate", "save"):
        what = "evaluation" if phase == "evaluate" else "save"
        return f"in the {what} after step {step}" if step else f"in {'an' if phase == 'evaluate' else 'a'} {what}"
    if phase == "data":
        return f"in step {step}, before the model's forward" if step is not None else "before the model's forward"
    of = f" of step {step}" if step is not None else ""
    if phase:
        return f"in {phase}{of}"
    return f"in step {step}" if step is not None else ""
