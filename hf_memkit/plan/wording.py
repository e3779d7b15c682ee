"""A plan in sentences and figures. What is unknown is `—`, never a number."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from hf_memkit.catalog.fit import FULL_SHARE, limit_bytes
from hf_memkit.catalog.gpu_sizes import KNOWN_GPUS
from hf_memkit.catalog.hardware import named_gpu
from hf_memkit.common.answer.answer import NONE
from hf_memkit.common.units import GIB, format_gib
from hf_memkit.plan.candidate import without
from hf_memkit.plan.choices import IN_NO_PLAN
from hf_memkit.plan.compile_choice import COMPILE
from hf_memkit.plan.judgement import Judgement
from hf_memkit.plan.known_mistakes import known_mistakes
from hf_memkit.plan.plan import Plan
from hf_memkit.prediction.prediction import list_parts

_TRANSFERS: Final = "transfers and work on the CPU"

_SAME_SHARE: Final = 0.005
"""Times that differ by less than this share of one another are shown as equal."""


def gpu_of(plan: Plan) -> str:
    """`"2 × RTX 4090"`; of several machines `"4 × 8 × A100 80GB"`."""
    if plan.nodes > 1:
        return f"{plan.nodes} × {plan.gpus} × {plan.gpu.name}"
    return f"{plan.gpus} × {plan.gpu.name}" if plan.gpus > 1 else plan.gpu.name


def subject(plan: Plan) -> str:
    """The script, GPU and batch of the plan, and the number of setups."""
    capacity = plan.gpu.capacity_bytes
    usable = f"{format_gib(limit_bytes(capacity))} ({100 * FULL_SHARE:.0f} %)"
    memory = f"{format_gib(capacity)}, of which a setup may use {usable}"
    batch = f"{_count(plan.sequences, 'sequence')} an optimizer step"
    setups = f"{_count(plan.setups, 'setup')} compared, {len(plan.traced)} of them traced"
    if plan.stopped:
        setups += "; search not finished" + " (--limit SECONDS gives it more time)" * (not plan.stopped_by_hand)
    return f"{plan.name}; {gpu_of(plan)}, {memory}; {batch}; {setups}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def headline(plan: Plan) -> tuple[str, str]:
    """The first line: (verdict, reason)."""
    best = plan.proposed
    if best is None:
        verdict = "no setup found yet" if plan.verdict == "unfinished" else plan.verdict
        code = " WITHOUT OTHER CODE" if plan.with_code else ""
        return f"{verdict.upper()} ON {gpu_of(plan)}{code}", lacking(plan)
    rank = "FASTEST" if best.is_priced else "LEANEST"
    return f"{rank}{' SO FAR' * plan.stopped} THAT FITS {gpu_of(plan)}", _name_and_figures(plan, best)


def lacking(plan: Plan) -> str:
    """Why no setup is proposed: what the smallest one needs, or how those that fit failed."""
    if plan.failed:
        candidate, why = next(iter(plan.failed.items()))
        return f"the setups that fit failed when run here; {candidate.name}: {why}"
    least = plan.tight or plan.smallest()
    if least is None:
        return "no setup could be traced"
    reason = f"the smallest{' so far' * plan.stopped}, {least.candidate.name}, {_needs(least)}"
    if least.tight:
        reason += "; it completes, but can be slow"
    if plan.with_code:
        reason += f"; with other code fits {_name_and_figures(plan, plan.with_code[0])}"
    return reason


def headline_details(plan: Plan) -> Iterator[str]:
    """Sentences below the first line: how the proposed setup changes the result, the script as is, faster setups."""
    best, own = plan.proposed, plan.own
    script = f"Your script as it is, {own.candidate.name}"
    yield from (f"{each}." for each in warnings(plan))
    if note := batch_note(plan):
        yield note
    if not any(each.is_priced for each in plan.traced):
        yield "No setup has a known time: they are ranked by memory."
    if best is None:
        yield from _remedies(plan)
        return

    if best.candidate.group != "same result":
        same = plan.best("same result")
        why = "No setup with the same result found yet" if plan.stopped else "Nothing fits with the same result"
        if same is not None:
            why = f"The same result is {_compare(same, best) or 'of unknown speed'}: {same.candidate.name}"
        yield f"{why}. This is {best.candidate.group}: {best.candidate.result}."
    if best.training is not None and best.training.fp16_overflow:
        yield f"{best.training.fp16_overflow}."

    if best.candidate == own.candidate:
        yield "Your script already has this setup: nothing to change."
    elif not own.fits:
        yield f"{script}, {'is tight' if own.tight else 'does not fit'}: {_needs(own)}."
    elif plan.other_batch:
        yield f"Your script as it is fits: {_name_and_figures(plan, own)}."
    elif compared := _compare(own, best):
        yield f"{script}, fits and is {compared}."

    faster = plan.faster()
    for each in (*([faster] if faster is not None else []), *plan.with_code):
        parts = [each.candidate.group.capitalize(), "with other code" if each.candidate.code else ""]
        title = ", ".join(filter(None, [*parts, _compare(each, best)]))
        effects = "; ".join(filter(None, [effect_of_compiling(plan, each), each.candidate.result]))
        yield f"{title}: {': '.join(filter(None, [each.candidate.name, effects]))}."


def warnings(plan: Plan) -> tuple[str, ...]:
    """Warnings about the proposed setup, or about the unchanged script if nothing fits."""
    shown = plan.proposed or plan.own
    mistakes = known_mistakes(shown.training, plan.gpus, plan.nodes, plan.launched)
    return (*(shown.prediction.warnings if shown.prediction is not None else ()), *mistakes)


def _name_and_figures(plan: Plan, judgement: Judgement) -> str:
    """`"4 × 2, LoRA: up to 9.20 GiB, 1.40 s a step (1.31 to 1.68), 5,851 tokens/s"`."""
    parts = [f"{judgement.candidate.name}: up to {format_gib(judgement.needs_bytes)}"]
    if judgement.is_priced and judgement.step_time is not None:
        low, middle, high = map(digits, judgement.step_time.seconds)
        parts.append(f"{middle} s a step ({low} to {high})")
        if (speed := rate(plan, judgement)) != NONE:
            parts.append(f"{speed} {plan.rate_unit}")
    return ", ".join(parts)


def batch_note(plan: Plan) -> str:
    """That `--sequences-per-step` overrides the script's batch; empty if it does not."""
    if not plan.other_batch:
        return ""
    batch = f"{plan.sequences} sequences an optimizer step instead of the script's {plan.own_sequences}"
    return f"{batch} (--sequences-per-step): adapt the learning rate and schedule yourself."


def _remedies(plan: Plan) -> Iterator[str]:
    """What to change if no setup is proposed."""
    least = plan.smallest()
    if plan.failed or plan.with_code or plan.stopped or least is None:
        return
    if least.prediction is not None and least.prediction.peak_phase == "evaluate":
        yield "The evaluation needs most: use shorter rows in it."
    sizes = {name: named_gpu(name).capacity_bytes for name in KNOWN_GPUS}
    enough = [name for name, size in sizes.items() if limit_bytes(size) >= least.needs_bytes]
    larger = f"{min(enough, key=sizes.__getitem__)} is the smallest with" if enough else "no GPU that memkit knows has"
    fewer = " or fewer sequences an optimizer step" if least.candidate.micro_batch_size > 1 else ""
    yield f"Use shorter rows{fewer}, or a larger GPU: {larger} enough memory."


def notes(plan: Plan) -> Iterator[str]:
    """Sentences about what was not tried, and the basis of the figures."""
    best = plan.proposed
    if plan.excluded:
        yield f"{_count(len(plan.excluded), 'more setup')} cannot fit: each needs as much as what does not fit."
    for name, why in plan.left_out.items():
        if name not in IN_NO_PLAN:
            yield f"Not tried: {name}: {why}."
    if never := [name for name in plan.left_out if name in IN_NO_PLAN]:
        yield f"Never planned: {', '.join(never)} (--json gives the reasons)."
    if best is not None and best.is_priced and best.step_time is not None:
        yield from (f"Time: {basis}." for basis in best.step_time.rests_on)
    if best is not None and best.prediction is not None:
        yield f"Memory: {best.prediction.confidence}."
    per_gpu = plan.sequences // plan.batches
    is_prime = per_gpu > 3 and all(per_gpu % each for each in range(2, math.isqrt(per_gpu) + 1))
    if best is not None and best.candidate.micro_batch_size == 1 and is_prime:
        more = (per_gpu + 1) * plan.batches
        yield f"Note: no micro-batch between 1 and {per_gpu} divides {per_gpu}; --sequences-per-step {more} has some."
    for note in plan.notes:
        yield f"Note: {note.rstrip('.')}."


def missing_methods(plan: Plan) -> Iterator[str]:
    """Sentences: why requested methods are in no setup that fits."""
    fitting = {choice.name for each in plan.traced if each.fits for choice in each.candidate.choices}
    none = f"no setup with it fits{' so far' * plan.stopped}"
    yield from (f"{name}: {plan.left_out.get(name, none)}." for name in plan.also if name not in fitting)


def remark(plan: Plan, judgement: Judgement) -> str:
    """What a table says of a setup: why it is not the proposed one, its RAM and disk, what compiling changes, and how
    the result changes."""
    parts = why(plan, judgement), _host_needs(judgement), effect_of_compiling(plan, judgement)
    return "; ".join(filter(None, (*parts, judgement.candidate.result)))


def effect_of_compiling(plan: Plan, judgement: Judgement) -> str:
    """`"without torch.compile: 1.38 GiB more, 17 % slower; compiling takes about 40 s"`, or the same setup with it, if
    the script compiles. Has what compiling adds, if it needs more. Empty for a setup that compiles, or not, as the
    script does."""
    candidate = judgement.candidate
    if not any(choice.slot == COMPILE for choice in candidate.choices):
        return ""
    plain = replace(candidate, choices=without(candidate.choices, COMPILE))
    other = next((each for each in plan.traced if each.candidate == plain), None)
    if other is None:
        return ""

    added_bytes = other.needs_bytes - judgement.needs_bytes
    memory = f"{format_gib(abs(added_bytes))} {'more' if added_bytes >= 0 else 'less'}"
    speed = _compare(other, judgement) if other is not plan.proposed else ""  # the answer compares all with that one
    compiled, uncompiled = (judgement, other) if judgement.compiling_s else (other, judgement)
    if compiled.needs_bytes > uncompiled.needs_bytes:
        memory += _added_by_compiling(compiled, uncompiled)
    effects = ", ".join(filter(None, (memory, speed)))
    if judgement.compiling_s:
        return f"without torch.compile: {effects}; compiling takes about {judgement.compiling_s:.0f} s"
    return f"with torch.compile: {effects}"


def _added_by_compiling(compiled: Judgement, uncompiled: Judgement) -> str:
    """`" (compiling adds 0.98 GiB of zeros …)"`: what there is more of at the peak; empty if unknown."""
    if compiled.prediction is None or uncompiled.prediction is None:
        return ""
    parts = list_parts(compiled.prediction.activations - uncompiled.prediction.activations, compiled.needs_bytes)
    return f" (compiling adds {parts})" if parts else ""


def why(plan: Plan, judgement: Judgement) -> str:
    """Why a setup is not the proposed one; empty if it is, or if nothing is known."""
    best = plan.proposed
    if not judgement.fits:
        return f"{'tight: ' * judgement.tight}{_why_not(judgement)}"
    if judgement is plan.own and plan.other_batch:
        return f"the script's own {plan.own_sequences} sequences an optimizer step"
    if judgement.candidate in plan.failed:
        return plan.failed[judgement.candidate]
    if judgement.step_time is not None and judgement.step_time.unknown:
        return f"no time known for {', '.join(judgement.step_time.unknown[:3])}"
    return _slower(judgement, best) if best is not None and judgement is not best else ""


def _host_needs(judgement: Judgement) -> str:
    """RAM and disk of a setup that swaps to a disk; empty for others."""
    prediction = judgement.prediction
    if prediction is None or not (judgement.fits and judgement.swaps):
        return ""
    ram = (prediction.host_rss_bytes or 0) + (prediction.pinned_bytes or 0)
    return f"needs {format_gib(ram)} of RAM and {format_gib(prediction.disk_bytes or 0)} of disk"


def _needs(judgement: Judgement) -> str:
    """`"needs up to 30.00 GiB, 8.21 GiB over the limit"`, or another reason why it does not fit."""
    if judgement.over_bytes <= 0:
        return _why_not(judgement)
    return f"needs up to {format_gib(judgement.needs_bytes)}, {_why_not(judgement)}"


def _why_not(judgement: Judgement) -> str:
    if judgement.over_bytes > 0:
        return f"{format_gib(judgement.over_bytes)} over the limit"
    return judgement.why.partition("; ")[0]


def _slower(judgement: Judgement, best: Judgement) -> str:
    """How much slower it is, and the part of a step that adds most."""
    compared = _compare(judgement, best)
    if "slow" not in compared:
        return compared
    here, there = _seconds_by_part(judgement), _seconds_by_part(best)
    longer = {part: seconds - there.get(part, 0.0) for part, seconds in here.items()}
    part = max(longer, key=longer.__getitem__)
    return f"{compared}: {part} {'take' if part == _TRANSFERS else 'takes'} {_short_time(longer[part])} more"


def _seconds_by_part(judgement: Judgement) -> dict[str, float]:
    time = judgement.step_time
    assert time is not None
    transfers_s = time.seconds[1] - sum(time.by_phase.values()) + time.exposed_s
    return {_TRANSFERS: transfers_s, **{str(phase): seconds for phase, seconds in time.by_phase.items()}}


def _compare(one: Judgement, other: Judgement) -> str:
    """The first time against the second: `"19 % faster"`, `"2.1 times as slow"`, `"as fast"`; empty if unknown."""
    here, there = one.mean_seconds, other.mean_seconds
    if not (one.is_priced and other.is_priced and here and there):
        return ""
    if abs(here / there - 1) <= _SAME_SHARE:
        return "as fast"
    ratio = max(here, there) / min(here, there)
    is_faster = here < there
    if ratio < 2:
        return f"{100 * (ratio - 1):.0f} % {'faster' if is_faster else 'slower'}"
    return f"{ratio:.1f} times as {'fast' if is_faster else 'slow'}"


def figures(plan: Plan, judgement: Judgement) -> dict[str, str]:
    """Name of each figure, with its unit → its digits."""
    return {
        "GiB": f"{judgement.needs_bytes / GIB:.2f}" if judgement.prediction is not None else NONE,
        "s a step": digits(judgement.seconds) if judgement.is_priced and judgement.seconds else NONE,
        plan.rate_unit: rate(plan, judgement),
        "run": run_of(judgement),
    }


def rate(plan: Plan, judgement: Judgement) -> str:
    speed = plan.rate(judgement)
    if speed is None:
        return NONE
    return f"{speed:,.0f}" if speed >= 100 or plan.rate_unit == "tokens/s" else f"{speed:.3g}"


def digits(value: float) -> str:
    """Three significant digits, but at most three decimals."""
    decimals = 3 - sum(value >= each for each in (1, 10, 100))
    return f"{value:.{decimals}f}"


def _short_time(seconds: float) -> str:
    return f"{digits(seconds)} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"


def run_of(judgement: Judgement) -> str:
    """Time of the training with evaluations and saves: `"45 s"`, `"1 min 20 s"`, `"1 h 20 min"`, `"3 d 4 h"`."""
    if not judgement.is_priced or not judgement.run_seconds:
        return NONE
    seconds = judgement.run_seconds[1]
    minutes, hours = round(seconds / 60), round(seconds / 3600)
    if seconds < 10:
        return _short_time(seconds)
    if seconds < 59.5:
        return f"{seconds:.0f} s"
    if seconds < 599.5:
        return f"{round(seconds) // 60} min {round(seconds) % 60} s"
    if minutes < 60:
        return f"{minutes} min"
    if minutes < 24 * 60:
        return f"{minutes // 60} h {minutes % 60} min"
    return f"{hours // 24} d {hours % 24} h"


def cost(value: float | None) -> str:
    """A cost in the currency of the user's prices."""
    if value is None:
        return NONE
    if value < 1e-4:
        return "< 0.0001"
    return f"{value:,.2f}" if value >= 0.1 else f"{value:.2g}"
