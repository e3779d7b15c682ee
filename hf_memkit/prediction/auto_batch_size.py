"""Predicts the batch size that `auto_find_batch_size` ends with, after those that run out of memory.

Each size needs another run of the script, so a few are chosen by interpolation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, TypeVar

from hf_memkit.catalog import fit
from hf_memkit.common.errors import InputError
from hf_memkit.common.terms import Phase
from hf_memkit.prediction.prediction import Prediction

_MAX_TRACES: Final = 6
_BATCH_PHASES: Final[tuple[Phase, ...]] = ("data", "generate", "log_probabilities", "forward", "backward", "optimizer")
"""Phases in which Trainer tries a smaller batch after an out-of-memory error; an evaluation ends the run (transformers
5.23.0: trainer.py 3304)."""

Training = TypeVar("Training")
Predicted = tuple[Prediction, Training]


def first_that_fits(
    own: Predicted[Training], tried: Sequence[int], predicted: Callable[[int], Predicted[Training]]
) -> Predicted[Training]:
    """The prediction and the training of the batch size that the script ends with: `own`, or those that `predicted`
    makes of a size in `tried`, which accelerate would try in this order."""
    prediction, training = own
    if prediction.verdict != "does not fit" or prediction.peak_phase not in _BATCH_PHASES or len(tried) < 2:
        return own
    failed, fits, best = 0, len(tried), own
    needs = [(0, prediction.phases.get("data", (0, None))[0]), (tried[0], prediction.smallest_cap_bytes)]
    for _ in range(_MAX_TRACES):
        if fits - failed < 2:
            break
        usable = prediction.usable_bytes
        room = usable - fit.slack_bytes(usable, prediction.confidence.level)
        number = _guess(tried, failed, fits, needs, room)
        try:
            other = predicted(tried[number])
        except InputError as error:  # such as a batch that a Trainer cannot divide
            reason = str(error).splitlines()[0]
            note = f"auto_find_batch_size: not predicted with {tried[number]}: {reason}"
            return prediction.with_notes(note), training
        needs = [*needs[-1:], (tried[number], other[0].smallest_cap_bytes)]
        if other[0].verdict == "does not fit" and other[0].peak_phase in _BATCH_PHASES:
            failed = number
        else:
            fits, best = number, other
    if best is own:
        return prediction.with_notes("auto_find_batch_size: no smaller batch fits either"), training
    about = "" if fits - failed < 2 else "about "
    note = (
        f"auto_find_batch_size: {tried[0]} rows per GPU run out of memory; this is of {about}{tried[fits]}, with "
        "which it trains; the total batch is smaller by as much"
    )
    return best[0].with_notes(note), best[1]


def _guess(tried: Sequence[int], failed: int, fits: int, needs: Sequence[tuple[int, int]], usable: int) -> int:
    """Index of the batch that should just fit, on a line through two known ones, between a failing and a fitting
    one."""
    (size, less), (other, more) = needs[-2:]
    slope = (more - less) / (other - size) if other != size else 0.0
    largest = size + (usable - less) / slope if slope > 0 else 0.0
    number = next((number for number, batch in enumerate(tried) if batch <= largest), len(tried) - 1)
    return min(max(number, failed + 1), fits - 1)
