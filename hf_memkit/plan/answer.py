"""The answer of `memkit plan`: the fastest setup that fits, what to paste, the plot and the ranked tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
from hf_memkit.setup.techniques.registry import GROUPS

_SHORT_ROWS: Final = 4
_LONGEST: Final = 300
"""Characters of a sentence with `--short`, which may contain a library's whole message; `--json` has all of it."""

_WORDS: Final = {
    "micro-batch × accumulation": "Sequences of one GPU in one forward pass, and how many such an optimizer step has.",
    "GiB": "Maximum of GPU memory: what PyTorch's allocator reserves, and what is outside it. 2³⁰ bytes.",
    "fits": f"Takes at most {LIMIT_NAME}; RAM and disk suffice. A tight setup takes more and can be slow.",
    "s a step": "Time of one optimizer step, computed from the traced operations, and its expected range.",
    "run": "The whole training with its evaluations and saves.",
    "frontier": "Setups for which no other is both faster and smaller.",
}
_GLOSSARY: Final = Facts(list(_WORDS.items()), "glossary", heading="Words", name="words", views=View.PAGE)


def plan_answer(
    plans: Sequence[Plan], prices: Prices, ran: Sequence[Verified] = (), *, compared: bool = False
) -> Answer:
    """The answer for one plan, or for plans of several GPUs.

    Args:
        ran: results of `--verify` for the setups of the one plan.
        compared: whether GPUs are ranked, even if there is only one.
    """
    if compared or len(plans) > 1:
        return _compared(ranked_gpus(plans, prices), prices)
    (plan,) = plans
    verdict, reason = wording.headline(plan)
    first = (*_head(plan), *verified_blocks(ran), *_best_to_paste(plan), *_start(plan))
    blocks = (*first, *_rest(plan, price_of(plan, prices), "plan-0"), _GLOSSARY)
    return Answer(title=f"Plan: {plan.name}", verdict=verdict, reason=f"{reason}.", state=_state(plan), blocks=blocks)


def _compared(ranked: Sequence[Plan], prices: Prices) -> Answer:
    verdict, reason = _best_gpu(ranked, prices)
    blocks: list[AnswerBlock] = [_gpus(ranked, prices)]
    for number, plan in enumerate(ranked):
        blocks.append(Lines([f"{line}." for line in wording.warnings(plan)], views=View.SHORT))
        first = Lines([f"{': '.join(wording.headline(plan))}."], "strong", heading=wording.gpu_of(plan))
        blocks += only(View.FULL, first, *_head(plan), *_best_to_paste(plan))
        blocks += only(View.PAGE, *_rest(plan, price_of(plan, prices), f"plan-{number}"))
    blocks += next(filter(None, (list(_start(plan)) for plan in ranked)), [])
    blocks.append(Lines(["All setups of one GPU: --gpu NAME instead of --gpus-to-compare."], views=View.ON_TERMINAL))
    blocks.append(_GLOSSARY)
    title = f"Plan: {ranked[0].name}"
    return Answer(title=title, verdict=verdict, reason=f"{reason}.", state=_state(ranked[0]), blocks=blocks)


def _best_gpu(ranked: Sequence[Plan], prices: Prices) -> tuple[str, str]:
    """The first line for several GPUs: (verdict, reason)."""
    first, best = ranked[0], ranked[0].proposed
    stopped = any(plan.stopped for plan in ranked)
    if best is None:
        return f"{'NO SETUP FOUND YET' if stopped else 'NOTHING FITS'} ON ANY OF THESE GPUS", wording.lacking(first)
    spent = wording.cost(run_cost(best, price_of(first, prices), first.ranks))
    run, speed = wording.run_of(best), wording.rate(first, best)
    figures = {f"{run} in total": run, f"{speed} {first.rate_unit}": speed, f"costs {spent}": spent}
    known = [text for text, value in figures.items() if value != NONE]
    rank = "CHEAPEST" if spent != NONE else "FASTEST"
    verdict = rank if best.is_priced else "FITS"
    return f"{verdict}{' SO FAR' * stopped}: {wording.gpu_of(first)}", ", ".join([best.candidate.name, *known])


def _gpus(ranked: Sequence[Plan], prices: Prices) -> Table:
    rows: list[tuple[str | Cell, ...]] = []
    for plan in ranked:
        best, price = plan.proposed, price_of(plan, prices)
        name = Cell(wording.gpu_of(plan), "search not finished" if plan.stopped else "", best is not None)
        if best is None:
            rows.append((name, wording.lacking(plan), *(NONE,) * 5))
            continue
        changes = best.candidate.group != "same result"
        setup = Cell(best.candidate.name, f"{best.candidate.group}: {best.candidate.result}" if changes else "")
        gib, _, speed, run = wording.figures(plan, best).values()
        costs = run_cost(best, price, plan.ranks), million_tokens_cost(best, price, plan.ranks)
        rows.append((name, setup, gib, speed, run, *map(wording.cost, costs)))
    columns = ("GPU", "best setup, or what is missing", ">GiB", f">{ranked[0].rate_unit}", ">run", ">cost",
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
    if (best := plan.proposed) is not None:
        figures = {**wording.figures(plan, best), "result": best.candidate.group}
        tiles = [(name, value) for name, value in figures.items() if value != NONE]
        yield Facts(tiles, "tiles", views=View.PAGE)


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
    if plan.proposed is not None and (plan.launched is not None or plan.ranks > 1 or plan.needs_launcher):
        why = "DeepSpeed needs a launcher. " if plan.launched is None and plan.ranks == 1 else ""
        yield Code(f"{why}Start it with:", [f"{plan.launch} ARGUMENTS"])


def _rest(plan: Plan, price: float | None, place: str) -> Iterator[AnswerBlock]:
    """Other setups to paste, the plot, the tables, and the basis of the figures."""
    if (faster := plan.faster()) is not None:
        heading = f"Faster, and {faster.candidate.group}: {faster.candidate.name}"
        yield from only(View.FULL, *_to_paste(plan, faster, heading))
    for each in plan.with_code:
        yield from only(View.FULL, *_other_code(plan, each))
    if (chart := plot(plan, place)) is not None:
        yield chart
    yield from _tables(plan, price)
    yield Lines(list(wording.missing_methods(plan)), short_limit=_LONGEST, views=View.SHORT)
    yield Lines(["Omit --short to see all setups; --json prints every number."], views=View.SHORT)
    yield from only(View.FULL, *_other_forms(plan))
    yield Lines(list(wording.notes(plan)), "note", heading="What it rests on", views=View.FULL)


def _tables(plan: Plan, price: float | None) -> Iterator[Table]:
    """The setups of each group that fit, those with other code, and those that do not fit."""
    columns = ("setup", *(f">{name}" for name in wording.figures(plan, plan.own)), ">cost")
    fitting = [each for each in plan.ranked if not each.candidate.code]
    lost = [each for each in plan.compared if not each.fits]
    lost.sort(key=lambda each: (not each.is_priced, each.seconds or 0.0, each.needs_bytes))
    tables = {group.capitalize(): [each for each in fitting if each.candidate.group == group] for group in GROUPS}
    first = next((title for title, setups in tables.items() if setups), "")  # the only one with --short
    tables["With other code"] = [each for each in plan.ranked if each.candidate.code]
    tables["Tight, or does not fit; fastest first"] = lost
    for title, setups in tables.items():
        if setups:
            rows = [_row(plan, each, price) for each in setups]
            views = View.ALL if title == first else View.FULL
            yield Table(columns, rows, marked=True, short_rows=_SHORT_ROWS, heading=title, views=views)


def _row(plan: Plan, judgement: Judgement, price: float | None) -> tuple[str | Cell, ...]:
    gib, step_s, speed, run = wording.figures(plan, judgement).values()
    time = judgement.step_time if judgement.is_priced else None
    low_to_high = f"{wording.digits(time.seconds[0])}–{wording.digits(time.seconds[2])}" if time is not None else ""
    name = Cell(judgement.candidate.name, wording.remark(plan, judgement), judgement is plan.proposed)
    return name, gib, Cell(step_s, low_to_high), speed, run, wording.cost(run_cost(judgement, price, plan.ranks))


def _to_paste(plan: Plan, judgement: Judgement, heading: str) -> list[Code]:
    """The lines to paste for a setup, the first below the heading."""
    first, *others = _settings(plan, pasted(judgement.candidate, command=plan.front_end))
    return [replace(first, heading=heading), *others]


def _other_code(plan: Plan, judgement: Judgement) -> list[Code]:
    """The change of the script, as a diff that `patch` accepts or as lines; then the settings."""
    candidate = judgement.candidate
    paste = pasted(candidate, plan.own.training, command=plan.front_end)
    result = f"{candidate.result[0].upper()}{candidate.result[1:]}. " if candidate.result else ""
    intro = f"{result}Change the script{'; patch -p0 reads this' if paste.diff else ''}:"
    lines = (paste.diff or paste.code).splitlines()
    change = Code(intro, lines, flush=bool(paste.diff), heading=f"With other code: {candidate.name}")
    return [change, *_settings(plan, paste)]


def _settings(plan: Plan, paste: Pasted) -> Iterator[Code]:
    """Where each setting goes, and its lines."""
    by_parser = _parses_arguments(plan) or bool(paste.front_end)
    plan_file = "" if paste.code else "; or use --write and memkit run --plan"  # which cannot hold code
    if first := paste.typed_first if by_parser else paste.before:
        yield Code("First type:", first)
    if (front := front_end(plan.front_end)) is not None:
        place = "Add to the command" if front.options else "Write into the config"
        yield Code(f"{place} of {front.name}:", paste.front_end)
        return

    make_arguments = "Where the script makes its TrainingArguments"
    if by_parser:
        whose = "Give your training script" if plan.script is None else "Add to your script's arguments"
        yield Code(f"{whose} (they override earlier ones):", paste.flags, words=True)
        if paste.no_flag:
            yield Code(f"{make_arguments} (no flag can set None{plan_file}):", paste.no_flag)
    else:
        yield Code(f"{make_arguments}{plan_file}:", paste.python.splitlines())
    if paste.model:
        yield Code(f"Where the script loads its model (no flag sets this{plan_file}):", paste.model.splitlines())


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
        "gpu": plan.gpu.to_json(),
        "gpus": plan.gpus,
        "nodes": plan.nodes,
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
        "run_cost": run_cost(best, price, plan.ranks),
        "million_tokens_cost": million_tokens_cost(best, price, plan.ranks),
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
