"""`auto_find_batch_size`: the batch with which a script trains, after those that run out of memory. Each takes another
run of the script, so that a few are chosen by what the others need."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, TypeVar

from hf_memkit.catalog import fit
from hf_memkit.common.errors import InputError
from hf_memkit.common.terms import Phase
from hf_memkit.prediction.prediction import Prediction

_TRACES: Final = 6
_OF_A_BATCH: Final[tuple[Phase, ...]] = ("data", "generate", "log_probabilities", "forward", "backward", "optimizer")
"""Where these run out of memory Trainer takes a smaller batch; an evaluation ends the run (transformers 5.23.0:
trainer.py 3304)."""

Training = TypeVar("Training")
Predicted = tuple[Prediction, Training]


def first_that_fits(
    own: Predicted[Training], tried: Sequence[int], predicted: Callable[[int], Predicted[Training]]
) -> Predicted[Training]:
    """The prediction, and the training, that the script comes to. `own`: those with its own batch; `tried`: batches
    that accelerate would try, the script's own first, each smaller than the one before."""
    prediction, training = own
    if prediction.verdict != "does not fit" or prediction.peak_phase not in _OF_A_BATCH or len(tried) < 2:
        return own
    failed, fits, found = 0, len(tried), own
    needs = [(0, prediction.phases["data"][0] if "data" in prediction.phases else 0)]
    needs.append((tried[0], prediction.smallest_cap_bytes))
    for _ in range(_TRACES):
        if fits - failed < 2:
            break
        usable = prediction.usable_bytes
        room = usable - fit.slack_bytes(usable, prediction.confidence.level)
        number = _guess(tried, failed, fits, needs, room)
        try:
            other = predicted(tried[number])
        except InputError as error:  # such as a batch that a Trainer cannot divide
            said = str(error).splitlines()[0]
            return prediction.with_notes(f"auto_find_batch_size: not predicted with {tried[number]}: {said}"), training
        needs = [*needs[-1:], (tried[number], other[0].smallest_cap_bytes)]
        if other[0].verdict == "does not fit" and other[0].peak_phase in _OF_A_BATCH:
            failed = number
        else:
            fits, found = number, other
    if found is own:
        return prediction.with_notes("auto_find_batch_size: no smaller batch fits either"), training
    about = "" if fits - failed < 2 else "about "
    said = (
        f"auto_find_batch_size: {tried[0]} rows per GPU run out of memory; this is of {about}{tried[fits]}, with "
        "which it trains; the total batch is smaller by as much"
    )
    return found[0].with_notes(said), found[1]


def _guess(tried: Sequence[int], failed: int, fits: int, needs: Sequence[tuple[int, int]], usable: int) -> int:
    """The number of the batch that should just fit, by a line through two that are known; between those that are known
    to fail and to fit."""
    (one, less), (other, more) = needs[-2:]
    slope = (more - less) / (other - one) if other != one else 0.0
    largest = one + (usable - less) / slope if slope > 0 else 0.0
    number = next((number for number, batch in enumerate(tried) if batch <= largest), len(tried) - 1)
    return min(max(number, failed + 1), fits - 1)
