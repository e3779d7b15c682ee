"""Plans as one HTML page that needs nothing else: the answer, what to paste, the plot, the tables. In: plans, prices.
Out: a file, in the frame of every page of memkit's (`measuring/report/document.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from hf_memkit.catalog.fit import LIMIT_NAME
from hf_memkit.common.units import GIB
from hf_memkit.measuring.report.document import check_file, document, write_document
from hf_memkit.measuring.report.html import Html, el, figure_table, join, lead, section, terms, tiles
from hf_memkit.plan import wording
from hf_memkit.plan.judgement import Judgement
from hf_memkit.plan.measured_steps import Verified
from hf_memkit.plan.pasted import Pasted, pasted
from hf_memkit.plan.plan import Plan
from hf_memkit.plan.plot import KEY, frontier, plot
from hf_memkit.plan.prices import price_of, ranked_gpus

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


def write_page(
    plans: Sequence[Plan], prices: Mapping[str, float], path: str | Path, ran: Sequence[Verified] = ()
) -> Path:
    """Writes the page, in place of one that memkit wrote before, and of no other file; returns its path."""
    check_file(path)
    return write_document(path, page(plans, prices, ran))


def page(plans: Sequence[Plan], prices: Mapping[str, float], ran: Sequence[Verified] = ()) -> str:
    """The page's HTML. `ran`: what `--verify` has shown of the one plan's setups."""
    ranked = ranked_gpus(plans, prices)
    charts: dict[str, Any] = {}
    parts = list(_gpus(ranked, prices)) if len(ranked) > 1 else []
    for number, plan in enumerate(ranked):
        parts += _plan(plan, price_of(plan, prices), f"plan-{number}", charts, ran, alone=len(ranked) == 1)
    parts.append(section(None, "Words", terms(_WORDS, "glossary")))
    return document(f"Plan: {ranked[0].name}", join(parts, "\n"), charts)


def _gpus(ranked: Sequence[Plan], prices: Mapping[str, float]) -> Iterator[Html]:
    """Several GPUs, ranked."""
    verdict, said = wording.best_gpu(ranked, prices)
    state = "bad" if ranked[0].proposed is None else None
    yield el("header", lead(f"{verdict}: {said}.", (), state))
    unit = wording.rate_unit(ranked[0])
    rows: list[list[Html | str]] = []
    for plan in ranked:
        name = f"{wording.gpu_of(plan)}{' (search not finished)' * plan.stopped}"
        setup: Html | str = wording.missing(plan)
        if (best := plan.proposed) is not None:
            setup = el("span", "; ".join(filter(None, (best.candidate.name, best.candidate.result))), class_="name")
        rows.append([name, setup, *wording.gpu_cells(plan, prices)])
    columns = ("GPU", "best setup, or what is missing", "GiB", unit, "run", "cost of the run", "cost of 1M tokens")
    yield section(None, "GPUs, ranked", figure_table("The best setup of each", columns, rows, numbers=range(2, 7)))


def _plan(
    plan: Plan, price: float | None, name: str, charts: dict[str, Any], ran: Sequence[Verified], *, alone: bool
) -> Iterator[Html]:
    verdict, said = wording.answer(plan)
    best = plan.proposed
    state = "bad" if best is None else "near" if best.candidate.group != "same result" else None
    lines = (*wording.beside(plan), wording.subject(plan))
    head = lead(f"{verdict}: {said}.", lines, state, heading="h1" if alone else "h3")
    yield el("header", head, _tiles(plan, best)) if alone else section(None, wording.gpu_of(plan), head)
    if ran:
        yield section(None, "Run on this machine's GPU", *(part for each in ran for part in _ran(each)))
    if best is not None and best.candidate != plan.own.candidate:
        yield section(
            None,
            f"What to paste: {best.candidate.name}",
            *_paste(pasted(best.candidate, command=plan.front_end), plan),
        )
    if start := wording.start(plan):
        yield section(None, "How to start it", el("p", start[0]), _lines([start[1]]))
    other = plan.faster()
    if other is not None:
        yield section(
            None,
            f"Faster, and {other.candidate.group}: {other.candidate.name}",
            *_paste(pasted(other.candidate, command=plan.front_end), plan),
        )
    for each in plan.with_code:
        changed = pasted(each.candidate, plan.own.training)
        yield section(
            None, f"With other code: {each.candidate.name}", *_other_code(changed, plan, each.candidate.result)
        )
    chart = plot(plan)
    if chart is not None:
        charts[name] = chart
        front = "; ".join(each.candidate.name for each in frontier(plan))
        caption = f"Each mark is a setup: further left needs less, higher is faster. On the frontier: {front}."
        yield section(
            None,
            "Memory and speed",
            el(
                "figure",
                el("div", id=f"chart-{name}", class_="chart", role="img", aria_label="GiB against speed"),
                el("figcaption", caption),
                el("ul", *_key({trace["name"] for trace in chart["traces"]}), class_="key"),
            ),
        )
    elif said := wording.time_not_known(plan):
        yield section(None, "Memory and speed", el("p", f"{said}."))
    for group, rows in wording.groups(plan, price).items():
        yield section(None, wording.TITLES[group], _table(plan, "Fits, fastest first", rows, price))
    if changes := wording.with_code(plan, price):
        yield section(None, "With other code", _table(plan, "Never proposed", changes, price))
    if lost := wording.too_large(plan, price):
        yield section(None, "Tight, or does not fit", _table(plan, "Fastest first", lost, price))
    yield section(None, "What it rests on", el("ul", *(el("li", line) for line in wording.notes(plan, every=True))))


def _tiles(plan: Plan, best: Judgement | None) -> Html | None:
    if best is None:
        return None
    rows = [("Takes at most", f"{best.needs_bytes / GIB:.2f} GiB")]
    if best.is_priced and best.step_time is not None:
        rows.append(("A step takes", f"{wording.digits(best.step_time.seconds[1])} s"))
        if (speed := wording.rate(plan, best)) != wording.NONE:
            rows.append((wording.rate_unit(plan), speed))
        if (run := wording.run_of(best)) != wording.NONE:
            rows.append(("The whole run", run))
    rows.append(("Result", best.candidate.group))
    return tiles(rows)


def _other_code(found: Pasted, plan: Plan, result: str) -> Iterator[Html]:
    if result:
        yield el("p", f"{result[0].upper()}{result[1:]}.")
    yield el("p", "Change the script; patch -p0 reads this:" if found.diff else "Change the script:")
    yield _lines((found.diff or found.code).splitlines())
    yield from _paste(found, plan, with_code=True)


def _paste(found: Pasted, plan: Plan, *, with_code: bool = False) -> Iterator[Html]:
    for what, lines in wording.to_paste(plan, found, " \\\n".join(found.flags).split("\n"), with_code=with_code):
        yield el("p", what)
        yield _lines(lines)
    if found.front_end:
        return
    others = (("As YAML", found.yaml), *([("In Python", found.python)] if wording.parses(plan) else []))
    for name, content in others:
        yield el("details", el("summary", name), _lines(content.splitlines()))


def _ran(found: Verified) -> Iterator[Html]:
    """A run of `--verify`, as the terminal has it."""
    yield figure_table(found.title, ("", "measured", "predicted"), found.rows(), numbers=range(1, 3))
    if not found.passed:
        yield el("p", f"{found.failed}.")
        if found.last_lines:
            yield _lines(found.last_lines)
    for note in found.notes:
        yield el("p", f"Note: {note}.")


def _lines(lines: Sequence[str]) -> Html:
    return el("pre", join(lines, "\n"))


def _key(drawn: set[str]) -> Iterator[Html]:
    """Of what the plot shows."""
    for what in (name for name in KEY if name in drawn):
        yield el("li", el("span", "", class_="chip", style=f"background:{KEY[what]}"), what)
    yield el("li", el("span", "", class_="chip line dash", style="border-color:var(--bad)"), LIMIT_NAME)
    yield el("li", el("span", "", class_="chip line dot", style="border-color:var(--soft)"), "frontier")


def _table(plan: Plan, caption: str, rows: Sequence[wording.PlanRow], price: float | None) -> Html:
    unit = wording.rate_unit(plan)
    columns = ["setup", "GiB", "s a step", "range", unit, "run", *(["cost"] if price is not None else []), "why"]
    cells: list[list[Html | str]] = [
        [
            el("strong" if row.proposed else "span", row.name, class_="name"),
            row.peak,
            row.step,
            row.between or wording.NONE,
            row.rate,
            row.run,
            *([row.cost] if price is not None else []),
            el("span", row.why or ("the best" if row.proposed else ""), class_="name"),
        ]
        for row in rows
    ]
    return figure_table(caption, columns, cells, numbers=range(1, len(columns) - 1))
