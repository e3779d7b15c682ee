"""Predicts the batch size that `auto_find_batch_size` ends with, after those that run out of memory.

Each size needs another run of the script, so a few are chosen by interpolation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from hf_memkit.catalog import fit
from hf_memkit.common.errors import InputError
from hf_memkit.common.terms import Phase
from hf_memkit.prediction.prediction import Prediction
from hf_memkit.prediction.script_prediction import ScriptPrediction

_MAX_TRACES: Final = 6
_BATCH_PHASES: Final[tuple[Phase, ...]] = ("data", "generate", "log_probabilities", "forward", "backward", "optimizer")
"""Phases in which Trainer tries a smaller batch after an out-of-memory error; an evaluation ends the run (transformers
5.23.0: trainer.py 3304)."""


def first_that_fits(
    own: ScriptPrediction, tried: Sequence[int], predict_with: Callable[[int], ScriptPrediction]
) -> ScriptPrediction:
    """The prediction with the batch size that the script ends with.

    Args:
        own: with the first size.
        tried: the sizes that accelerate would try, in this order.
        predict_with: predicts another size; it may raise InputError.
    """
    first = own.prediction
    if not _is_tried_again(first) or len(tried) < 2:
        return own
    failed, fits, best = 0, len(tried), own
    needs = [(0, first.phases.get("data", (0, None))[0]), (tried[0], first.smallest_cap_bytes)]
    room = first.usable_bytes - fit.slack_bytes(first.usable_bytes, first.confidence.level)
    for _ in range(_MAX_TRACES):
        if fits - failed < 2:
            break
        number = _guess(tried, failed, fits, needs, room)
        try:
            other = predict_with(tried[number])
        except InputError as error:  # such as a batch that a Trainer cannot divide
            reason = str(error).splitlines()[0]
            return _with_note(own, f"auto_find_batch_size: not predicted with {tried[number]}: {reason}")
        needs = [*needs[-1:], (tried[number], other.prediction.smallest_cap_bytes)]
        if _is_tried_again(other.prediction):
            failed = number
        else:
            fits, best = number, other
    if best is own:
        return _with_note(own, "auto_find_batch_size: no smaller batch fits either")
    about = "" if fits - failed < 2 else "about "
    size = f"{tried[0]} rows per GPU run out of memory; this is of {about}{tried[fits]}, with which it trains"
    return _with_note(best, f"auto_find_batch_size: {size}; the total batch is smaller by as much")


def _is_tried_again(prediction: Prediction) -> bool:
    return prediction.verdict == "does not fit" and prediction.peak_phase in _BATCH_PHASES


def _with_note(predicted: ScriptPrediction, note: str) -> ScriptPrediction:
    return replace(predicted, prediction=predicted.prediction.with_notes(note))


def _guess(tried: Sequence[int], failed: int, fits: int, needs: Sequence[tuple[int, int]], usable: int) -> int:
    """Index of a batch that should just fit, on a line through two known ones, between a failing and a fitting one."""
    (size, less), (other, more) = needs[-2:]
    slope = (more - less) / (other - size) if other != size else 0.0
    largest = size + (usable - less) / slope if slope > 0 else 0.0
    number = next((number for number, batch in enumerate(tried) if batch <= largest), len(tried) - 1)
    return min(max(number, failed + 1), fits - 1)
