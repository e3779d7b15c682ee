"""The answer of `memkit plan`: the fastest setup that fits, what to paste, the plot and the ranked tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from hf_memkit.catalog.fit import FULL_SHARE, LIMIT_NAME
from hf_memkit.common.answer.answer import (
    NONE,
    Answer,
    AnswerBlock,
    Cell,
    Code,
    Facts,
    Lines,
    State,
    Table,
    View,
    only,
)
from hf_memkit.common.units import GIB
from hf_memkit.plan import wording
from hf_memkit.plan.front_end_keys import front_end
from hf_memkit.plan.judgement import Judgement
from hf_memkit.plan.pasted import Pasted, pasted
from hf_memkit.plan.plan import Plan
from hf_memkit.plan.plot import plot
from hf_memkit.plan.prices import Prices, million_tokens_cost, price_of, ranked_gpus, run_cost
from hf_memkit.plan.verify import Verified
from hf_memkit.setup.techniques.registry import Group

_SHORT_ROWS: Final = 4
_LONGEST: Final = 300
"""Characters of a sentence with `--short`, which may contain a library's whole message; `--json` has all of it."""

_TITLES: Final[Mapping[Group, str]] = {
    "same result": "Same result",
    "nearly the same": "Nearly the same result",
    "another method": "Another method, requested by --also",
}

_WORDS: Final = (
    (
        "micro-batch × accumulation",
        "Sequences of one GPU in one forward pass, and how many such an optimizer step has.",
    ),
    (
        "GiB",
        "Maximum that the process takes of the GPU: what PyTorch's allocator reserves, and what is outside it. 2³⁰ "
        "bytes.",
    ),
    (
        "fits",
        f"It takes at most {LIMIT_NAME}, and RAM and disk suffice. Beyond that it may be tight: it completes, but the "
        "allocator may free its cache and try again, which makes steps several times slower.",
    ),
    ("s a step", "Of one optimizer step, computed from the traced operations, with the range in which it should lie."),
    ("run", "The whole training with its evaluations and saves."),
    ("frontier", "Setups for which no other is both faster and smaller."),
)


def plan_answer(
    plans: Sequence[Plan], prices: Prices, ran: Sequence[Verified] = (), *, compared: bool = False
) -> Answer:
    """The answer for one plan, or for plans of several GPUs.

    Args:
        ran: results of `--verify` for the setups of the one plan.
        compared: whether GPUs are ranked, even if there is only one.
    """
    glossary = Facts(_WORDS, "glossary", heading="Words", name="words", views=View.PAGE)
    if compared or len(plans) > 1:
        return _compared(ranked_gpus(plans, prices), prices).then(glossary)
    (plan,) = plans
    first = (*_head(plan), *verified_blocks(ran), *_best_to_paste(plan), *_start(plan))
    blocks = (*first, *_rest(plan, price_of(plan, prices), "plan-0"), glossary)
    verdict, reason = wording.headline(plan)
    return Answer(title=f"Plan: {plan.name}", verdict=verdict, reason=f"{reason}.", state=_state(plan), blocks=blocks)


def _compared(ranked: Sequence[Plan], prices: Prices) -> Answer:
    verdict, reason = _best_gpu(ranked, prices)
    blocks: list[AnswerBlock] = [_gpus(ranked, prices)]
    if early := [wording.gpu_of(plan) for plan in ranked if plan.stopped]:
        early_gpus = f"{', '.join(early)}{wording.limit_hint(ranked)}"
        blocks.append(Lines([f"Search not finished, so others may be faster: {early_gpus}."]))
    for number, plan in enumerate(ranked):
        blocks.append(Lines([f"{line}." for line in wording.warnings(plan)], views=View.SHORT))
        first = f"{': '.join(wording.headline(plan))}."
        blocks.append(Lines([first], "strong", heading=wording.gpu_of(plan), views=View.FULL))
        blocks += only(View.FULL, *_head(plan), *_best_to_paste(plan))
        blocks += only(View.PAGE, *_rest(plan, price_of(plan, prices), f"plan-{number}"))
    blocks += next(filter(None, (list(_start(plan)) for plan in ranked)), [])
    blocks.append(Lines(["All setups of one GPU: --gpu NAME instead of --gpus-to-compare."], views=View.ON_TERMINAL))
    state: State = "good" if ranked[0].proposed is not None else _state(ranked[0])
    return Answer(title=f"Plan: {ranked[0].name}", verdict=verdict, reason=f"{reason}.", state=state, blocks=blocks)


def _best_gpu(ranked: Sequence[Plan], prices: Prices) -> tuple[str, str]:
    """The first line for several GPUs: (verdict, reason)."""
    first, best = ranked[0], ranked[0].proposed
    stopped = any(plan.stopped for plan in ranked)
    if best is None:
        return f"{'NO SETUP FOUND YET ON' if stopped else 'NOTHING FITS'} any of these GPUs", first.lacking()
    spent = run_cost(best, price_of(first, prices), first.gpus)
    run, speed = wording.run_of(best), wording.rate(first, best)
    parts = [best.candidate.name, *([f"{run} in total"] if run != NONE else [])]
    parts += [f"{speed} {wording.rate_unit(first)}"] if speed != NONE else []
    parts += [f"costs {wording.cost(spent)}"] if spent is not None else []
    verdict = "CHEAPEST" if spent is not None else "FASTEST" if best.is_priced else "FITS"
    return f"{verdict}{' SO FAR' * stopped}: {wording.gpu_of(first)}", ", ".join(parts)


def _gpus(ranked: Sequence[Plan], prices: Prices) -> Table:
    rows: list[tuple[str | Cell, ...]] = []
    for plan in ranked:
        best, price = plan.proposed, price_of(plan, prices)
        name = Cell(wording.gpu_of(plan), "search not finished" if plan.stopped else "", best is not None)
        if best is None:
            rows.append((name, Cell(wording.shortfall(plan)), *(NONE,) * 5))
            continue
        changes = best.candidate.group != "same result"
        setup = Cell(best.candidate.name, f"{best.candidate.group}: {best.candidate.result}" if changes else "")
        costs = run_cost(best, price, plan.gpus), million_tokens_cost(best, price, plan.gpus)
        figures = f"{best.needs_bytes / GIB:.2f}", wording.rate(plan, best), wording.run_of(best)
        rows.append((name, setup, *figures, *map(wording.cost, costs)))
    columns = ("GPU", "best setup, or what is missing", ">GiB", f">{wording.rate_unit(ranked[0])}", ">run", ">cost",
               ">per 1M tokens")  # fmt: skip
    return Table(columns, rows, "The best setup of each GPU")


def _state(plan: Plan) -> State:
    if plan.proposed is None:
        return "near" if plan.verdict == "tight" else "bad"
    return "good" if plan.proposed.candidate.group == "same result" else "near"


def _head(plan: Plan) -> Iterator[AnswerBlock]:
    """The blocks below the first line."""
    yield Lines(list(wording.headline_details(plan)), short_limit=_LONGEST)
    yield Lines([wording.subject(plan)], "strong", short_limit=400)
    yield Lines(list(filter(None, [wording.why_no_times(plan)])))
    if (best := plan.proposed) is not None:
        yield Facts(list(_tiles(plan, best)), "tiles", views=View.PAGE)


def _tiles(plan: Plan, best: Judgement) -> Iterator[tuple[str, str]]:
    yield "Takes at most", f"{best.needs_bytes / GIB:.2f} GiB"
    if best.is_priced and best.step_time is not None:
        yield "A step takes", f"{wording.digits(best.step_time.seconds[1])} s"
        if (speed := wording.rate(plan, best)) != NONE:
            yield wording.rate_unit(plan).capitalize(), speed
        if (run := wording.run_of(best)) != NONE:
            yield "The whole run", run
    yield "Result", best.candidate.group


def verified_blocks(ran: Sequence[Verified]) -> Iterator[AnswerBlock]:
    """A table of measured and predicted figures for each setup that ran here."""
    for each in ran:
        yield Table(("", ">measured", ">predicted"), list(each.rows()), heading=each.title)
        if not each.passed:
            yield Lines([f"{each.failed}."], "warning", short_limit=_LONGEST)
            if each.last_lines:
                yield Code("", each.last_lines)
        yield Lines([f"Note: {note}." for note in each.notes], "note", short_limit=_LONGEST)


def _best_to_paste(plan: Plan) -> Iterator[AnswerBlock]:
    best = plan.proposed
    if best is not None and best.candidate != plan.own.candidate:
        yield from _to_paste(plan, best, f"What to paste: {best.candidate.name}")


def _start(plan: Plan) -> Iterator[Code]:
    """The command that starts the script with a launcher; none if `python SCRIPT` suffices."""
    if plan.proposed is None or (plan.launched is None and plan.gpus == 1 and not plan.needs_launcher):
        return
    several = f"Start it on {plan.gpus} GPUs (with or without DeepSpeed):"
    intro = several if plan.gpus > 1 else "DeepSpeed needs a launcher. Start it with:"
    yield Code("Start it with your launcher:" if plan.launched is not None else intro, [f"{plan.launch} ARGUMENTS"])


def _rest(plan: Plan, price: float | None, place: str) -> Iterator[AnswerBlock]:
    """Other setups to paste, the plot, the tables, and the basis of the figures."""
    if (faster := plan.faster()) is not None:
        heading = f"Faster, and {faster.candidate.group}: {faster.candidate.name}"
        yield from only(View.FULL, *_to_paste(plan, faster, heading))
    for each in plan.with_code:
        yield from only(View.FULL, *_other_code(plan, each))
    chart = plot(plan, place)
    if chart is not None:
        yield chart
    columns = ("setup", ">GiB", ">s a step", f">{wording.rate_unit(plan)}", ">run", ">cost")

    def table(heading: str, setups: Sequence[Judgement], views: View = View.FULL) -> Table:
        rows = [_row(plan, each, price) for each in setups]
        return Table(columns, rows, marked=True, short_rows=_SHORT_ROWS, heading=heading, views=views)

    without_code = [each for each in plan.ranked if not each.candidate.code]
    by_group = {group: [each for each in without_code if each.candidate.group == group] for group in _TITLES}
    for number, (group, setups) in enumerate((group, setups) for group, setups in by_group.items() if setups):
        yield table(_TITLES[group], setups, View.FULL if number else View.ALL)
    lost = [each for each in plan.compared if not each.fits]
    lost.sort(key=lambda each: (not each.is_priced, each.seconds or 0.0, each.needs_bytes))
    with_code = [each for each in plan.ranked if each.candidate.code]
    other = {"With other code": with_code, "Tight, or does not fit; fastest first": lost}
    yield from (table(heading, setups) for heading, setups in other.items() if setups)
    yield Lines(list(wording.missing_methods(plan)), short_limit=_LONGEST, views=View.SHORT)
    yield Lines(["Omit --short to see all setups; --json prints every number."], views=View.SHORT)
    yield from only(View.FULL, *_other_forms(plan))
    for every, views in ((False, View.TERMINAL), (True, View.PAGE)):
        yield Lines(list(wording.notes(plan, every=every)), "note", heading="What it rests on", views=views)


def _row(plan: Plan, judgement: Judgement, price: float | None) -> tuple[str | Cell, ...]:
    time = judgement.step_time if judgement.is_priced else None
    low, middle, high = map(wording.digits, time.seconds) if time is not None else ("", NONE, "")
    return (
        Cell(judgement.candidate.name, wording.remark(plan, judgement), judgement is plan.proposed),
        f"{judgement.needs_bytes / GIB:.2f}" if judgement.prediction is not None else NONE,
        Cell(middle, f"{low}–{high}" if time is not None else ""),
        wording.rate(plan, judgement),
        wording.run_of(judgement),
        wording.cost(run_cost(judgement, price, plan.gpus)) if time is not None else NONE,
    )


def _to_paste(plan: Plan, judgement: Judgement, heading: str) -> list[Code]:
    """The lines to paste for a setup, the first below the heading."""
    first, *others = _settings(plan, pasted(judgement.candidate, command=plan.front_end))
    return [replace(first, heading=heading), *others]


def _other_code(plan: Plan, judgement: Judgement) -> list[Code]:
    """The change of the script, as a diff that `patch` accepts or as lines; then the settings."""
    candidate = judgement.candidate
    paste = pasted(candidate, plan.own.training)
    result = f"{candidate.result[0].upper()}{candidate.result[1:]}. " if candidate.result else ""
    intro = f"{result}Change the script{'; patch -p0 reads this' if paste.diff else ''}:"
    lines = (paste.diff or paste.code).splitlines()
    change = Code(intro, lines, flush=bool(paste.diff), heading=f"With other code: {candidate.name}")
    return [change, *_settings(plan, paste, with_code=True)]


def _settings(plan: Plan, paste: Pasted, *, with_code: bool = False) -> Iterator[Code]:
    """Where each setting goes, and its lines. `with_code`: together with other code, which a plan file cannot hold."""
    by_parser = _parses_arguments(plan) or bool(paste.front_end)
    by_plan = "" if with_code else "or use --write and memkit run --plan"
    if first := paste.typed_first if by_parser else paste.before:
        yield Code("First type:", first)
    if (front := front_end(plan.front_end)) is not None:
        place = f"{'Add to the command' if front.options else 'Write into the config'} of {front.name}:"
    elif not by_parser:
        place = f"Write where the script makes its TrainingArguments{', ' * bool(by_plan)}{by_plan}:"
    else:
        whose = "Give your training script" if plan.script is None else "Add to your script's arguments"
        place = f"{whose} (they override earlier ones):"
    if paste.front_end:
        yield Code(place, paste.front_end)
        return
    yield Code(place, paste.flags, words=True) if by_parser else Code(place, paste.python.splitlines())
    if paste.no_flag and by_parser:
        none = "no flag can set None; or use memkit run --plan"
        yield Code(f"Where the script makes its TrainingArguments ({none}):", paste.no_flag)
    if paste.model:
        none = f"no flag sets this{'' if with_code else '; or use memkit run --plan'}"
        yield Code(f"Where the script loads its model ({none}):", paste.model.splitlines())


def _parses_arguments(plan: Plan) -> bool:
    """Whether the script reads its arguments with HfArgumentParser, as the user's own script may."""
    own = plan.own.training
    return plan.script is None or own is None or own.facts.parses_arguments


def _other_forms(plan: Plan) -> Iterator[Code]:
    """The best setup's arguments for scripts that read no flags."""
    best = plan.proposed
    if best is None or best.candidate == plan.own.candidate:
        return
    paste = pasted(best.candidate, command=plan.front_end)
    if not paste.front_end:
        heading = "The same arguments in other forms"
        yield Code("As YAML:", paste.yaml.splitlines(), heading=heading, folded="As YAML")
        if _parses_arguments(plan):
            yield Code("In Python:", paste.python.splitlines(), folded="In Python")


def plans_json(plans: Sequence[Plan], prices: Prices) -> list[dict[str, Any]]:
    """The plans as `--json` prints them, with all setups and figures, in the order of `ranked_gpus`."""
    return [_plan_json(plan, price_of(plan, prices)) for plan in ranked_gpus(plans, prices)]


def _plan_json(plan: Plan, price: float | None) -> dict[str, Any]:
    best, ranked = plan.proposed, plan.ranked
    not_ranked = (each for each in plan.traced if each not in ranked)
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
        "setups": [_setup_json(plan, each) for each in (*ranked, *not_ranked)],
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


def _setup_json(plan: Plan, judgement: Judgement) -> dict[str, Any]:
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
