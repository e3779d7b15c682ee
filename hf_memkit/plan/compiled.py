"""The setups of a plan that are traced with torch.compile.

Compiling makes a trace take much longer. So a finished plan gets at most two compiled setups, if the
search has time left for them. If the script itself compiles, it gets the best setup without torch.compile instead.

In: a finished plan and its search. Out: the plan with these setups, or with the reason why it has none.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from operator import attrgetter
from typing import TYPE_CHECKING, Final

from hf_memkit.plan.candidate import Candidate
from hf_memkit.plan.candidate_time import compiled_parameters, compiling_s
from hf_memkit.plan.compile_choice import COMPILE, GATHERS
from hf_memkit.plan.judgement import Judgement
from hf_memkit.prediction.time.compile_time import trace_seconds

if TYPE_CHECKING:
    from hf_memkit.plan.plan import Plan
    from hf_memkit.plan.search import Search

_MOST_SETUPS: Final = 2

_MOST_SAVED: Final = 0.35
"""Share of its memory that compiling may save; a setup that lacks more is not compiled. Assumed: 30 % were seen."""


def with_compiled(plan: Plan, search: Search, on_slow: Callable[[Candidate, float], None]) -> Plan:
    """The plan with at most two more setups: its best one and a faster one that lacks little memory, both compiled.

    Args:
        search: of the plan; its time limit is the plan's.
        on_slow: called with each setup before its trace, and the seconds that this takes.
    """
    change = next(filter(None, search.choices.get(COMPILE, ())), None)
    if change is None or plan.stopped_by_hand:
        return plan

    compiles = any(change.settings.values())
    bases = [plan.proposed, _faster_without_room(plan)] if compiles else [plan.proposed or plan.smallest()]
    waiting = [base for base in bases if base is not None]
    added: list[Judgement] = []
    why = ""
    try:
        while waiting and len(added) < _MOST_SETUPS:
            base = waiting.pop(0)
            candidate = replace(base.candidate, choices=(*base.candidate.choices, change))
            if compiles:
                why = _why_not(base, search)
                if why:
                    break
                on_slow(candidate, _trace_s(base))

            judgement = search.judge(candidate)
            search.on_judged(judgement)
            if not judgement.fits:
                judgement = search.with_segments(judgement)
            if judgement.prediction is not None and not judgement.is_other:
                added.append(judgement)
            else:
                why = judgement.why
                waiting = _without_fused_loss(plan, base)
    except KeyboardInterrupt:
        plan = replace(plan, stopped=True, stopped_by_hand=True)

    left_out = {**plan.left_out, change.name: why} if why and not added else plan.left_out
    return replace(plan, traced=(*plan.traced, *added), left_out=left_out)


def _faster_without_room(plan: Plan) -> Judgement | None:
    """The fastest setup that does not fit, but may fit if it is compiled, and is faster than the best that fits. If
    none fits, the one that lacks least. None if there is none."""
    possible = [each for each in plan.compared if _may_fit(each) and not each.fits]
    if plan.proposed is None:
        return min(possible, key=attrgetter("needs_bytes"), default=None)
    best_s = plan.proposed.seconds or math.inf
    faster = [each for each in possible if each.seconds is not None and each.seconds < best_s]
    return min(faster, key=attrgetter("seconds"), default=None)


def _without_fused_loss(plan: Plan, base: Judgement) -> list[Judgement]:
    """The fastest setup without the fused loss of `base`, which torch cannot compile, and the fastest that also fits
    uncompiled; empty if `base` has no fused loss."""
    if all(choice.slot != "loss" for choice in base.candidate.choices):
        return []
    plain = [
        each
        for each in plan.compared
        if _may_fit(each) and all(choice.slot != "loss" for choice in each.candidate.choices)
    ]
    plain.sort(key=lambda each: each.seconds or math.inf)
    fits = [each for each in plain if each.fits]
    return [*plain[:1], *(each for each in fits[:1] if each is not plain[0])]


def _may_fit(judgement: Judgement) -> bool:
    """Whether a setup may fit if it is compiled."""
    candidate = judgement.candidate
    if judgement.prediction is None or judgement.lacks_host or candidate.code or candidate.group == "another method":
        return False
    return (1 - _MOST_SAVED) * judgement.needs_bytes <= judgement.limit_bytes


def _why_not(base: Judgement, search: Search) -> str:
    """Why a setup is not compiled; empty if it is."""
    training = base.training
    assert training is not None
    if training.engine is not None and training.engine.stage == 3:
        return GATHERS
    if base.fits and base.run_seconds is not None and base.run_seconds[1] <= compiling_s(training):
        return f"the whole run takes {base.run_seconds[1]:.3g} s, and compiling about {compiling_s(training):.0f} s"
    needs_s, left_s = _trace_s(base), search.time_limit.left_s
    if search.stopped or not search.time_limit.has_time(needs_s):
        enough = "SECONDS"
        if not search.stopped:
            enough = str(math.ceil(search.time_limit.default_or_limit_s - left_s + needs_s))
        return f"tracing it takes about {needs_s:.0f} s, and {left_s:.0f} s are left; --limit {enough} allows it"
    return ""


def _trace_s(base: Judgement) -> float:
    """Seconds to trace a setup when it is compiled."""
    training = base.training
    assert training is not None
    lengths = {step.kind for step in training.steps}
    return trace_seconds(compiled_parameters(training)) * max(1, len(lengths))
