"""A plan in sentences and figures. What is unknown is `—`, never a number."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Final

from hf_memkit.catalog.fit import FULL_SHARE, limit_bytes
from hf_memkit.catalog.gpu_sizes import KNOWN_GPUS
from hf_memkit.catalog.hardware import described_gpu
from hf_memkit.common.answer.answer import NONE
from hf_memkit.common.units import format_gib
from hf_memkit.plan.choices import IN_NO_PLAN
from hf_memkit.plan.judgement import Judgement
from hf_memkit.plan.plan import Plan

_TRANSFERS: Final = "transfers and work on the CPU"

_SAME_SHARE: Final = 0.005
"""Times that differ by less than this share of one another are shown as equal."""


def gpu_of(plan: Plan) -> str:
    """`"2 × RTX 4090"`."""
    name = plan.machine.gpu.name if plan.machine.gpu is not None else "no GPU"
    return f"{plan.gpus} × {name}" if plan.gpus > 1 else name


def subject(plan: Plan) -> str:
    """The script, GPU and batch of the plan, and the number of setups."""
    gpu, memory = plan.machine.gpu, ""
    if gpu is not None:
        usable = format_gib(limit_bytes(gpu.capacity_bytes))
        memory = f", {format_gib(gpu.capacity_bytes)}, of which a setup may use {usable} ({_percent(FULL_SHARE)})"
    setups = f"{plan.setups} setup{'s' * (plan.setups != 1)} compared, {len(plan.traced)} of them traced"
    if plan.stopped:
        setups += f"; search not finished{limit_hint([plan])}"
    batch = f"{plan.sequences} sequence{'s' * (plan.sequences != 1)} an optimizer step"
    return f"{plan.name}; {gpu_of(plan)}{memory}; {batch}; {setups}"


def limit_hint(plans: Sequence[Plan]) -> str:
    """How to give a search more time; empty if the user stopped it."""
    return "" if any(plan.stopped_by_hand for plan in plans) else " (--limit SECONDS gives it more time)"


def headline(plan: Plan) -> tuple[str, str]:
    """The first line: (verdict, reason)."""
    best, gpu = plan.proposed, gpu_of(plan)
    if plan.verdict == "unfinished":
        return f"NO SETUP FOUND YET FOR {gpu}", f"{len(plan.compared)} tried, search stopped; {plan.lacking()}"
    if best is None and (tight := plan.tight) is not None and not plan.failed:
        needs = f"needs up to {format_gib(tight.needs_bytes)}, {format_gib(tight.needs_bytes - tight.limit_bytes)}"
        slow = "it completes, but can be slow"
        return f"TIGHT ON {gpu}", f"nothing fits; {tight.candidate.name} {needs} over the limit: {slow}"
    if best is None:
        as_it_is = " WITHOUT A CHANGE OF CODE" if plan.with_code and not plan.failed else ""
        return f"NOTHING {'RAN ON' if plan.failed else 'FITS'} {gpu}{as_it_is}", plan.lacking()
    verdict = f"{'FASTEST' if best.is_priced else 'LEANEST'}{' SO FAR' * plan.stopped} THAT FITS {gpu}"
    return verdict, _memory_and_speed(plan, best)


def headline_details(plan: Plan) -> Iterator[str]:
    """Sentences below the first line: how the proposed setup changes the result, the script as it is, and setups that
    are faster."""
    best, own = plan.proposed, plan.own
    yield from (f"{each}." for each in warnings(plan))
    yield from filter(None, [batch_note(plan)])
    if best is None:
        if plan.failed:
            return
        if plan.with_code:
            yield from (f"It fits with other code: {_memory_and_speed(plan, each)}." for each in plan.with_code)
        elif plan.stopped:
            more = "Run it again, and let it finish" if plan.stopped_by_hand else "Give it more time: --limit SECONDS"
            yield f"The search is not finished: other setups may fit. {more}."
        else:
            yield from _remedies(plan)
        return
    if best.candidate.group != "same result":
        same = plan.best("same result")
        if same is not None and same.seconds and best.seconds:
            yield f"This is {best.candidate.group}: {best.candidate.result}."
            times = f"{same.seconds / best.seconds:.1f} times as long a step"
            yield f"The same result takes {times}: {same.candidate.name}."
        else:
            none = "No setup with the same result found yet" if plan.stopped else "Nothing fits with the same result"
            yield f"{none}. This is {best.candidate.group}: {best.candidate.result}."
    if best.training is not None and best.training.fp16_overflow:
        yield f"{best.training.fp16_overflow}."
    if best.swaps:
        yield f"It {_host_needs(best)}."
    script = f"Your script as it is, {own.candidate.name},"
    if best.candidate == own.candidate:
        yield "Your script already has this setup: nothing to change."
    elif not own.fits:
        needs = f"needs up to {format_gib(own.needs_bytes)}, " if own.needs_bytes > own.limit_bytes else ""
        yield f"{script} {'is tight' if own.tight else 'does not fit'}: {needs}{_why_not(own)}."
    elif plan.other_batch:
        known = [f"{speed} {rate_unit(plan)}"] if (speed := rate(plan, own)) != NONE else []
        known += [f"{run} in total"] if (run := run_of(own)) != NONE else []
        yield f"{script} fits{': ' * bool(known)}{', '.join(known)}."
    elif own.is_priced and best.is_priced and own.seconds and best.seconds:
        yield f"{script} fits and is {_faster(own.seconds, best.seconds)}."
    other = plan.faster()
    if other is not None and other.seconds and best.seconds:
        much = _faster(other.seconds, best.seconds)
        yield f"Nearly the same result, and {much}: {other.candidate.name}: {other.candidate.result}."
    for each in plan.with_code:
        much = ""
        if each.is_priced and best.is_priced and each.seconds and best.seconds:
            much = f", and {_faster(each.seconds, best.seconds)}"
        result = f": {each.candidate.result}" if each.candidate.result else ""
        yield f"{each.candidate.group.capitalize()}, with other code{much}: {each.candidate.name}{result}."


def warnings(plan: Plan) -> tuple[str, ...]:
    """Warnings about the proposed setup, or about the unchanged script if nothing fits."""
    prediction = (plan.proposed or plan.own).prediction
    return prediction.warnings if prediction is not None else ()


def _memory_and_speed(plan: Plan, judgement: Judgement) -> str:
    """`"4 × 2, LoRA: up to 9.20 GiB, 1.40 s a step (1.31 to 1.68), 5,851 tokens/s"`."""
    parts = [f"up to {format_gib(judgement.needs_bytes)}"]
    if judgement.is_priced and judgement.step_time is not None:
        low, middle, high = map(digits, judgement.step_time.seconds)
        parts.append(f"{middle} s a step ({low} to {high})")
        if (speed := rate(plan, judgement)) != NONE:
            parts.append(f"{speed} {rate_unit(plan)}")
    return f"{judgement.candidate.name}: {', '.join(parts)}"


def batch_note(plan: Plan) -> str:
    """That `--sequences-per-step` overrides the script's batch; empty if it does not."""
    if not plan.other_batch:
        return ""
    return (
        f"{plan.sequences} sequences an optimizer step instead of the script's {plan.own_sequences} "
        "(--sequences-per-step): adapt the learning rate and schedule yourself."
    )


def _remedies(plan: Plan) -> Iterator[str]:
    """What to change if nothing fits. Fewer sequences per step help only if the smallest setup has several at once."""
    least = plan.smallest()
    if least is not None and least.prediction is not None and least.prediction.peak_phase == "evaluate":
        rows = (least.training.arguments.per_device_eval_batch_size if least.training is not None else None) or 1
        smaller = f"a --per_device_eval_batch_size below {rows}, or " if rows > 1 else ""
        yield f"The evaluation needs most: use {smaller}shorter rows in it."
    one_by_one = least is not None and least.candidate.micro_batch_size == 1
    fewer = "" if one_by_one else " or fewer sequences an optimizer step"
    larger = ""
    if least is not None:
        sizes = {name: gpu.capacity_bytes for name in KNOWN_GPUS if (gpu := described_gpu(name)) is not None}
        enough = [name for name, size in sizes.items() if limit_bytes(size) >= least.needs_bytes]
        smallest = f"{min(enough, key=lambda name: sizes[name])} is the smallest with" if enough else ""
        larger = f": {smallest or 'no GPU that memkit knows has'} enough memory"
    yield f"Use shorter rows{fewer}, or a larger GPU{larger}."
    if why := plan.left_out.get("DeepSpeed"):
        yield f"DeepSpeed's offloading was not tried: {why}."


def shortfall(plan: Plan) -> str:
    """A few words for a GPU without a proposed setup: `"nothing fits: 29.40 GiB over the limit"`."""
    least = plan.smallest()
    too_much = least.needs_bytes - least.limit_bytes if least is not None else 0
    words = {"unfinished": "nothing found yet", "tight": "tight"}.get(plan.verdict, "nothing fits")
    words += f": {format_gib(too_much)} over the limit" if too_much > 0 else ""
    return f"{words}; with other code: {plan.with_code[0].candidate.name}" if plan.with_code else words


def notes(plan: Plan, *, every: bool = False) -> Iterator[str]:
    """Sentences about what was not tried, and the basis of the figures. `every`: also the reasons why some techniques
    are in no plan."""
    best = plan.proposed
    if count := len(plan.excluded):
        yield f"{count} more setup{'s' * (count != 1)} cannot fit: each needs as much as what does not fit, or more."
    for name, why in plan.left_out.items():
        if every or name not in IN_NO_PLAN:
            yield f"Not tried: {name}: {why}."
    if (never := [name for name in plan.left_out if name in IN_NO_PLAN]) and not every:
        yield f"Never planned: {', '.join(never)} (--json and --html give the reasons)."
    if best is not None and best.is_priced and best.step_time is not None:
        for line in best.step_time.rests_on:
            yield f"{line[0].upper()}{line[1:]}." if line.startswith("times ") else f"Time: {line}."
    if best is not None and best.prediction is not None:
        yield f"Memory: {best.prediction.confidence}."
    per_gpu = plan.sequences // plan.gpus
    is_prime = per_gpu > 3 and all(per_gpu % each for each in range(2, math.isqrt(per_gpu) + 1))
    if best is not None and best.candidate.micro_batch_size == 1 and is_prime:
        more = (per_gpu + 1) * plan.gpus
        yield f"Note: no micro-batch between 1 and {per_gpu} divides {per_gpu}; --sequences-per-step {more} has some."
    for note in plan.notes:
        yield f"Note: {note.rstrip('.')}."


def missing_methods(plan: Plan) -> Iterator[str]:
    """Sentences: why requested methods are in no setup that fits."""
    fitting = {choice.name for each in plan.traced if each.fits for choice in each.candidate.choices}
    none = f"no setup with it fits{' so far' * plan.stopped}"
    yield from (f"{name}: {plan.left_out.get(name, none)}." for name in plan.also if name not in fitting)


def why_no_times(plan: Plan) -> str:
    """Why the time of no setup is known; empty if that of some is."""
    if any(each.is_priced for each in plan.traced):
        return ""
    unknown = list(dict.fromkeys(name for each in plan.traced if each.step_time for name in each.step_time.unknown))
    if unknown:
        return f"No time: memkit has no formula for {', '.join(unknown[:4])}; ranked by memory."
    return "No time: a GPU given by size has no known speed; name one (--gpu NAME); ranked by memory."


def remark(plan: Plan, judgement: Judgement) -> str:
    """What a table says of a setup: why it is not the proposed one, its RAM and disk, and how the result changes."""
    return "; ".join(filter(None, (why(plan, judgement), _host_needs(judgement), judgement.candidate.result)))


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
    if best is not None and judgement is not best and judgement.seconds and best.seconds:
        return _slower(judgement, best)
    return ""


def _host_needs(judgement: Judgement) -> str:
    """RAM and disk of a setup that swaps to a disk; empty for others."""
    prediction = judgement.prediction
    if prediction is None or not (judgement.fits and judgement.swaps):
        return ""
    ram = (prediction.host_rss_bytes or 0) + (prediction.pinned_bytes or 0)
    return f"needs {format_gib(ram)} of RAM and {format_gib(prediction.disk_bytes or 0)} of disk"


def _why_not(judgement: Judgement) -> str:
    too_much = judgement.needs_bytes - judgement.limit_bytes
    if judgement.prediction is None or too_much <= 0:
        return judgement.why.partition("; ")[0]
    return f"{format_gib(too_much)} over the limit"


def _slower(judgement: Judgement, best: Judgement) -> str:
    """How much slower it is, and the part of a step that adds most."""
    assert judgement.seconds and best.seconds and judgement.step_time is not None and best.step_time is not None
    much = _faster(judgement.seconds, best.seconds)
    if judgement.seconds <= (1 + _SAME_SHARE) * best.seconds:
        return much
    here, there = (
        {**dict(each.by_phase), _TRANSFERS: each.seconds[1] - sum(each.by_phase.values())}
        for each in (judgement.step_time, best.step_time)
    )
    longer = {name: here.get(name, 0.0) - there.get(name, 0.0) for name in {**here, **there}}
    phase = max(longer, key=lambda name: longer[name])
    return f"{much}: {phase} {'take' if phase == _TRANSFERS else 'takes'} {_short_time(longer[phase])} more"


def _faster(one_s: float, other_s: float) -> str:
    """The first time compared with the second: `"19 % faster"`, `"2.1 times as slow"`, `"as fast"`."""
    ratio = other_s / one_s
    if abs(one_s / other_s - 1) <= _SAME_SHARE:
        return "as fast"
    if ratio > 1:
        return f"{_percent(ratio - 1)} faster" if ratio < 2 else f"{ratio:.1f} times as fast"
    return f"{_percent(1 / ratio - 1)} slower" if ratio > 0.5 else f"{1 / ratio:.1f} times as slow"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def rate_unit(plan: Plan) -> str:
    return "tokens/s" if any(each.tokens for each in plan.traced) else "samples/s"


def rate(plan: Plan, judgement: Judgement) -> str:
    """Speed on all GPUs, in the unit of `rate_unit`."""
    if not judgement.is_priced or not judgement.seconds:
        return NONE
    if rate_unit(plan) == "samples/s":
        speed = (plan.own_sequences if judgement is plan.own else plan.sequences) / judgement.seconds
        return f"{speed:,.0f}" if speed >= 100 else f"{speed:.3g}"
    return f"{judgement.tokens_per_second:,.0f}" if judgement.tokens_per_second is not None else NONE


def digits(value: float) -> str:
    """Three significant digits, but at most three decimals."""
    return f"{value:.{0 if value >= 100 else 1 if value >= 10 else 2 if value >= 1 else 3}f}"


def _short_time(value: float) -> str:
    return f"{digits(value)} s" if value >= 1 else f"{1000 * value:.3g} ms"


def run_of(judgement: Judgement) -> str:
    """Time of the whole training with its evaluations and saves: `"45 s"`, `"1 min 20 s"`, `"1 h 20 min"`,
    `"3 d 4 h"`."""
    if not judgement.is_priced or not judgement.run_seconds:
        return NONE
    seconds = judgement.run_seconds[1]
    minutes, hours = round(seconds / 60), round(seconds / 3600)
    if seconds < 59.5:
        return _short_time(seconds) if seconds < 10 else f"{seconds:.0f} s"
    if seconds < 599.5:
        return f"{round(seconds) // 60} min {round(seconds) % 60} s"
    if minutes < 60:
        return f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60} min" if minutes < 24 * 60 else f"{hours // 24} d {hours % 24} h"


def cost(value: float | None) -> str:
    """A cost in the currency of the user's prices."""
    if value is None:
        return NONE
    return "< 0.0001" if value < 1e-4 else f"{value:,.2f}" if value >= 0.1 else f"{value:.2g}"
