"""torch.compile in a plan: when a setup can have it, and the setups that are traced with it.

Compiling makes a trace take ten times as long or more. So a finished plan gets at most two compiled setups, if the
search has time left for them. If the script itself compiles, it gets the best setup without torch.compile instead.

In: a finished plan and its search. Out: the plan with these setups, or with the reason why it has none.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from hf_memkit.catalog.hardware import Gpu
from hf_memkit.plan.candidate import Candidate, Choice, without
from hf_memkit.plan.candidate_time import compiling_s
from hf_memkit.plan.judgement import Judgement
from hf_memkit.prediction.traced_training import TracedTraining
from hf_memkit.setup.techniques.compiling import LEAST_CAPABILITY

if TYPE_CHECKING:
    from hf_memkit.plan.plan import Plan
    from hf_memkit.plan.search import Search

COMPILE: Final = "compile"
"""The slot of the choice."""

_MOST_SETUPS: Final = 2

_MOST_SAVED: Final = 0.35
"""Share of its memory that compiling may save; a setup that lacks more is not compiled. Assumed: 30 % were seen."""

_TRACE_S: Final = 3.0
_TRACE_S_PER_WEIGHT: Final = 0.15
"""Seconds to trace a compiled training: in total, and for each parameter. Measured with Llama on one core of an AMD
EPYC: 7.7 s with 4 layers of 9 parameters, 17 s with 12, 31 s with 12 that are checkpointed."""


def compile_choice(
    own: TracedTraining, gpu: Gpu | None, environment: Mapping[str, str], compiled: Choice
) -> Choice | str:
    """How a setup can differ from the script: compiled; uncompiled, if the script compiles; or why not compiled, which
    is empty if there is no reason to print.

    Args:
        compiled: the choice of the catalogue.
    """
    arguments = own.arguments
    if arguments.torch_compile:
        settings = dict.fromkeys(compiled.settings, False)
        # Trainer sets the backend "inductor" itself. Another value turns torch.compile on again, and so does a mode.
        if arguments.torch_compile_backend not in (None, "inductor"):
            settings["arguments.torch_compile_backend"] = None
        if arguments.torch_compile_mode is not None:
            settings["arguments.torch_compile_mode"] = None
        return replace(
            compiled, name=f"no {compiled.name}", settings=settings, result="each operation rounds its result"
        )

    by_launcher = environment.get("ACCELERATE_DYNAMO_BACKEND", "no").lower() != "no"
    if by_launcher or own.device != "cuda":
        return ""
    if why := too_old_for_triton(gpu):
        return why
    if own.engine is not None and own.engine.stage == 3:
        return _GATHERS
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed here: pip install triton"
    if own.facts.batch.dropout:
        return replace(compiled, result=f"{compiled.result}; dropout draws other numbers")
    return compiled


def too_old_for_triton(gpu: Gpu | None) -> str:
    """Why Triton has no kernels for this GPU; empty if it has, or if the GPU is unknown."""
    if gpu is None or gpu.capability is None or gpu.capability >= LEAST_CAPABILITY:
        return ""
    return f"Triton needs compute capability {LEAST_CAPABILITY}; {gpu.name} has {gpu.capability}"


_GATHERS: Final = "ZeRO-3 gathers weights in a hook of every module, and each hook ends the compiled graph"


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
    first = plan.proposed if compiles else plan.proposed or plan.smallest()
    bases = [base for base in (first, _faster_without_room(plan) if compiles else None) if base is not None]
    why = ""
    judged: list[Judgement] = []
    try:
        for _ in range(_MOST_SETUPS):
            if not bases:
                break
            base = bases.pop(0)
            why = _why_not(base, search) if compiles else ""
            if why:
                break
            candidate = replace(base.candidate, choices=(*base.candidate.choices, change))
            if compiles:
                on_slow(candidate, _trace_s(base))
            judgement = search.judge(candidate)
            search.on_judged(judgement)
            if not judgement.fits:
                judgement = search.with_segments(judgement)
            if judgement.prediction is not None and not judgement.is_other:
                judged.append(judgement)
                continue
            why = judgement.why
            bases = [other for other in [_without_fused_loss(plan, base)] if other is not None]
    except KeyboardInterrupt:
        plan = replace(plan, stopped=True, stopped_by_hand=True)
    left_out = {**plan.left_out, change.name: why} if why and not judged else plan.left_out
    return replace(plan, traced=(*plan.traced, *judged), left_out=left_out)


def _faster_without_room(plan: Plan) -> Judgement | None:
    """The fastest setup that does not fit and needs so little less that it may fit if it is compiled. It must be faster
    than the best that fits."""
    best_s = plan.proposed.mean_seconds if plan.proposed is not None else None
    possible = [
        each
        for each in plan.compared
        if not each.fits
        and each.prediction is not None
        and not (each.lacks_host or each.candidate.code or each.candidate.group == "another method")
        and (1 - _MOST_SAVED) * each.needs_bytes <= each.limit_bytes
        and (each.seconds or math.inf) < (best_s or math.inf)
    ]
    return min(possible, key=lambda each: (each.seconds or math.inf, each.needs_bytes), default=None)


def _without_fused_loss(plan: Plan, base: Judgement) -> Judgement | None:
    """The fastest setup that fits without the fused loss of `base`, which torch may be unable to compile."""
    if without(base.candidate.choices, "loss") == base.candidate.choices:
        return None
    plain = (each for each in plan.ranked if not each.candidate.code)
    return next((each for each in plain if without(each.candidate.choices, "loss") == each.candidate.choices), None)


def _why_not(base: Judgement, search: Search) -> str:
    """Why a setup is not compiled; empty if it is."""
    training = base.training
    assert training is not None
    if training.engine is not None and training.engine.stage == 3:
        return _GATHERS
    if base.fits and base.run_seconds is not None and base.run_seconds[1] <= compiling_s(training):
        return f"the whole run takes {base.run_seconds[1]:.3g} s, and compiling about {compiling_s(training):.0f} s"
    needs_s, left_s = _trace_s(base), search.time_limit.left_s
    if search.stopped or not search.time_limit.has_time(needs_s):
        more = "SECONDS" if search.stopped else f"{math.ceil(search.time_limit.default_or_limit_s - left_s + needs_s)}"
        return (
            f"its trace takes about {needs_s:.0f} s, and the search has {left_s:.0f} s left; --limit {more} tries it"
        )
    return ""


def _trace_s(base: Judgement) -> float:
    """Seconds to trace a setup when it is compiled."""
    weights = base.facts.weights
    return _TRACE_S + _TRACE_S_PER_WEIGHT * (len(weights.trained) + len(weights.frozen))
