"""Plans as `--json` prints them: every number, and every setup."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hf_memkit.catalog.fit import FULL_SHARE
from hf_memkit.common.units import GIB
from hf_memkit.plan import wording
from hf_memkit.plan.judgement import Judgement
from hf_memkit.plan.plan import Plan
from hf_memkit.plan.prices import Prices, million_tokens_cost, price_of, ranked_gpus, run_cost


def plans_json(plans: Sequence[Plan], prices: Prices) -> list[dict[str, Any]]:
    """Each plan, with what it costs; in the order of `ranked_gpus`."""
    return [_plan(plan, price_of(plan, prices)) for plan in ranked_gpus(plans, prices)]


def _plan(plan: Plan, price: float | None) -> dict[str, Any]:
    best, ranked = plan.proposed, plan.ranked
    return {
        "name": plan.name,
        "gpu": plan.machine.gpu.to_json() if plan.machine.gpu else None,
        "gpus": plan.gpus,
        "sequences_a_step": plan.sequences,
        "own_sequences_a_step": plan.own_sequences,
        "full_share": FULL_SHARE,
        "verdict": plan.verdict,
        "best": best.candidate.name if best else None,
        "launch": plan.launch,
        "setups": [_setup(plan, each) for each in (*ranked, *(each for each in plan.traced if each not in ranked))],
        "excluded": [{"name": each.name, "group": each.group, "by": by} for each, by in plan.excluded.items()],
        "left_out": dict(plan.left_out),
        "setups_judged": plan.setups,
        "stopped": plan.stopped,
        "warnings": list(wording.warnings(plan)),
        "notes": list(plan.notes),
        "price_an_hour": price,
        "run_cost": run_cost(best, price, plan.gpus),
        "million_tokens_cost": million_tokens_cost(best, price, plan.gpus),
    }


def _setup(plan: Plan, judgement: Judgement) -> dict[str, Any]:
    candidate, time = judgement.candidate, judgement.step_time
    return {
        "name": candidate.name,
        "group": candidate.group,
        "result": candidate.result,
        "micro_batch_size": candidate.micro_batch_size,
        "accumulation": candidate.accumulation,
        "overrides": candidate.overrides.to_json(),
        "code": candidate.code,
        "fits": judgement.fits,
        "why": judgement.why or wording.why(plan, judgement),
        "peak_gib": judgement.needs_bytes / GIB if judgement.prediction is not None else None,
        "step_time_s": list(time.seconds) if time is not None else None,
        "time_rests_on": time.rests_on if time is not None else None,
        "time_not_known_of": list(time.unknown) if time is not None else [],
        "tokens_per_second": judgement.tokens_per_second,
        "run_s": list(judgement.run_seconds) if judgement.run_seconds else None,
        "prediction": judgement.prediction.to_json() if judgement.prediction is not None else None,
    }
