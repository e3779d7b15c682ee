"""The charts of a run's page, with at most 2 000 points per trace. Colours are CSS variables of the page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from hf_memkit.common.answer.answer import Chart, View
from hf_memkit.common.answer.document import plotly_text
from hf_memkit.common.terms import CATEGORIES, PHASES
from hf_memkit.measuring.report.load import RankRun, Run
from hf_memkit.measuring.report.summary import Summary
from hf_memkit.measuring.report.target import target_of

POINTS: Final = 2000
_GIB: Final = "%{y:.2f} GiB"
_SMALL_GIB: Final = 0.1
"""Smaller sizes are shown in MiB, because the axis of a chart would show GiB in millionths."""


def extremes(series: Sequence[Sequence[float | None]], points: int) -> list[int]:
    """At most `points` positions in series of equal length: first, last, and each series' maximum in equal parts."""
    length = max(map(len, series), default=0)
    if length <= points:
        return list(range(length))
    parts = max(1, (points - 2) // max(1, len(series)))
    chosen = {0, length - 1}
    for part in range(parts):
        begin = part * length // parts
        end = (part + 1) * length // parts
        for values in series:
            known = [i for i in range(begin, end) if values[i] is not None]
            if known:
                chosen.add(max(known, key=lambda i: values[i] or 0.0))
    return sorted(chosen)


def charts(run: Run, summary: Summary) -> dict[str, Chart]:
    """The charts for which the run has figures, by their place in the page."""
    rank = run.of(summary.rank)
    if summary.peak is not None:
        timeline = _timeline(rank, summary)
    else:  # the few MiB of a rehearsal's small model do not matter: the page shows the memory of its target
        timeline = _held_over_steps(rank) if target_of(run) is None else None
    drawn = (timeline, _phases_over_steps(rank, summary), _peak_against_length(rank), _host(rank))
    return {chart.place: chart for chart in drawn if chart is not None}


def _timeline(rank: RankRun, summary: Summary) -> Chart | None:
    if not rank.steps:
        return None
    traces = _stack(rank.steps, "categories", summed=False)
    steps, columns = _thin(rank.steps, ("peak_allocated_gib", "peak_reserved_gib"))
    for name, key, colour, dash in (
        ("peak allocated", "peak_allocated_gib", "var(--ink)", "solid"),
        ("peak reserved", "peak_reserved_gib", "var(--soft)", "dot"),
    ):
        if any(value is not None for value in columns[key]):
            traces.append(_line(name, steps, columns[key], colour, dash))
    for name, records, symbol in (("evaluation", rank.evaluations, "diamond"), ("save", rank.saves, "square")):
        traces += _marks(name, records, symbol)
    last = rank.steps[-1]["step"]
    for oom in rank.ooms:
        height = oom.get("allocated_gib") or oom.get("peak_allocated_gib")
        if height is not None:
            at = oom.get("step") or last + 1
            traces.append(_points("out of memory", [at], [height], "x", "var(--bad)", size=13))
    if summary.capacity_gib is not None:
        ends = [rank.steps[0]["step"], last]
        name = "allocator's cap" if summary.capped else "GPU memory"
        traces.append(_line(name, ends, [summary.capacity_gib] * 2, "var(--bad)", "dash"))
    caption = "The peak should stay below the dashed line, the GPU's memory. Areas show what the peak holds."
    return _chart("timeline", caption, traces, "step", "GPU memory, GiB")


def _held_over_steps(rank: RankRun) -> Chart | None:
    """Memory held between the steps, for a device without a peak counter."""
    traces = _stack(rank.steps, "held", summed=True)
    unit = "GiB"
    if sum(max(trace["y"]) for trace in traces) < _SMALL_GIB:
        unit = "MiB"
        for trace in traces:
            trace["y"] = [_round(y * 1024) for y in trace["y"]]
            trace["hovertemplate"] = trace["hovertemplate"].replace("GiB", unit)
    caption = "Level areas are healthy: what is held between steps should not grow after the first steps."
    return _chart("timeline", caption, traces, "step", f"held between steps, {unit}") if traces else None


def _stack(steps: Sequence[Mapping[str, Any]], name: str, *, summed: bool) -> list[dict[str, Any]]:
    """Areas by category over the steps recorded in detail. `summed`: over places."""
    detailed = [step for step in steps if step.get(name)]

    def value(step: Mapping[str, Any], category: str) -> float:
        places = list(step[name].values()) if summed else [step[name]]
        return float(sum(place.get(f"{category}_gib", 0.0) for place in places))

    detailed = [detailed[i] for i in extremes([[step.get("peak_allocated_gib") for step in detailed]], POINTS)]
    x = [step["step"] for step in detailed]
    traces = []
    for category in CATEGORIES:
        y = [_round(value(step, category)) for step in detailed]
        if any(y):
            edge = {"width": 1, "color": "var(--page)"}
            fill = f"var(--{category})"
            traces.append(_trace(category, x, y, mode="lines", stackgroup="held", line=edge, fillcolor=fill))
    return traces


def _phases_over_steps(rank: RankRun, summary: Summary) -> Chart | None:
    traces = []
    for phase in PHASES:
        values = [step.get("phases", {}).get(phase, {}).get("peak_allocated_gib") for step in rank.steps]
        if sum(value is not None for value in values) > 1:
            kept = extremes([values], POINTS)
            x = [rank.steps[i]["step"] for i in kept]
            traces.append(_line(phase, x, [_round(values[i]) for i in kept], f"var(--phase-{phase})", "solid"))
    if not traces:
        return None
    highest = max(summary.phases, key=lambda phase: summary.phases[phase])
    caption = f"Peak of each phase over the steps. {highest.capitalize()} has the highest: reduce its memory first."
    return _chart("phases", caption, traces, "step", "peak allocated, GiB", heading="By phase over the steps")


def _peak_against_length(rank: RankRun) -> Chart | None:
    """The peak of each step against its longest sequence; None if the length does not vary."""
    known = [step for step in rank.steps if "longest_sequence" in step and "peak_allocated_gib" in step]
    if len({step["longest_sequence"] for step in known}) < 2:
        return None
    known = [known[i] for i in extremes([[step["peak_allocated_gib"] for step in known]], POINTS)]
    steps = [step["step"] for step in known]
    trace = {
        "type": "scatter", "mode": "markers", "name": "step", "x": [step["longest_sequence"] for step in known],
        "y": [_round(step["peak_allocated_gib"]) for step in known], "customdata": steps,
        "marker": {"size": 6, "color": steps, "colorscale": "Viridis", "showscale": True,
                   "colorbar": {"title": {"text": "step"}, "thickness": 8, "outlinewidth": 0}},
        "hovertemplate": f"step %{{customdata}}: {_GIB} with %{{x:,}}<extra></extra>",
    }  # fmt: skip
    caption = "Points rising to the right: input size decides the peak. Level points: it does not. Colour: the step."
    return _chart(
        "lengths", caption, [trace], "longest sequence of the step (tokens)", "peak allocated, GiB",
        heading="Peak against the longest sequence", hovermode="closest",
    )  # fmt: skip


def _host(rank: RankRun) -> Chart | None:
    names = {
        "host_rss_gib": ("this process", "var(--weights)", "solid"),
        "host_available_gib": ("available", "var(--optimizer)", "dash"),
        "pinned_gib": ("pinned", "var(--activations)", "solid"),
        "disk_swap_gib": ("swapped to disk", "var(--buffers)", "solid"),
    }
    steps, columns = _thin(rank.steps, tuple(names))
    traces = [
        _line(name, steps, columns[key], colour, dash)
        for key, (name, colour, dash) in names.items()
        if any(columns[key])
    ]
    caption = "This process should level off after the first steps; a steady rise is a leak."
    return _chart("host", caption, traces, "step", "host RAM, GiB") if traces else None


def _thin(
    steps: Sequence[Mapping[str, Any]], names: Sequence[str]
) -> tuple[list[int | None], dict[str, list[float | None]]]:
    columns = {name: [step.get(name) for step in steps] for name in names}
    kept = extremes(list(columns.values()), POINTS)
    x = [steps[i]["step"] for i in kept]
    return x, {name: [_round(values[i]) for i in kept] for name, values in columns.items()}


def _marks(name: str, records: Sequence[Mapping[str, Any]], symbol: str) -> list[dict[str, Any]]:
    known = [record for record in records if "peak_allocated_gib" in record]
    known = [known[i] for i in extremes([[record["peak_allocated_gib"] for record in known]], POINTS)]
    if not known:
        return []
    steps = [record.get("step") for record in known]
    peaks = [_round(record["peak_allocated_gib"]) for record in known]
    trace = _points(name, steps, peaks, symbol, "var(--ink)")
    trace["customdata"] = [plotly_text(record.get("checkpoint") or name) for record in known]
    trace["hovertemplate"] = f"{_GIB}<extra>%{{customdata}}</extra>"
    return [trace]


def _line(name: str, x: Sequence[Any], y: Sequence[float | None], colour: str, dash: str) -> dict[str, Any]:
    line = {"color": colour, "width": 2, "dash": dash}
    mode = "lines+markers" if len(x) < 2 else "lines"
    return _trace(name, x, y, mode=mode, line=line, connectgaps=True)


def _points(
    name: str, x: Sequence[Any], y: Sequence[float | None], symbol: str, colour: str, size: int = 8
) -> dict[str, Any]:
    edge = {"width": 1, "color": "var(--page)"}
    return _trace(name, x, y, mode="markers", marker={"symbol": symbol, "size": size, "color": colour, "line": edge})


def _trace(name: str, x: Sequence[Any], y: Sequence[float | None], **style: Any) -> dict[str, Any]:
    hover = f"{_GIB}<extra>{name}</extra>"
    return {"type": "scatter", "name": name, "x": list(x), "y": list(y), "hovertemplate": hover, **style}


def _chart(
    place: str, caption: str, traces: list[dict[str, Any]], x: str, y: str, *, heading: str = "",
    hovermode: str = "x unified",
) -> Chart:  # fmt: skip
    return Chart(place, caption, traces, x, y, hovermode, heading=heading, name=place, views=View.PAGE)


def _round(value: float | None) -> float | None:
    if value is None:
        return None
    return round(value, 4) if abs(value) >= 0.1 else float(f"{value:.3g}")
