"""What a training costs, by the user's prices; and several GPUs, ranked.

A price is that of one GPU an hour, in any currency.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from hf_memkit.plan.judgement import Judged
from hf_memkit.plan.plan import Plan

_HOUR_S: Final = 3600.0

Prices = Mapping[str, float]
"""Name of a GPU, as `gpu_sizes.KNOWN_GPUS` has it, or of its size → price of one GPU an hour."""


def price_of(plan: Plan, prices: Prices) -> float | None:
    """Of one GPU an hour; None: not given."""
    return prices.get(plan.machine.gpu.name) if plan.machine.gpu is not None else None


def run_cost(judged: Judged | None, price: float | None, gpus: int) -> float | None:
    """Of the whole training with its evaluations and saves, the middle of its range; None: not known."""
    if judged is None or price is None or judged.run_seconds is None or not judged.is_priced:
        return None
    return judged.run_seconds[1] / _HOUR_S * price * gpus


def million_tokens_cost(judged: Judged | None, price: float | None, gpus: int) -> float | None:
    """Of training on a million tokens, without evaluations and saves; None: not known."""
    if judged is None or price is None or not judged.is_priced or not judged.tokens_per_second:
        return None
    return 1e6 / judged.tokens_per_second / _HOUR_S * price * gpus


def ranked_gpus(plans: Sequence[Plan], prices: Prices) -> tuple[Plan, ...]:
    """With prices the cheapest run first, then those without a price; without prices the fastest first. Those on which
    nothing fits come last."""

    def key(plan: Plan) -> tuple[int, float, float]:
        best = plan.proposed
        if best is None:
            least = plan.smallest()
            return 3, float(least.needs_bytes - least.limit_bytes) if least is not None else 0.0, 0.0
        if not best.is_priced or not best.seconds:
            return 2, 0.0, 0.0
        price = price_of(plan, prices)
        found = run_cost(best, price, plan.gpus)
        if found is None:
            found = million_tokens_cost(best, price, plan.gpus)
        return (0, found, best.seconds) if found is not None else (1, best.seconds, 0.0)

    return tuple(sorted(plans, key=key))
