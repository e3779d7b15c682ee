"""The charts of the page, as Plotly's own plain data. In: a run. Out: traces by chart, with at most 2 000 points each.

Colours are names of the page's CSS variables (`var(--weights)`): the script puts in what they are in light or dark.
Plotly reads text as a little HTML, so that text from records goes through `plotly_text`.
"""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any, Final

from hf_memkit.report.load import RankRun, Run
from hf_memkit.report.sanitize import number, text, whole
from hf_memkit.report.summary import Summary, summarise_ranks
from hf_memkit.report.thin import extremes
from hf_memkit.terms import CATEGORIES, PHASES

__all__ = ["charts", "plotly_text"]

POINTS: Final = 2000
_GIB: Final = "%{y:.2f} GiB"
_SMALL_GIB: Final = 0.1
"""A model of which less is held is shown in MiB: an axis of GiB would have micro-units."""

Chart = dict[str, Any]


def plotly_text(value: Any, limit: int = 80) -> str:
    """Text that Plotly shows as it is: no tag, no link, no template of figures."""
    return html.escape(text(value, limit), quote=False).replace("%{", "%&#123;").replace("$", "&#36;")


def charts(run: Run, summary: Summary) -> dict[str, Chart]:
    """The charts that this run has figures for, by the name of their place in the page."""
    rank = next(rank for rank in run.ranks if rank.rank == summary.rank)
    found = {
        "timeline": _timeline(rank, summary) if summary.peak is not None else _held_over_steps(rank),
        "phases": _phases_over_steps(rank),
        "lengths": _scatter(rank, "longest_sequence", "longest sequence of the step (tokens)"),
        "tokens": _scatter(rank, "tokens", "tokens of the step, padding included"),
        "ranks": _ranks(run) if len(run.ranks) > 1 else None,
        "host": _host(rank),
    }
    return {name: chart for name, chart in found.items() if chart is not None}


def _timeline(rank: RankRun, summary: Summary) -> Chart | None:
    if not rank.steps:
        return None
    traces = _stack(rank.steps, "categories", summed=False)
    steps, columns = _thinned(rank.steps, ("peak_allocated_gib", "peak_reserved_gib"))
    for name, key, colour, dash in (
        ("peak allocated", "peak_allocated_gib", "var(--ink)", "solid"),
        ("peak reserved", "peak_reserved_gib", "var(--soft)", "dot"),
    ):
        if any(value is not None for value in columns[key]):
            traces.append(_line(name, steps, columns[key], colour, dash))
    for name, records, symbol in (("evaluation", rank.evaluations, "diamond"), ("save", rank.saves, "square")):
        traces += _marks(name, records, symbol)
    last = whole(rank.steps[-1], "step") or 0
    for oom in rank.ooms:
        height = number(oom, "allocated_gib") or number(oom, "peak_allocated_gib")
        if height is not None:
            at = whole(oom, "step") or last + 1
            traces.append(_points("out of memory", [at], [height], "x", "var(--bad)", size=13))
    if summary.capacity_gib is not None:
        ends = [whole(rank.steps[0], "step"), last]
        name = "what the allocator may take" if summary.capped else "the card"
        traces.append(_line(name, ends, [summary.capacity_gib] * 2, "var(--bad)", "dash"))
    return _chart(traces, "step", "GiB on the card")


def _held_over_steps(rank: RankRun) -> Chart | None:
    """Where no peak is known: what lives between the steps."""
    traces = _stack(rank.steps, "held", summed=True)
    unit = "GiB"
    if sum(max(trace["y"]) for trace in traces) < _SMALL_GIB:
        unit = "MiB"
        for trace in traces:
            trace["y"] = [_round(y * 1024) for y in trace["y"]]
            trace["hovertemplate"] = trace["hovertemplate"].replace("GiB", unit)
    return _chart(traces, "step", f"{unit} held between steps") if traces else None


def _stack(steps: Sequence[Mapping[str, Any]], name: str, *, summed: bool) -> list[dict[str, Any]]:
    """Areas by category over the steps that were looked at. `summed`: over places."""
    looked = [step for step in steps if step.get(name)]

    def value(step: Mapping[str, Any], category: str) -> float:
        places = list(step[name].values()) if summed else [step[name]]
        return sum(number(place, f"{category}_gib") or 0.0 for place in places)

    looked = [looked[i] for i in extremes([[number(step, "peak_allocated_gib") for step in looked]], POINTS)]
    x = [whole(step, "step") for step in looked]
    traces = []
    for category in CATEGORIES:
        y = [_round(value(step, category)) for step in looked]
        if any(y):
            traces.append(
                {
                    "type": "scatter", "mode": "lines", "stackgroup": "held", "name": category, "x": x, "y": y,
                    "line": {"width": 1, "color": "var(--page)"}, "fillcolor": f"var(--{category})",
                    "hovertemplate": f"{_GIB}<extra>{category}</extra>",
                }
            )  # fmt: skip
    return traces


def _phases_over_steps(rank: RankRun) -> Chart | None:
    traces = []
    for phase in PHASES:
        values = [number(step.get("phases", {}).get(phase), "peak_allocated_gib") for step in rank.steps]
        if sum(value is not None for value in values) > 1:
            kept = extremes([values], POINTS)
            x = [whole(rank.steps[i], "step") for i in kept]
            traces.append(_line(phase, x, [_round(values[i]) for i in kept], f"var(--phase-{phase})", "solid"))
    return _chart(traces, "step", "peak allocated, GiB") if traces else None


def _scatter(rank: RankRun, name: str, axis: str) -> Chart | None:
    """The peak of each step against a size of its inputs, if that varies at all."""
    known = [
        (step, x, y)
        for step in rank.steps
        if (x := number(step, name)) is not None and (y := number(step, "peak_allocated_gib")) is not None
    ]
    if len({x for _, x, _ in known}) < 2:
        return None
    known = [known[i] for i in extremes([[y for _, _, y in known]], POINTS)]
    steps = [whole(step, "step") for step, _, _ in known]
    trace = {
        "type": "scatter", "mode": "markers", "name": "step", "x": [x for _, x, _ in known],
        "y": [_round(y) for _, _, y in known], "customdata": steps,
        "marker": {"size": 6, "color": steps, "colorscale": "Viridis", "showscale": True,
                   "colorbar": {"title": {"text": "step"}, "thickness": 8, "outlinewidth": 0}},
        "hovertemplate": f"step %{{customdata}}: {_GIB} with %{{x:,}}<extra></extra>",
    }  # fmt: skip
    return {**_chart([trace], axis, "peak allocated, GiB"), "hovermode": "closest"}


def _ranks(run: Run) -> Chart | None:
    summaries = summarise_ranks(run)
    bars = []
    for name, colour, values in (
        ("peak allocated", "var(--weights)", [one.peak.gib if one.peak else None for one in summaries]),
        ("peak reserved", "var(--soft)", [one.reserved_gib for one in summaries]),
        ("host memory", "var(--activations)", [one.host.get("rss_gib") for one in summaries]),
    ):
        if any(value is not None for value in values):
            bars.append(
                {
                    "type": "bar", "name": name, "x": [one.rank for one in summaries],
                    "y": [_round(value) for value in values], "marker": {"color": colour},
                    "hovertemplate": f"{_GIB}<extra>{name}</extra>",
                }
            )  # fmt: skip
    return _chart(bars, "rank", "GiB, highest") if bars else None


def _host(rank: RankRun) -> Chart | None:
    names = {
        "host_rss_gib": ("this process", "var(--weights)", "solid"),
        "host_available_gib": ("left on the host", "var(--optimizer)", "dash"),
        "pinned_gib": ("pinned", "var(--activations)", "solid"),
        "disk_swap_gib": ("swapped to disk", "var(--buffers)", "solid"),
    }
    steps, columns = _thinned(rank.steps, tuple(names))
    traces = [
        _line(name, steps, columns[key], colour, dash)
        for key, (name, colour, dash) in names.items()
        if any(columns[key])
    ]
    return _chart(traces, "step", "GiB") if traces else None


def _thinned(
    steps: Sequence[Mapping[str, Any]], names: Sequence[str]
) -> tuple[list[int | None], dict[str, list[float | None]]]:
    columns = {name: [number(step, name) for step in steps] for name in names}
    kept = extremes(list(columns.values()), POINTS)
    x = [whole(steps[i], "step") for i in kept]
    return x, {name: [_round(values[i]) for i in kept] for name, values in columns.items()}


def _marks(name: str, records: Sequence[Mapping[str, Any]], symbol: str) -> list[dict[str, Any]]:
    known = [(record, y) for record in records if (y := number(record, "peak_allocated_gib")) is not None]
    known = [known[i] for i in extremes([[y for _, y in known]], POINTS)]
    if not known:
        return []
    x = [whole(record, "step") for record, _ in known]
    trace = _points(name, x, [_round(y) for _, y in known], symbol, "var(--ink)")
    trace["customdata"] = [plotly_text(record.get("checkpoint") or name) for record, _ in known]
    trace["hovertemplate"] = f"{_GIB}<extra>%{{customdata}}</extra>"
    return [trace]


def _line(name: str, x: Sequence[Any], y: Sequence[float | None], colour: str, dash: str) -> dict[str, Any]:
    return {
        "type": "scatter", "mode": "lines+markers" if len(x) < 2 else "lines", "name": name, "x": list(x),
        "y": list(y), "line": {"color": colour, "width": 2, "dash": dash}, "connectgaps": True,
        "hovertemplate": f"{_GIB}<extra>{name}</extra>",
    }  # fmt: skip


def _points(
    name: str, x: Sequence[Any], y: Sequence[float | None], symbol: str, colour: str, size: int = 8
) -> dict[str, Any]:
    return {
        "type": "scatter", "mode": "markers", "name": name, "x": list(x), "y": list(y),
        "marker": {"symbol": symbol, "size": size, "color": colour, "line": {"width": 1, "color": "var(--page)"}},
        "hovertemplate": f"{_GIB}<extra>{name}</extra>",
    }  # fmt: skip


def _chart(traces: list[dict[str, Any]], x: str, y: str) -> Chart:
    return {"traces": traces, "x": x, "y": y, "hovermode": "x unified"}


def _round(value: float | None) -> float | None:
    return None if value is None else round(value, 4) if abs(value) >= 0.1 else float(f"{value:.3g}")
