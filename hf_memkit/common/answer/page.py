"""An answer as one HTML page, which contains its style, script and data."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from hf_memkit.common.answer.answer import (
    Answer,
    AnswerBlock,
    Bars,
    Beside,
    Cell,
    Changes,
    Chart,
    Code,
    Facts,
    Item,
    Lines,
    Table,
    View,
    WholeGpu,
    is_empty,
)
from hf_memkit.common.answer.document import document, write_document
from hf_memkit.common.answer.html import Html, el, join
from hf_memkit.common.answer.terminal import kept_columns

_MARKS: Final = {"diamond": "◆", "square": "■", "x": "✕"}
"""Characters for Plotly's symbols in a chart's key."""

_MORE: Final = "more than the GPU has"


def write_page(path: str | Path, answer: Answer, *, guide: str, command: str = "") -> Path:
    """Writes the page and returns its path; replaces only an earlier page of memkit.

    Args:
        guide: page of the documentation that explains it, such as `"plan.md"`.
        command: the typed command.
    """
    return write_document(path, page(answer, guide=guide, command=command, dated=True))


def page(answer: Answer, *, guide: str, command: str = "", dated: bool = False) -> str:
    """The page's HTML."""
    blocks = [each for each in answer.blocks if each.views & View.PAGE]
    first = next((place for place, each in enumerate(blocks) if each.heading), len(blocks))
    opening = next((place for place, each in enumerate(blocks[:first]) if not isinstance(each, Lines)), first)
    lead = el("div", el("h1", answer.headline), *_shown(blocks[:opening]), class_=f"lead {answer.state}")
    body = join([el("header", lead, *_shown(blocks[opening:first])), *_sections(blocks[first:])], "\n")
    return document(answer.title, body, charts(answer), guide=guide, command=command, dated=dated)


def charts(answer: Answer) -> dict[str, Any]:
    """The charts by place, as the page's script draws them."""
    return {
        each.place: {"traces": list(each.traces), "x": each.x, "y": each.y, "hovermode": each.hovermode}
        for each in _all(answer.blocks)
        if isinstance(each, Chart)
    }


def _all(blocks: Iterable[AnswerBlock]) -> Iterator[AnswerBlock]:
    for each in blocks:
        yield from _all(each.blocks) if isinstance(each, Beside) else (each,)


def _sections(blocks: Sequence[AnswerBlock]) -> Iterator[Html]:
    """Sections, each from a heading to the next."""
    starts = [place for place, each in enumerate(blocks) if each.heading]
    for start, end in zip(starts, [*starts[1:], len(blocks)], strict=False):
        head = blocks[start]
        yield el("section", el("h2", head.heading), *_shown(blocks[start:end]), id=head.name or None)


def _shown(blocks: Iterable[AnswerBlock]) -> Iterator[Html]:
    for each in blocks:
        if each.views & View.PAGE and not is_empty(each):
            parts = list(_block(each))
            yield from [el("details", el("summary", each.folded), *parts)] if each.folded else parts


def _block(block: AnswerBlock) -> Iterator[Html]:
    match block:
        case Lines(kind="note") if len(block.lines) > 1:
            yield el("ul", *(el("li", line) for line in block.lines), class_="soft")
        case Lines():
            inside = {"strong": "strong", "warning": "strong"}.get(block.kind)
            soft = "soft" if block.kind == "note" else None
            yield from (el("p", el(inside, line) if inside else line, class_=soft) for line in block.lines)
        case Facts():
            rows = [(el("dt", name), el("dd", value)) for name, value in block.rows]
            if block.form == "tiles":
                yield el("dl", *(el("div", *row) for row in rows), class_="tiles")
            else:
                yield el("dl", *(part for row in rows for part in row), class_=block.form)
        case Changes():
            yield el("ol" if block.numbered else "ul", *map(_change, block.items), class_="changes")
        case Code():
            lines = " \\\n".join(block.lines).split("\n") if block.words else block.lines
            if block.intro:
                yield el("p", block.intro)
            yield el("div", el("pre", join(lines, "\n")), class_="code")
        case Table():
            columns = kept_columns(block)
            rows_of_cells = [[_cell(row[place]) for place, _ in columns] for row in block.rows]
            table = _table(block.caption, [name for _, name in columns], rows_of_cells, label=block.heading)
            yield el("div", table, class_="tall") if block.tall else table
        case Bars():
            if block.gpu is not None:
                yield _picture(block, block.gpu)
            yield _bars(block)
        case Chart():
            yield _chart(block)
        case Beside():
            shown = [each for each in block.blocks if each.views & View.PAGE]
            yield from (_picture(each, each.gpu) for each in shown if isinstance(each, Bars) and each.gpu is not None)
            yield el("div", *map(_beside, shown), class_="pair")


def _change(item: Item) -> Html:
    basis = f" ({item.basis.rstrip('.')})" if item.basis else ""
    saves = f" Saves {item.saves}{basis}." if item.saves else ""
    costs = el("span", f" Costs: {item.costs}", class_="soft") if item.costs else None
    setting = el("code", item.setting) if item.setting else None
    return el("li", setting, ": " if item.setting and item.text else "", item.text, saves, costs)


def _cell(cell: str | Cell) -> Html:
    cell = Cell(cell) if isinstance(cell, str) else cell
    note = el("small", cell.note) if cell.note else None
    return join([el("strong", cell.text) if cell.strong else cell.text, note])


def _table(
    caption: str, columns: Sequence[str], rows: Iterable[Sequence[Html | str]], kind: str = "", label: str = ""
) -> Html:
    """A table that scrolls if it is wider than the screen. A narrow screen shows the cells of a row below one another,
    each with its column's name."""
    names = [name.removeprefix(">") for name in columns]
    kinds = ["n" if name.startswith(">") else None for name in columns]
    head = [el("th", name, class_=kind, scope="col") for name, kind in zip(names, kinds, strict=True)]
    body = [
        el("tr", *(
            el("td", cell, class_=kind, data_column=name)
            for cell, name, kind in zip(row, names, kinds, strict=True)
        ))
        for row in rows
    ]  # fmt: skip
    stacks = "stacks" if len(names) > 3 and not kind else None
    shown = el("caption", caption) if caption else None
    table = el("table", shown, el("thead", el("tr", *head)), el("tbody", *body), class_=stacks)
    # The keyboard reaches it too, to scroll.
    return el("div", table, class_=f"scroll {kind}".strip(), tabindex="0", role="region", aria_label=caption or label)


def _beside(block: AnswerBlock) -> Html:
    parts = [_bars(block)] if isinstance(block, Bars) else _block(block)
    return el("div", el("h3", block.heading) if block.heading else None, *parts)


def _bars(block: Bars) -> Html:
    """A table with a row per bar, or per part of a GPU's picture."""
    if block.gpu is not None:
        parts, whole = _parts(block, block.gpu)
        of = ">of the GPU" if block.gpu.capacity else ">of all"
        rows = [
            (join([_chip(fill, kind), name]), f"{gib:.2f}", f"{100 * gib / whole:.0f} %")
            for name, gib, kind, fill in parts
        ]
        return _table(block.caption, ("what", ">GiB", of), rows)
    highest = max((bar.size for bar in block.rows), default=0) or 1
    drawn = [
        (bar.name, *bar.cells, el("div", class_="bar", style=_part(bar.size / highest, _fill(bar.colour))))
        for bar in block.rows
    ]
    first, *others = block.columns
    return _table(block.caption, (first, *(f">{name}" for name in others), ""), drawn, "bars")


def _parts(block: Bars, gpu: WholeGpu) -> tuple[list[tuple[str, float, str, str]], float]:
    """((name, GiB, class, style) of each part of the GPU with the free or missing memory last, GiB of the GPU)."""
    peak = sum(bar.size for bar in block.rows)
    reserved = max(peak, gpu.reserved)
    needs = reserved + gpu.outside
    whole = gpu.capacity or needs or 1.0
    parts = [(bar.name, bar.size, "", _fill(bar.colour)) for bar in block.rows]
    parts.append(("reserved, unused", reserved - peak, "cached", ""))
    parts.append(("outside the allocator", gpu.outside, "outside", ""))
    if needs - whole >= 0.005:  # visible with two decimals
        parts.append((_MORE, needs - whole, "line dash", "border-color: var(--bad)"))
    elif gpu.capacity is not None:
        parts.append(("free", max(0.0, whole - needs), "", ""))
    return parts, whole


def _picture(block: Bars, gpu: WholeGpu) -> Html:
    """The GPU as one bar, with a line where its memory ends if more is needed."""
    parts, whole = _parts(block, gpu)
    held = [each for each in parts if each[1] > 0 and each[0] not in (_MORE, "free")]
    size = max(whole, sum(gib for _, gib, _, _ in held))
    drawn = [
        el("span", class_=kind or None, title=f"{name}: {gib:.2f} GiB", style=_part(gib / size, fill))
        for name, gib, kind, fill in held
    ]
    if parts[-1][0] == _MORE:
        has = f"The GPU has {whole:.2f} GiB"
        drawn.append(el("span", class_="end", title=has, style=f"left: {100 * whole / size:.2f}%"))
    words = ", ".join(f"{name} {gib:.2f} GiB" for name, gib, _, _ in held)
    return el("div", *drawn, class_="card", role="img", aria_label=f"Of {whole:.2f} GiB: {words}")


def _part(share: float, fill: str) -> str:
    return f"width: {100 * share:.2f}%; {fill}"


def _fill(colour: str) -> str:
    return f"background: var(--{colour})"


def _chip(style: str, kind: str = "") -> Html:
    """A sample of a colour."""
    return el("span", class_=f"chip {kind}".strip(), style=style, aria_hidden="true")


def _chart(chart: Chart) -> Html:
    hint = el("noscript", el("p", "This chart needs JavaScript. The tables have its figures.", class_="soft"))
    place = el("div", hint, id=f"chart-{chart.place}", class_="chart", role="img", aria_label=chart.caption)
    points = Facts(chart.points) if chart.points else Lines(())
    return el("figure", _key(chart.traces), place, el("figcaption", chart.caption), *_block(points))


def _key(traces: Iterable[Mapping[str, Any]]) -> Html | None:
    """The key of a chart's colours and marks."""
    entries = []
    for trace in traces:
        marker = trace.get("marker", {})
        if "fillcolor" in trace or trace["type"] == "bar":
            sign = _chip(f"background: {trace.get('fillcolor') or marker['color']}")
        elif marker.get("symbol") in _MARKS:
            sign = el("strong", f"{_MARKS[marker['symbol']]} ", style=f"color: {marker['color']}", aria_hidden="true")
        elif "symbol" in marker and "text" not in trace:
            sign = _chip(f"background: {marker['color']}")
        elif "line" in trace:
            sign = _chip(f"border-color: {trace['line']['color']}", f"line {trace['line']['dash']}")
        else:
            continue
        entries.append(el("li", sign, trace["name"]))
    return el("ul", *entries, class_="key") if entries else None
