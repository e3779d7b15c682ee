"""What stands on the page, from the top down. In: a run, its figures, what to do, its charts. Out: HTML by section."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from hf_memkit.oom import Change
from hf_memkit.report import wording
from hf_memkit.report.advice import Advice, finding_sentence
from hf_memkit.report.html import Html, el, figure_table, join
from hf_memkit.report.load import Run
from hf_memkit.report.reconcile import furthest_off
from hf_memkit.report.sanitize import number, whole
from hf_memkit.report.sections_facts import facts, glossary, modules, out_of_memory
from hf_memkit.report.summary import Summary, summarise_ranks
from hf_memkit.report.thin import extremes
from hf_memkit.units import GIB, format_size

__all__ = ["sections"]

_ROWS: Final = 25
_MARKS: Final = {"diamond": "◆", "square": "■", "x": "✕"}


def sections(run: Run, summary: Summary, advice: Advice, drawn: Mapping[str, Any]) -> Iterator[Html]:
    """All that this run has something for."""
    yield _headline(run, summary)
    yield _what_to_do(run, summary, advice)
    for part in (
        _filled(summary),
        out_of_memory(run),
        _timeline(run, summary, drawn),
        _phases(summary, drawn),
        _lengths(drawn),
        _predicted(summary),
        _ranks(run, drawn),
        _host(summary, drawn),
        modules(run),
    ):
        if part is not None:
            yield part
    yield facts(run)
    yield glossary()


def _section(name: str, heading: str, *children: Html | str | None) -> Html:
    return el("section", el("h2", heading), *children, id=name)


def _state(run: Run, summary: Summary) -> str:
    if run.ending.kind in ("out of memory", "failed", "killed"):
        return "bad"
    return "near" if summary.near else "good"


def _headline(run: Run, summary: Summary) -> Html:
    lines = (wording.title(run, summary), wording.course(run, summary), wording.unknowable(run, summary))
    lead = el(
        "div",
        el("h1", wording.verdict(run, summary)),
        *(el("p", line) for line in lines if line),
        class_=f"lead {_state(run, summary)}",
    )
    tiles = el("dl", *(el("div", el("dt", name), el("dd", value)) for name, value in _tiles(summary)), class_="tiles")
    notes = [el("p", el("strong", "Note: "), note, class_="soft") for note in run.notes]
    return el("header", lead, tiles, *notes)


def _tiles(summary: Summary) -> Iterator[tuple[str, str]]:
    peak = summary.peak
    if peak is not None:
        share = f" ({summary.percent:.0f}\u00a0%)" if summary.percent is not None else ""
        yield "Peak allocated", f"{peak.gib:.2f} GiB{share}"
    if summary.reserved_gib is not None:
        yield "Peak reserved", f"{summary.reserved_gib:.2f} GiB"
    if summary.headroom_gib is not None:
        yield "Headroom", f"{max(0.0, summary.headroom_gib):.2f} GiB"
    if peak is not None and peak.phase:
        yield "Highest in", peak.phase
    if "rss_gib" in summary.host:
        yield "Host memory, this process", f"{summary.host['rss_gib']:.2f} GiB"
    if summary.steps:
        yield "Steps recorded", f"{summary.steps:,}"
    if summary.step_time_ms is not None:
        yield "A step took", f"{summary.step_time_ms:,.0f} ms"


def _what_to_do(run: Run, summary: Summary, advice: Advice) -> Html:
    if not advice.findings and not advice.changes:
        return _section("next", "What to do", el("p", wording.nothing_to_do(run, summary)))
    findings = [el("li", finding_sentence(run, rank, finding)) for rank, finding in advice.findings]
    return _section(
        "next",
        "What to do",
        el("ul", *findings, class_="changes") if findings else None,
        el("ol", *map(_change, advice.changes), class_="changes") if advice.changes else None,
    )


def _change(change: Change) -> Html:
    saved = f" It saves {change.saving}." if change.saving is not None else ""
    cost = f" It costs: {change.cost.rstrip('.')}." if change.cost else ""
    reason = f" {change.reason.rstrip('.')}."
    return el("li", el("code", change.name_and_value), ":", reason, saved, el("span", cost, class_="soft"))


def _filled(summary: Summary) -> Html | None:
    """The card as one bar, and the same as a table."""
    if not summary.categories:
        return None
    peak = sum(summary.categories.values())
    reserved = max(peak, summary.categories_reserved_gib or peak)
    outside = 0.0 if summary.capped else summary.others_gib or 0.0
    size = max(summary.capacity_gib or 0.0, reserved + outside)
    rows = [(name, gib, "", f"background: var(--{name})") for name, gib in summary.categories.items()]
    rows += [
        ("reserved, not in use", reserved - peak, "cached", ""),
        ("outside the allocator", outside, "outside", ""),
    ]
    parts = [
        el(
            "span",
            class_=kind or None,
            title=f"{name}: {gib:.2f} GiB",
            style=f"width: {100 * gib / size:.2f}%; {colour}",
        )
        for name, gib, kind, colour in rows
        if gib > 0
    ]
    words = ", ".join(f"{name} {gib:.2f} GiB" for name, gib, _, _ in rows if gib > 0)
    bar = el("div", *parts, class_="card", role="img", aria_label=f"Of {size:.2f} GiB: {words}")
    free = size - reserved - outside
    if summary.capacity_gib is not None:
        rows.append(("free", max(0.0, free), "", ""))
    table = figure_table(
        f"GiB by category at the peak of step {summary.categories_step}",
        ("what", "GiB", "of the card"),
        [
            (join([_chip(colour, kind), name]), f"{gib:.2f}", f"{100 * gib / size:.0f} %")
            for name, gib, kind, colour in rows
        ],
        numbers=(1, 2),
    )
    return _section("filled", "What filled the card", bar, table)


def _chip(style: str, kind: str = "") -> Html:
    return el("span", class_=f"chip {kind}".strip(), style=style, aria_hidden="true")


def _timeline(run: Run, summary: Summary, drawn: Mapping[str, Any]) -> Html | None:
    if "timeline" not in drawn:
        return None
    rank = next(rank for rank in run.ranks if rank.rank == summary.rank)
    which = f" (rank {rank.rank}, which has the highest peak)" if len(run.ranks) > 1 else ""
    heading = "Over the steps" if summary.peak is not None else "Held between the steps"
    kept = extremes([[number(step, "peak_allocated_gib") for step in rank.steps]], _ROWS)
    columns = ("step", "peak allocated", "peak reserved", "longest sequence", "tokens", "host memory", "ms")
    rows = [_step_row(rank.steps[i]) for i in kept]
    table = figure_table("Some of the steps, the highest peaks among them; GiB", columns, rows, numbers=range(7))
    areas = "; the areas join the steps that were looked at closely" if summary.categories else ""
    chart = _chart(drawn, "timeline", f"Memory over the steps{areas}")
    return _section(
        "timeline", f"{heading}{which}", chart,
        el("details", el("summary", "As a table"), table),
    )  # fmt: skip


def _step_row(step: Mapping[str, Any]) -> list[str]:
    def shown(name: str, form: str) -> str:
        value = number(step, name)
        return "–" if value is None else format(value, form)

    counts = [shown(name, ",.0f") for name in ("longest_sequence", "tokens")]
    sizes = [shown(name, ".2f") for name in ("peak_allocated_gib", "peak_reserved_gib")]
    return [str(whole(step, "step")), *sizes, *counts, shown("host_rss_gib", ".2f"), shown("step_time_ms", ",.0f")]


def _phases(summary: Summary, drawn: Mapping[str, Any]) -> Html | None:
    if not summary.phases:
        return None
    highest = max(summary.phases.values()) or 1.0
    rows = [
        (phase, f"{gib:.2f}", _bar(phase, gib / highest))
        for phase, gib in summary.phases.items()
    ]  # fmt: skip
    figures = figure_table("Highest allocated in each phase, GiB", ("phase", "GiB", ""), rows, numbers=(1,))
    table = el("div", figures, class_="bars")
    chart = _chart(drawn, "phases", "Peak of each phase over the steps")
    return _section("phases", "By phase", el("div", table, chart, class_="pair"))


def _bar(phase: str, share: float) -> Html:
    return el("div", class_="bar", style=f"width: {100 * share:.1f}%; background: var(--phase-{phase})")


def _lengths(drawn: Mapping[str, Any]) -> Html | None:
    places = [name for name in ("lengths", "tokens") if name in drawn]
    if not places:
        return None
    what = {"lengths": "the longest sequence", "tokens": "the tokens"}
    charts = [_chart(drawn, name, f"Peak of each step against {what[name]} of its batch") for name in places]
    return _section(
        "lengths",
        "Peak against the size of the batch",
        el("p", "Where the points rise to the right, the size of the inputs decides the peak.", class_="soft"),
        el("div", *charts, class_="pair"),
    )  # fmt: skip


def _predicted(summary: Summary) -> Html | None:
    if not summary.predicted:
        return None
    rows = []
    for what, predicted, measured in summary.predicted:
        low = float(predicted.split("–")[0])
        off = ""
        if measured is not None and "–" not in predicted and low > 0:
            off = f"{100 * (measured - low) / low:+.0f} %"
        rows.append((what, predicted, f"{measured:.2f}" if measured is not None else "–", off))
    table = figure_table("GiB", ("what", "predicted", "measured", "off by"), rows, numbers=(1, 2, 3))
    sentence = furthest_off(summary.predicted)
    return _section("predicted", "Predicted and measured", el("p", sentence) if sentence else None, table)


def _ranks(run: Run, drawn: Mapping[str, Any]) -> Html | None:
    if len(run.ranks) < 2:
        return None
    rows = []
    for rank, one in zip(run.ranks, summarise_ranks(run), strict=True):
        figures = (one.peak.gib if one.peak else None, one.reserved_gib, one.host.get("rss_gib"))
        rows.append((str(rank.rank), *("–" if f is None else f"{f:.2f}" for f in figures), rank.ending.why))
    columns = ("rank", "peak allocated", "peak reserved", "host memory", "how it ended")
    table = figure_table("Highest of each rank, GiB", columns, rows, numbers=(1, 2, 3))
    return _section("ranks", "By rank", _chart(drawn, "ranks", "Highest figures of each rank"), table)


def _host(summary: Summary, drawn: Mapping[str, Any]) -> Html | None:
    line = wording.host(summary)
    if line is None:
        return None
    rows = [
        (place, category, format_size(gib * GIB))
        for place, held in summary.held.items()
        for category, gib in held.items()
    ]
    held = figure_table("Held between steps", ("where", "what", "size"), rows, numbers=(2,)) if rows else None
    chart = _chart(drawn, "host", "Host memory over the steps")
    return _section("host", "Host and disk", el("p", line), el("div", chart, held, class_="pair"))


def _chart(drawn: Mapping[str, Any], name: str, description: str) -> Html | None:
    """The place where the script draws a chart, with its key; None if there is no such chart."""
    if name not in drawn:
        return None
    hint = el("noscript", el("p", "This chart needs JavaScript; the tables have its figures.", class_="soft"))
    place = el("div", hint, id=f"chart-{name}", class_="chart", role="img", aria_label=description)
    return el("figure", _key(drawn[name]["traces"]), place, el("figcaption", description))


def _key(traces: Iterable[Mapping[str, Any]]) -> Html | None:
    """What the colours and marks of a chart mean, as text that wraps on a narrow screen."""
    entries = []
    for trace in traces:
        marker = trace.get("marker", {})
        if "fillcolor" in trace or trace["type"] == "bar":
            sign = _chip(f"background: {trace.get('fillcolor') or marker['color']}")
        elif marker.get("symbol") in _MARKS:
            sign = el("strong", f"{_MARKS[marker['symbol']]} ", style=f"color: {marker['color']}", aria_hidden="true")
        elif "line" in trace:
            sign = _chip(f"border-color: {trace['line']['color']}", f"line {trace['line']['dash']}")
        else:
            continue
        entries.append(el("li", sign, trace["name"]))
    return el("ul", *entries, class_="key") if entries else None
