"""Which of several measured setups a plan chooses, what two rules of thumb choose, and what each choice loses.

All have what was measured: a setup's speed, and the memory that says whether it fits under a cap. A plan goes by what
it predicted of both. The rules are given more than a user has: they know what fits from the measurements.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

WITHIN: Final = 0.05
"""A choice that loses no more is as good as the best, by the bar that was set for plans."""
NOISE: Final = 0.03
"""Of repeated runs in one repository."""

Found = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Setup:
    """
    Attributes:
        name: id of its row.
        speed: tokens or samples per second, measured; None: it ran out of memory.
        predicted_speed: the same in the same unit.
        gib: what it took, measured, as the group measures it; None: it ran out of memory, or that is not known.
        predicted_gib: the same; None: not modelled.
        micro_batch, checkpointing: what the rules go by.
        fits: whether a plan says that it fits on its GPU; None: it is not asked.
    """

    name: str
    speed: float | None
    predicted_speed: float
    gib: float | None
    predicted_gib: float | None
    micro_batch: int
    checkpointing: bool
    fits: bool | None = None


def planned(setups: Sequence[Setup], cap_gib: float | None) -> list[Setup]:
    """What a plan chooses from: of the setups whose predicted memory is within the cap the fastest, and all within the
    noise of it: a plan takes the one of these that changes the user's script least (`hf_memkit/plan/plan.py`), and
    published rows have no script. Where none fits, none.

    Args:
        setups: of a group.
        cap_gib: None: what a plan says to fit on the GPU, and where it is not asked all that ran.
    """
    if cap_gib is not None:
        fitting = [each for each in setups if _within(each.predicted_gib, cap_gib)]
    else:
        fitting = [each for each in setups if (each.speed is not None if each.fits is None else each.fits)]
    fastest = max((each.predicted_speed for each in fitting), default=0.0)
    return [each for each in fitting if each.predicted_speed >= (1 - NOISE) * fastest]


def _largest(setups: Sequence[Setup]) -> list[Setup]:
    most = max(each.micro_batch for each in setups)
    return [each for each in setups if each.micro_batch == most]


def _not_checkpointed(setups: Sequence[Setup]) -> list[Setup]:
    """With the largest micro-batch among them; where all checkpoint the rule says no more than that."""
    return _largest([each for each in setups if not each.checkpointing] or setups)


RULES: Final[Mapping[str, Callable[[Sequence[Setup]], list[Setup]]]] = {
    "largest micro-batch that fits": _largest,
    "no checkpointing if it fits": _not_checkpointed,
}
"""What each leaves of setups that fit. Where that is more than one it is taken to choose any of them."""

PLAN: Final = "plan"
WAYS: Final = (PLAN, *RULES)


def case(setups: Sequence[Setup], cap_gib: float | None, *, silent: bool = False) -> Found:
    """One choice: what is best, what plan and rules choose, and what that loses.

    Args:
        setups: of a group.
        cap_gib: of the memory that the group measures; None: the whole GPU, on which fits what ran.
        silent: whether the rules say nothing of what differs, so that they choose any.

    Returns:
        Of each way the `choices` that it leaves and what each of them loses: the share of the best one's measured
        speed; 1 where it does not fit. A plan that finds nothing that fits loses 1, too.
    """
    fitting = [
        each for each in setups if each.speed is not None and (cap_gib is None or _within(each.gib, cap_gib))
    ]  # fmt: skip
    best = max(fitting, key=lambda each: each.speed or 0.0)
    chosen = {
        PLAN: planned(setups, cap_gib),
        **{name: fitting if silent else rule(fitting) for name, rule in RULES.items()},
    }

    def loss(choice: Setup) -> float:
        return 1 - (choice.speed or 0.0) / (best.speed or 1.0) if choice in fitting else 1.0

    ways = {
        name: {"choices": [each.name for each in choices], "losses": [loss(each) for each in choices] or [1.0]}
        for name, choices in chosen.items()
    }
    return {
        "cap_gib": cap_gib,
        "fit": [each.name for each in fitting],
        "best": best.name,
        "worst_loss": max(loss(each) for each in fitting),
        "false_fits": [each.name for each in chosen[PLAN] if each not in fitting],
        "ways": ways,
    }


def scores(cases: Iterable[Found]) -> Found:
    """How often each way is within 5 % of the best, and within the noise. Of a way that leaves several: the share of
    them."""
    found = list(cases)
    return {
        "cases": len(found),
        "choices_that_matter": sum(each["worst_loss"] > WITHIN for each in found),
        "false_fits": sum(bool(each["false_fits"]) for each in found),
        "ways": {way: _score([each["ways"][way]["losses"] for each in found]) for way in WAYS if found},
    }


def _score(losses: Sequence[Sequence[float]]) -> Found:
    return {
        "within_5_percent": sum(_share(each, WITHIN) for each in losses),
        "within_3_percent": sum(_share(each, NOISE) for each in losses),
        "mean_loss": statistics.fmean(statistics.fmean(each) for each in losses),
        "worst_loss": max(max(each) for each in losses),
    }


def _share(losses: Sequence[float], limit: float) -> float:
    return sum(each <= limit for each in losses) / len(losses)


def _within(gib: float | None, cap_gib: float) -> bool:
    return gib is not None and gib <= cap_gib
