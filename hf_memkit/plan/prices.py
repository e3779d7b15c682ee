"""The cost of a training at the user's prices, and the order of plans for several GPUs.

A price is per GPU and hour, in any currency.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from hf_memkit.plan.judgement import Judgement
from hf_memkit.plan.plan import Plan

_HOUR_S: Final = 3600.0

Prices = Mapping[str, float]
"""Name of a GPU, as in `gpu_sizes.KNOWN_GPUS`, or its memory size → price per GPU and hour."""


def price_of(plan: Plan, prices: Prices) -> float | None:
    """Price of the plan's GPU, per GPU and hour; None if the user gave none."""
    return prices.get(plan.gpu.name)


def run_cost(judgement: Judgement | None, price: float | None, gpus: int) -> float | None:
    """Likely cost of the whole training with its evaluations and saves; None if unknown. `price`: per GPU and hour."""
    if judgement is None or price is None or judgement.run_seconds is None or not judgement.is_priced:
        return None
    return judgement.run_seconds[1] / _HOUR_S * price * gpus


def million_tokens_cost(judgement: Judgement | None, price: float | None, gpus: int) -> float | None:
    """Likely cost of training on a million tokens, without evaluations and saves; None if unknown."""
    if judgement is None or price is None or not judgement.is_priced or not judgement.tokens_per_second:
        return None
    return 1e6 / judgement.tokens_per_second / _HOUR_S * price * gpus


def ranked_gpus(plans: Sequence[Plan], prices: Prices) -> tuple[Plan, ...]:
    """The plans: the cheapest run first, the fastest without a price, those without a time, those without a fit."""

    def key(plan: Plan) -> tuple[int, float, float]:
        best = plan.proposed
        if best is None:
            least = plan.smallest()
            return 3, float(least.over_bytes) if least is not None else 0.0, 0.0
        if not best.is_priced or not best.seconds:
            return 2, 0.0, 0.0
        price = price_of(plan, prices)
        cost = run_cost(best, price, plan.ranks)
        if cost is None:
            cost = million_tokens_cost(best, price, plan.ranks)
        return (0, cost, best.seconds) if cost is not None else (1, best.seconds, 0.0)

    return tuple(sorted(plans, key=key))
