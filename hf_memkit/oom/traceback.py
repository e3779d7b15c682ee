"""What a job was doing when an error came, as far as the traceback above it tells."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from hf_memkit.terms import Phase

__all__ = ["phase_of"]

_BEGINS: Final = "Traceback (most recent call last)"

# Names of functions that stand in every traceback of the kind (transformers 5.23: trainer.py; torch: torch/optim,
# torch/autograd; accelerate 1.15: accelerator.py). In this order: an evaluation and a save run inside training, and
# DeepSpeed steps its optimizer inside backward.
_SIGNS: Final[tuple[tuple[Phase, re.Pattern[str]], ...]] = (
    ("evaluate", re.compile(r"\b(?:evaluation_loop|prediction_loop|prediction_step|predict_with_generate)\b")),
    ("save", re.compile(r"\b_?save_(?:checkpoint|model|pretrained|optimizer_and_scheduler)\b")),
    ("optimizer", re.compile(r"\b_?optimizer\.step\(|/torch/optim/\w{1,40}\.py|/bitsandbytes/optim/")),
    ("backward", re.compile(r"\.backward\(|_engine_run_backward|\bin backward\b")),
    ("forward", re.compile(r"\b(?:compute_loss|training_step)\b|\bin forward\b")),
    ("load", re.compile(r"\bfrom_pretrained\b|\b_move_model_to_device\b")),
)


def phase_of(lines: Sequence[str]) -> Phase | None:
    """The phase that the last traceback in `lines` (those before a message) passed through; None if it shows none."""
    starts = [number for number, line in enumerate(lines) if _BEGINS in line]
    if not starts:
        return None
    traceback = lines[starts[-1] :]
    return next((phase for phase, sign in _SIGNS if any(sign.search(line) for line in traceback)), None)
