"""What `memkit plan` answers: the fastest setup that fits, what to paste, the plot and the ranked tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final

from hf_memkit.catalog.fit import LIMIT_NAME
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
from hf_memkit.plan.judgement import Judgement
from hf_memkit.plan.measured_steps import Verified
from hf_memkit.plan.pasted import Pasted, pasted
from hf_memkit.plan.plan import Plan
from hf_memkit.plan.plot import plot
from hf_memkit.plan.prices import price_of, ranked_gpus

_SHORT_ROWS: Final = 4
_LONGEST: Final = 300
"""Characters of a sentence with `--short`, which may hold a library's whole message; `--json` has all of it."""

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
    plans: Sequence[Plan], prices: Mapping[str, float], ran: Sequence[Verified] = (), *, compared: bool = False
) -> Answer:
    """The answer of one plan, or of several GPUs.

    Args:
        ran: what `--verify` has shown of the one plan's setups.
        compared: whether GPUs are ranked, however few.
    """
    if compared or len(plans) > 1:
        return _compared(ranked_gpus(plans, prices), prices)
    (plan,) = plans
    price = price_of(plan, prices)
    first = (*_head(plan), *verified_blocks(ran), *_paste(plan), *_start(plan))
    blocks = (*first, *_rest(plan, price, "plan-0"), _glossary())
    verdict, reason = wording.answer(plan)
    return Answer(title=f"Plan: {plan.name}", verdict=verdict, reason=f"{reason}.", state=_state(plan), blocks=blocks)


def _compared(ranked: Sequence[Plan], prices: Mapping[str, float]) -> Answer:
    verdict, reason = wording.best_gpu(ranked, prices)
    blocks: list[AnswerBlock] = [_gpus(ranked, prices)]
    if early := [wording.gpu_of(plan) for plan in ranked if plan.stopped]:
        blocks.append(
            Lines([f"Search not finished, so others may be faster: {', '.join(early)}{wording.longer(ranked)}."])
        )
    for number, plan in enumerate(ranked):
        blocks.append(Lines([f"{line}." for line in wording.warnings(plan)], views=View.SHORT))
        first = f"{': '.join(wording.answer(plan))}."
        blocks.append(Lines([first], "strong", heading=wording.gpu_of(plan), views=View.FULL))
        blocks += only(View.FULL, *_head(plan), *_paste(plan))
        blocks += only(View.PAGE, *_rest(plan, price_of(plan, prices), f"plan-{number}"))
    blocks += next(filter(None, (list(_start(plan)) for plan in ranked)), [])
    blocks.append(Lines(["All setups of one GPU: --gpu NAME instead of --gpus-to-compare."], views=View.ON_TERMINAL))
    state: State = "good" if ranked[0].proposed is not None else _state(ranked[0])
    title = f"Plan: {ranked[0].name}"
    return Answer(title=title, verdict=verdict, reason=f"{reason}.", state=state, blocks=(*blocks, _glossary()))


def _state(plan: Plan) -> State:
    if plan.proposed is None:
        return "near" if plan.verdict == "tight" else "bad"
    return "good" if plan.proposed.candidate.group == "same result" else "near"


def _head(plan: Plan) -> Iterator[AnswerBlock]:
    """What stands below the first line."""
    yield Lines(list(wording.beside(plan)), short_limit=_LONGEST)
    yield Lines([wording.subject(plan)], "strong", short_limit=400)
    if why := wording.time_not_known(plan):
        yield Lines([f"{why[0].upper()}{why[1:]}."])
    yield Facts(list(_tiles(plan, plan.proposed)), "tiles", views=View.PAGE)


def _tiles(plan: Plan, best: Judgement | None) -> Iterator[tuple[str, str]]:
    if best is None:
        return
    yield "Takes at most", f"{best.needs_bytes / GIB:.2f} GiB"
    if best.is_priced and best.step_time is not None:
        yield "A step takes", f"{wording.digits(best.step_time.seconds[1])} s"
        if (speed := wording.rate(plan, best)) != NONE:
            yield wording.rate_unit(plan).capitalize(), speed
        if (run := wording.run_of(best)) != NONE:
            yield "The whole run", run
    yield "Result", best.candidate.group


def verified_blocks(ran: Sequence[Verified]) -> Iterator[AnswerBlock]:
    """Measured beside predicted, a table for each setup that ran here."""
    for each in ran:
        yield Table(("", ">measured", ">predicted"), list(each.rows()), heading=each.title)
        if not each.passed:
            yield Lines([f"{each.failed}."], "warning", short_limit=_LONGEST)
            if each.last_lines:
                yield Code("", each.last_lines)
        yield Lines([f"Note: {note}." for note in each.notes], "note", short_limit=_LONGEST)


def _paste(plan: Plan) -> Iterator[AnswerBlock]:
    """What makes the script train with the proposed setup."""
    best = plan.proposed
    if best is not None and best.candidate != plan.own.candidate:
        paste = pasted(best.candidate, command=plan.front_end)
        yield from _under(f"What to paste: {best.candidate.name}", wording.to_paste(plan, paste))


def _start(plan: Plan) -> Iterator[AnswerBlock]:
    if start := wording.start(plan):
        yield Code(start[0], [start[1]])


def _rest(plan: Plan, price: float | None, place: str) -> Iterator[AnswerBlock]:
    """Other setups to paste, the plot, the tables, and what the figures rest on."""
    other = plan.faster()
    if other is not None:
        heading = f"Faster, and {other.candidate.group}: {other.candidate.name}"
        paste = wording.to_paste(plan, pasted(other.candidate, command=plan.front_end))
        yield from only(View.FULL, *_under(heading, paste))
    for each in plan.with_code:
        changed = pasted(each.candidate, plan.own.training)
        yield from only(
            View.FULL, *_under(f"With other code: {each.candidate.name}", _other_code(plan, changed, each))
        )
    chart = plot(plan, place)
    if chart is not None:
        yield chart
    columns = ("setup", ">GiB", ">s a step", f">{wording.rate_unit(plan)}", ">run", ">cost")

    def table(heading: str, of_group: Sequence[Judgement], views: View = View.FULL) -> Iterator[Table]:
        if of_group:
            rows = [wording.row(plan, each, price) for each in of_group]
            yield Table(columns, rows, marked=True, short_rows=_SHORT_ROWS, heading=heading, views=views)

    for number, (group, setups) in enumerate(wording.groups(plan).items()):
        yield from table(wording.TITLES[group], setups, View.FULL if number else View.ALL)
    yield from table("With other code", [each for each in plan.ranked if each.candidate.code])
    yield from table("Tight, or does not fit; fastest first", wording.too_large(plan))
    yield Lines(list(wording.asked(plan)), short_limit=_LONGEST, views=View.SHORT)
    yield Lines(["Omit --short to see all setups; --json prints every number."], views=View.SHORT)
    yield from only(View.FULL, *_other_forms(plan))
    yield Lines(list(wording.notes(plan)), "note", heading="What it rests on", views=View.TERMINAL)
    yield Lines(list(wording.notes(plan, every=True)), "note", heading="What it rests on", views=View.PAGE)


def _other_code(plan: Plan, paste: Pasted, judgement: Judgement) -> Iterator[Code]:
    """What is changed in the script: a diff as `patch` takes it, at the beginning of the line; or lines."""
    result = judgement.candidate.result
    of = f"{result[0].upper()}{result[1:]}. " if result else ""
    if paste.diff:
        yield Code(f"{of}Change the script; patch -p0 reads this:", paste.diff.splitlines(), flush=True)
    else:
        yield Code(f"{of}Change the script:", paste.code.splitlines())
    yield from wording.to_paste(plan, paste, with_code=True)


def _other_forms(plan: Plan) -> Iterator[Code]:
    """The best setup's arguments for scripts that read no flags."""
    best = plan.proposed
    if best is None or best.candidate == plan.own.candidate:
        return
    paste = pasted(best.candidate, command=plan.front_end)
    if not paste.front_end:
        heading = "The same arguments in other forms"
        yield Code("As YAML:", paste.yaml.splitlines(), heading=heading, folded="As YAML")
        if wording.parses(plan):
            yield Code("In Python:", paste.python.splitlines(), folded="In Python")


def _under(heading: str, codes: Iterator[Code]) -> Iterator[Code]:
    """The lines to copy, the first below the heading."""
    for number, code in enumerate(codes):
        yield code if number else replace(code, heading=heading)


def _gpus(ranked: Sequence[Plan], prices: Mapping[str, float]) -> Table:
    rows: list[tuple[str | Cell, ...]] = []
    for plan in ranked:
        best = plan.proposed
        name = Cell(wording.gpu_of(plan), "search not finished" if plan.stopped else "", best is not None)
        setup = Cell(wording.missing(plan))
        if best is not None:
            changes = best.candidate.group != "same result"
            setup = Cell(best.candidate.name, f"{best.candidate.group}: {best.candidate.result}" if changes else "")
        rows.append((name, setup, *wording.gpu_cells(plan, prices)))
    columns = ("GPU", "best setup, or what is missing", ">GiB", f">{wording.rate_unit(ranked[0])}", ">run", ">cost",
               ">per 1M tokens")  # fmt: skip
    return Table(columns, rows, "The best setup of each GPU")


def _glossary() -> Facts:
    return Facts(_WORDS, "glossary", heading="Words", name="words", views=View.PAGE)
