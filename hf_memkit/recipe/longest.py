"""The longest sequence that fits a card: found by formula, then confirmed, lowered or raised by prediction.

In: how much a sequence of a given length needs. Out: the length, and why it is this one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from hf_memkit.predict import Prediction
from hf_memkit.presets.sizes import largest

__all__ = ["MOST_TRACES", "MULTIPLE", "longest_by_formula", "nearer_length"]

MULTIPLE: Final = 1024
"""Tokens: a length that is solved for is a multiple of this. Finer steps would change nothing that matters, and tensor
cores like multiples of 64 elements (`presets/sizes.py`)."""

MOST_TRACES: Final = 4
"""Lengths that are traced: the first is the formula's, each further one follows from the one before."""

_CLOSE_ENOUGH: Final = 0.03
"""A length is not raised by a smaller share than this: the prediction itself is not that exact."""


_SURER: Final = 0.985
"""A length that is lowered is lowered a little further, so that the next prediction does not miss by a hair."""


def longest_by_formula(
    needed: Callable[[int], int], *, shortest: int, longest: int, usable_bytes: int
) -> tuple[int, bool]:
    """(the longest multiple of 1024 from `shortest` to `longest` that fits, or `shortest`; whether it fits).

    Args:
        needed: tokens → bytes on the card; more tokens never need less.
        shortest, longest: tokens.
        usable_bytes: what the card has.
    """
    multiples = range(-(-shortest // MULTIPLE) * MULTIPLE, longest + 1, MULTIPLE)
    return largest((shortest, *(tokens for tokens in multiples if tokens > shortest)),
                   lambda tokens: needed(tokens) <= usable_bytes)  # fmt: skip


def nearer_length(length: int, found: Prediction, *, shortest: int, longest: int, usable_bytes: int) -> int:
    """The length to try after `length` was predicted: what fits if all that grows with the sequence grows in
    proportion. Weights, gradients and states do not grow with it. `length` itself where nothing is to be gained.
    """
    held = sum(found.categories[name] for name in ("weights", "gradients", "optimizer"))
    needs = found.confidence.reserved_with_slack(found.peak_reserved_bytes[1])
    grows = needs - found.confidence.reserved_with_slack(held)
    room = usable_bytes - found.confidence.reserved_with_slack(held)
    if grows <= 0 or room <= 0:
        return shortest if found.verdict != "fits" else length
    wanted = max(shortest, min(longest, int(length * room / grows) // MULTIPLE * MULTIPLE))
    if found.verdict == "fits":
        return wanted if wanted > (1 + _CLOSE_ENOUGH) * length else length
    lower = int(_SURER * wanted) // MULTIPLE * MULTIPLE
    return max(shortest, min(lower, length - MULTIPLE))
