"""A plan in sentences, rows and lines to paste. What is not known is `—`, never a number."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from hf_memkit.catalog.fit import FULL_SHARE, limit_bytes
from hf_memkit.catalog.gpu_sizes import KNOWN_GPUS
from hf_memkit.catalog.hardware import described_gpu
from hf_memkit.common.answer.answer import NONE, Cell, Code
from hf_memkit.common.units import GIB, format_gib
from hf_memkit.plan.choices import IN_NO_PLAN
from hf_memkit.plan.front_end_keys import front_end
from hf_memkit.plan.judgement import Judgement
from hf_memkit.plan.pasted import Pasted
from hf_memkit.plan.plan import Plan
from hf_memkit.plan.prices import million_tokens_cost, price_of, run_cost
from hf_memkit.setup.techniques.registry import GROUPS, Group

TITLES: Final[Mapping[Group, str]] = {
    "same result": "Same result",
    "nearly the same": "Nearly the same result",
    "another method": "Another method, requested by --also",
}

_BESIDE: Final = "transfers and work on the CPU"


def gpu_of(plan: Plan) -> str:
    """`"2 × RTX 4090"`."""
    name = plan.machine.gpu.name if plan.machine.gpu is not None else "no GPU"
    return f"{plan.gpus} × {name}" if plan.gpus > 1 else name


def subject(plan: Plan) -> str:
    """What was planned, and how much of it was looked at."""
    gpu = plan.machine.gpu
    memory = ""
    if gpu is not None:
        usable = format_gib(limit_bytes(gpu.capacity_bytes))
        memory = f", {format_gib(gpu.capacity_bytes)}, of which a setup may use {usable} ({_percent(FULL_SHARE)})"
    text = f"{plan.setups} setup{'s' * (plan.setups != 1)} compared, {len(plan.traced)} of them traced"
    if plan.stopped:
        text += f"; search not finished{longer([plan])}"
    batch = f"{plan.sequences} sequence{'s' * (plan.sequences != 1)} an optimizer step"
    return f"{plan.name}; {gpu_of(plan)}{memory}; {batch}; {text}"


def longer(plans: Sequence[Plan]) -> str:
    """What gives a search more time, unless the user has ended it."""
    return "" if any(plan.stopped_by_hand for plan in plans) else " (--limit SECONDS gives it more time)"


def answer(plan: Plan) -> tuple[str, str]:
    """The first line: (verdict, the rest)."""
    best = plan.proposed
    if plan.verdict == "unfinished":
        tried = f"{len(plan.compared)} tried, search stopped"
        return f"NO SETUP FOUND YET FOR {gpu_of(plan)}", f"{tried}; {plan.lacking()}"
    if best is None and (tight := plan.tight) is not None and not plan.failed:
        needs = f"needs up to {format_gib(tight.needs_bytes)}, {format_gib(tight.needs_bytes - tight.limit_bytes)}"
        slow = "it completes, but can be slow"
        return f"TIGHT ON {gpu_of(plan)}", f"nothing fits; {tight.candidate.name} {needs} over the limit: {slow}"
    if best is None:
        as_it_is = " WITHOUT A CHANGE OF CODE" if plan.with_code and not plan.failed else ""
        return f"NOTHING {'RAN ON' if plan.failed else 'FITS'} {gpu_of(plan)}{as_it_is}", plan.lacking()
    verdict = "FASTEST" if best.is_priced else "LEANEST"
    verdict = f"{verdict}{' SO FAR' * plan.stopped} THAT FITS {gpu_of(plan)}"
    return verdict, _needs(plan, best)


def beside(plan: Plan) -> Iterator[str]:
    """What stands below the first line: what the proposed setup does to the result, the script as it stands, and what
    is faster and nearly the same; a sentence each."""
    best, own = plan.proposed, plan.own
    yield from (f"{each}." for each in warnings(plan))
    if parts := other_batch(plan):
        yield parts
    if best is None and plan.failed:
        return
    if best is None and plan.with_code:
        for each in plan.with_code:
            yield f"It fits with other code: {_needs(plan, each)}."
        return
    if best is None:
        yield from ([_unfinished(plan)] if plan.stopped else _to_give(plan))
        return
    if best.candidate.group != "same result":
        same = plan.best("same result")
        if same is not None and same.seconds and best.seconds:
            slower = f"{same.seconds / best.seconds:.1f} times as long a step"
            yield f"This is {best.candidate.group}: {best.candidate.result}."
            yield f"The same result takes {slower}: {same.candidate.name}."
        else:
            none = "No setup with the same result found yet" if plan.stopped else "Nothing fits with the same result"
            yield f"{none}. This is {best.candidate.group}: {best.candidate.result}."
    if best.training is not None and best.training.fp16_overflow:
        yield f"{best.training.fp16_overflow}."
    if best.swaps:
        yield f"It {_off_the_gpu(best)}."
    if best.candidate == own.candidate:
        yield "Your script already has this setup: nothing to change."
    elif not own.fits:
        needs = f"needs up to {format_gib(own.needs_bytes)}, " if own.needs_bytes > own.limit_bytes else ""
        does = "is tight" if own.tight else "does not fit"
        yield f"Your script as it is, {own.candidate.name}, {does}: {needs}{_why_not(own)}."
    elif plan.other_batch:
        known = [f"{speed} {rate_unit(plan)}"] if (speed := rate(plan, own)) != NONE else []
        known += [f"{run} in total"] if (run := run_of(own)) != NONE else []
        yield f"Your script as it is, {own.candidate.name}, fits{': ' * bool(known)}{', '.join(known)}."
    elif own.is_priced and best.is_priced and own.seconds and best.seconds:
        yield f"Your script as it is, {own.candidate.name}, fits and is {_faster(own.seconds, best.seconds)}."
    other = plan.faster()
    if other is not None and other.seconds and best.seconds:
        much = _faster(other.seconds, best.seconds)
        yield f"Nearly the same result, and {much}: {other.candidate.name}: {other.candidate.result}."
    for each in plan.with_code:
        much = ""
        if each.is_priced and best.is_priced and each.seconds and best.seconds:
            much = f", and {_faster(each.seconds, best.seconds)}"
        parts = f": {each.candidate.result}" if each.candidate.result else ""
        yield f"{each.candidate.group.capitalize()}, with other code{much}: {each.candidate.name}{parts}."


def warnings(plan: Plan) -> tuple[str, ...]:
    """What costs the proposed setup much, or the script as it stands where nothing fits."""
    shown = (plan.proposed or plan.own).prediction
    return shown.warnings if shown is not None else ()


def _needs(plan: Plan, judgement: Judgement) -> str:
    """A setup with what it takes: `"4 × 2, LoRA: up to 9.20 GiB, 1.40 s a step (1.31 to 1.68), 5,851 tokens/s"`."""
    parts = [f"up to {format_gib(judgement.needs_bytes)}"]
    if judgement.is_priced and judgement.step_time is not None:
        low, middle, high = map(digits, judgement.step_time.seconds)
        parts.append(f"{middle} s a step ({low} to {high})")
        if (speed := rate(plan, judgement)) != NONE:
            parts.append(f"{speed} {rate_unit(plan)}")
    return f"{judgement.candidate.name}: {', '.join(parts)}"


def parses(plan: Plan) -> bool:
    """Whether arguments go to a command line: a script that reads them with HfArgumentParser, or the user's own."""
    own = plan.own.training
    return plan.script is None or own is None or own.facts.parses_arguments


def where(plan: Plan, *, with_code: bool = False) -> str:
    """Where the arguments of a setup go. `with_code`: beside other code, for which no plan file is."""
    if (front := front_end(plan.front_end)) is not None:
        return f"{'Add to the command' if front.options else 'Write into the config'} of {front.name}:"
    if not parses(plan):
        instead = "" if with_code else ", or use --write and memkit run --plan"
        return f"Write where the script makes its TrainingArguments{instead}:"
    whose = "Give your training script" if plan.script is None else "Add to your script's arguments"
    return f"{whose} (they override earlier ones):"


def to_paste(plan: Plan, paste: Pasted, *, with_code: bool = False) -> Iterator[Code]:
    """What is pasted of a setup. `with_code`: beside other code, which no plan file holds."""
    by_parser = parses(plan) or bool(paste.front_end)
    if first := paste.typed_first if by_parser else paste.before:
        yield Code("First type:", first)
    if by_parser and not paste.front_end:
        yield Code(where(plan, with_code=with_code), paste.flags, words=True)
    else:
        yield Code(where(plan, with_code=with_code), paste.front_end or paste.python.splitlines())
    if paste.no_flag and by_parser and not paste.front_end:
        yield Code(
            "Where the script makes its TrainingArguments (no flag can set None; or use memkit run --plan):",
            paste.no_flag,
        )
    if paste.model and not paste.front_end:
        instead = "" if with_code else "; or use memkit run --plan"
        yield Code(f"Where the script loads its model (no flag sets this{instead}):", paste.model.splitlines())


def start(plan: Plan) -> tuple[str, str] | None:
    """How a script is started on several GPUs or with DeepSpeed, (in words, the command); None: as ever."""
    if plan.proposed is not None and plan.launched is not None:
        return "Start it with your launcher:", f"{plan.launch} ARGUMENTS"
    if plan.proposed is None or (plan.gpus == 1 and not plan.needs_launcher):
        return None
    if plan.gpus == 1:
        return "DeepSpeed needs a launcher. Start it with:", f"{plan.launch} ARGUMENTS"
    return f"Start it on {plan.gpus} GPUs (with or without DeepSpeed):", f"{plan.launch} ARGUMENTS"


def other_batch(plan: Plan) -> str:
    """That another batch than the script's was asked for; empty: it was not."""
    if not plan.other_batch:
        return ""
    return (
        f"{plan.sequences} sequences an optimizer step instead of the script's {plan.own_sequences} "
        "(--sequences-per-step): adapt the learning rate and schedule yourself."
    )


def _to_give(plan: Plan) -> Iterator[str]:
    """What to give where nothing fits: of fewer sequences a step the leanest has as many at once, if that is one."""
    least = plan.smallest()
    if least is not None and least.prediction is not None and least.prediction.peak_phase == "evaluate":
        rows = (least.training.arguments.per_device_eval_batch_size if least.training is not None else None) or 1
        smaller = f"a --per_device_eval_batch_size below {rows}, or " if rows > 1 else ""
        yield f"The evaluation needs most: use {smaller}shorter rows in it."
    one_by_one = least is not None and least.candidate.micro_batch_size == 1
    larger = _smallest_gpu(least.needs_bytes) if least is not None else ""
    named = (
        f": {larger} is the smallest with enough memory" if larger else ": no GPU that memkit knows has enough memory"
    )
    yield (
        f"Use shorter rows{'' if one_by_one else ' or fewer sequences an optimizer step'}, or a larger "
        f"GPU{named if least is not None else ''}."
    )
    if why := plan.left_out.get("DeepSpeed"):
        yield f"DeepSpeed's offloading was not tried: {why}."


def _unfinished(plan: Plan) -> str:
    """What to do where the search was stopped before it found a setup."""
    if plan.stopped_by_hand:
        return "The search is not finished: other setups may fit. Run it again, and let it finish."
    return "The search is not finished: other setups may fit. Give it more time: --limit SECONDS."


def _smallest_gpu(needs: int) -> str:
    """The named GPU with the least memory of those where this fits; empty: there is none."""
    known = {name: described_gpu(name) for name in KNOWN_GPUS}
    sizes = {
        name: gpu.capacity_bytes for name, gpu in known.items() if gpu and limit_bytes(gpu.capacity_bytes) >= needs
    }
    return min(sizes, key=lambda name: sizes[name], default="")


def _is_prime(number: int) -> bool:
    """Of a number of sequences, such that no micro-batch lies between one and all of them."""
    return number > 3 and all(number % each for each in range(2, math.isqrt(number) + 1))


def groups(plan: Plan) -> dict[Group, list[Judgement]]:
    """Setups that fit, ranked, by what they do to the result; without those that need a change of code."""
    ranked = [each for each in plan.ranked if not each.candidate.code]
    by_group = {group: [each for each in ranked if each.candidate.group == group] for group in GROUPS}
    return {group: setups for group, setups in by_group.items() if setups}


def too_large(plan: Plan) -> list[Judgement]:
    """Setups that do not fit, or cannot be predicted: the fastest first."""
    lost = [each for each in plan.compared if not each.fits]
    return sorted(lost, key=lambda each: (not each.is_priced, each.seconds or 0.0, each.needs_bytes))


def best_gpu(ranked: Sequence[Plan], prices: Mapping[str, float]) -> tuple[str, str]:
    """The first line of several GPUs, ranked: (verdict, the rest)."""
    first = ranked[0]
    best = first.proposed
    so_far = " SO FAR" if any(plan.stopped for plan in ranked) else ""
    if best is None:
        return (
            "NO SETUP FOUND YET ON any of these GPUs" if so_far else "NOTHING FITS any of these GPUs",
            first.lacking(),
        )
    spent = run_cost(best, price_of(first, prices), first.gpus)
    parts = [best.candidate.name]
    if (run := run_of(best)) != NONE:
        parts.append(f"{run} in total")
    if (speed := rate(first, best)) != NONE:
        parts.append(f"{speed} {rate_unit(first)}")
    if spent is not None:
        parts.append(f"costs {cost(spent)}")
    verdict = "CHEAPEST" if spent is not None else "FASTEST" if best.is_priced else "FITS"
    return f"{verdict}{so_far}: {gpu_of(first)}", ", ".join(parts)


def gpu_cells(plan: Plan, prices: Mapping[str, float]) -> tuple[str, ...]:
    """What a GPU's best setup takes: GiB, its rate, the run, and what that and a million tokens cost."""
    best, price = plan.proposed, price_of(plan, prices)
    if best is None:
        return (NONE,) * 5
    costs = run_cost(best, price, plan.gpus), million_tokens_cost(best, price, plan.gpus)
    return (f"{best.needs_bytes / GIB:.2f}", rate(plan, best), run_of(best), *map(cost, costs))


def missing(plan: Plan) -> str:
    """In a few words, of a GPU for which nothing is proposed."""
    least = plan.smallest()
    too_much = least.needs_bytes - least.limit_bytes if least is not None else 0
    parts = {"unfinished": "nothing found yet", "tight": "tight"}.get(plan.verdict, "nothing fits")
    parts += f": {format_gib(too_much)} over the limit" if too_much > 0 else ""
    return f"{parts}; with other code: {plan.with_code[0].candidate.name}" if plan.with_code else parts


def notes(plan: Plan, *, every: bool = False) -> Iterator[str]:
    """What was not tried, and what the figures rest on, a sentence each. `every`: what no plan has too, and why."""
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
    if best is not None and best.candidate.micro_batch_size == 1 and _is_prime(per_gpu):
        yield (
            f"Note: no micro-batch between 1 and {per_gpu} divides {per_gpu}; --sequences-per-step "
            f"{(per_gpu + 1) * plan.gpus} has some."
        )
    for note in plan.notes:
        yield f"Note: {note.rstrip('.')}."


def asked(plan: Plan) -> Iterator[str]:
    """Why methods that were asked for are in no setup that fits, a sentence each."""
    fitting = {choice.name for each in plan.traced if each.fits for choice in each.candidate.choices}
    none = f"no setup with it fits{' so far' * plan.stopped}"
    for name in plan.also:
        if name not in fitting:
            yield f"{name}: {plan.left_out.get(name, none)}."


def time_not_known(plan: Plan) -> str:
    """Why no time is known, where it is of none of the setups; empty: it is known of some."""
    if any(each.is_priced for each in plan.traced):
        return ""
    unknown = list(dict.fromkeys(name for each in plan.traced if each.step_time for name in each.step_time.unknown))
    if unknown:
        return f"no time: memkit has no formula for {', '.join(unknown[:4])}; ranked by memory"
    return "no time: a GPU given by size has no known speed; name one (--gpu NAME); ranked by memory"


def row(plan: Plan, judgement: Judgement, price: float | None) -> tuple[str | Cell, ...]:
    """A setup in a table: name with the reason, GiB, seconds a step, rate, the run and its cost."""
    time = judgement.step_time if judgement.is_priced else None
    reason = "; ".join(filter(None, (why(plan, judgement), _off_the_gpu(judgement), judgement.candidate.result)))
    step = Cell(NONE)
    if time is not None:
        step = Cell(digits(time.seconds[1]), f"{digits(time.seconds[0])}–{digits(time.seconds[2])}")
    return (
        Cell(judgement.candidate.name, reason, judgement is plan.proposed),
        f"{judgement.needs_bytes / GIB:.2f}" if judgement.prediction is not None else NONE,
        step,
        rate(plan, judgement),
        run_of(judgement),
        cost(run_cost(judgement, price, plan.gpus)) if time is not None else NONE,
    )


def why(plan: Plan, judgement: Judgement) -> str:
    """Why a setup is not the one that is proposed; empty: it is, or nothing is known."""
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


def _off_the_gpu(judgement: Judgement) -> str:
    """What a setup that swaps needs beside the GPU; empty: it swaps nothing, or does not fit."""
    text = judgement.prediction
    if text is None or not (judgement.fits and judgement.swaps):
        return ""
    ram = (text.host_rss_bytes or 0) + (text.pinned_bytes or 0)
    return f"needs {format_gib(ram)} of RAM and {format_gib(text.disk_bytes or 0)} of disk"


def _why_not(judgement: Judgement) -> str:
    too_much = judgement.needs_bytes - judgement.limit_bytes
    if judgement.prediction is None or too_much <= 0:
        return judgement.why.partition("; ")[0]
    return f"{format_gib(too_much)} over the limit"


_SAME: Final = 0.005
"""Of the time of another: a smaller difference rounds to none."""


def _slower(judgement: Judgement, best: Judgement) -> str:
    """By how much, and what of a step takes longer."""
    assert judgement.seconds and best.seconds and judgement.step_time is not None and best.step_time is not None
    parts = _faster(judgement.seconds, best.seconds)
    if judgement.seconds <= (1 + _SAME) * best.seconds:
        return parts
    parts = [
        {**dict(each.by_phase), _BESIDE: each.seconds[1] - sum(each.by_phase.values())}
        for each in (judgement.step_time, best.step_time)
    ]
    longer = {name: parts[0].get(name, 0.0) - parts[1].get(name, 0.0) for name in {**parts[0], **parts[1]}}
    phase = max(longer, key=lambda name: longer[name])
    more = longer[phase]
    return f"{parts}: {phase} {'take' if phase == _BESIDE else 'takes'} {_short_time(more)} more"


def _faster(one_s: float, other_s: float) -> str:
    """What the first is beside the second: `"19 % faster"`, `"2.1 times as slow"`, `"as fast"`."""
    ratio = other_s / one_s
    if abs(one_s / other_s - 1) <= _SAME:
        return "as fast"
    if ratio > 1:
        return f"{_percent(ratio - 1)} faster" if ratio < 2 else f"{ratio:.1f} times as fast"
    return f"{_percent(1 / ratio - 1)} slower" if ratio > 0.5 else f"{1 / ratio:.1f} times as slow"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def rate_unit(plan: Plan) -> str:
    return "tokens/s" if any(each.tokens for each in plan.traced) else "samples/s"


def rate(plan: Plan, judgement: Judgement) -> str:
    """On all GPUs, with the unit of `rate_unit`."""
    if not judgement.is_priced or not judgement.seconds:
        return NONE
    if rate_unit(plan) == "samples/s":
        text = (plan.own_sequences if judgement is plan.own else plan.sequences) / judgement.seconds
        return f"{text:,.0f}" if text >= 100 else f"{text:.3g}"
    return f"{judgement.tokens_per_second:,.0f}" if judgement.tokens_per_second is not None else NONE


def digits(value: float) -> str:
    """Three significant digits, and never more than three decimals."""
    return f"{value:.{0 if value >= 100 else 1 if value >= 10 else 2 if value >= 1 else 3}f}"


def _short_time(value: float) -> str:
    return f"{digits(value)} s" if value >= 1 else f"{1000 * value:.3g} ms"


def run_of(judgement: Judgement) -> str:
    """The whole training, with its evaluations and saves."""
    return duration(judgement.run_seconds[1]) if judgement.is_priced and judgement.run_seconds else NONE


def duration(value: float) -> str:
    """`"50 ms"`, `"45 s"`, `"1 min 20 s"`, `"12 min"`, `"1 h 20 min"`, `"3 d 4 h"`."""
    if value < 59.5:
        return _short_time(value) if value < 10 else f"{value:.0f} s"
    if value < 599.5:
        return f"{round(value) // 60} min {round(value) % 60} s"
    minutes = round(value / 60)
    if minutes < 60:
        return f"{minutes} min"
    if minutes < 24 * 60:
        return f"{minutes // 60} h {minutes % 60} min"
    hours = round(value / 3600)
    return f"{hours // 24} d {hours % 24} h"


def cost(value: float | None) -> str:
    """In the currency of the user's prices."""
    if value is None:
        return NONE
    if value < 1e-4:
        return "< 0.0001"
    return f"{value:,.2f}" if value >= 0.1 else f"{value:.2g}"
