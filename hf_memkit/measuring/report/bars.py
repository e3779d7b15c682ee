"""Memory as bars, and the same as tables: what fills the GPU, phases, a prediction of both. In: GiB. Out: HTML."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from hf_memkit.measuring.report.html import Html, el, figure_table, join
from hf_memkit.measuring.report.target import Target


def prediction_bars(target: Target, caption: str) -> Iterator[Html]:
    """The GPU at the peak as one bar, then categories and phases. `caption`: of the categories."""
    reserved = target.reserved_gib[1]
    bar, table = gpu_bar(caption, target.categories, reserved, target.outside_gib, target.capacity_gib)
    said = "Predicted peak allocated in each phase, GiB: only the highest decides"
    yield bar
    yield el("div", table, phase_bars(said, target.phases) if target.phases else None, class_="pair")


def gpu_bar(
    caption: str, categories: Mapping[str, float], reserved: float, outside: float, capacity: float | None
) -> tuple[Html, Html]:
    """The GPU as one bar, and the same as a table. All in GiB; `reserved`: at that peak. What is more than the GPU has
    lies behind a line where its memory ends."""
    peak = sum(categories.values())
    reserved = max(peak, reserved)
    needs = reserved + outside
    size = max(capacity or 0.0, needs) or 1.0
    whole = capacity or size
    rows = [(name, gib, "", f"background: var(--{name})") for name, gib in categories.items()]
    rows += [
        ("reserved, unused", reserved - peak, "cached", ""),
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
    if needs - whole >= 0.005:  # seen with two decimals
        said = f"The GPU has {whole:.2f} GiB"
        parts.append(el("span", class_="end", title=said, style=f"left: {100 * whole / size:.2f}%"))
        rows.append(("more than the GPU has", needs - whole, "line dash", "border-color: var(--bad)"))
    elif capacity is not None:
        rows.append(("free", max(0.0, whole - needs), "", ""))
    bar = el("div", *parts, class_="card", role="img", aria_label=f"Of {whole:.2f} GiB: {words}")
    table = figure_table(
        caption,
        ("what", "GiB", "of the GPU" if capacity else "of all"),
        [
            (join([chip(colour, kind), name]), f"{gib:.2f}", f"{100 * gib / whole:.0f} %")
            for name, gib, kind, colour in rows
        ],
        numbers=(1, 2),
    )
    return bar, table


def phase_bars(caption: str, phases: Mapping[str, float]) -> Html:
    highest = max(phases.values(), default=0.0) or 1.0
    styles = {
        phase: f"width: {100 * gib / highest:.1f}%; background: var(--phase-{phase})" for phase, gib in phases.items()
    }
    rows = [(phase, f"{gib:.2f}", el("div", class_="bar", style=styles[phase])) for phase, gib in phases.items()]
    return el("div", figure_table(caption, ("phase", "GiB", ""), rows, numbers=(1,)), class_="bars")


def chip(style: str, kind: str = "") -> Html:
    """A sample of a colour, beside what it stands for."""
    return el("span", class_=f"chip {kind}".strip(), style=style, aria_hidden="true")
