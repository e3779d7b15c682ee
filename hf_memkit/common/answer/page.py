"""An answer as one HTML page, which contains its style, script and data."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

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
    as_cell,
    is_empty,
)
from hf_memkit.common.answer.document import document, write_document
from hf_memkit.common.answer.html import Html, el, join

_MARKS: Final = {"diamond": "◆", "square": "■", "x": "✕"}
"""Characters for Plotly's symbols in a chart's key."""

_MISSING: Final = "more than the GPU has"
_FREE: Final = "free"


def write_page(path: str | Path, answer: Answer, *, guide: str, command: str = "") -> Path:
    """Writes the page and returns its path; replaces only an earlier page of memkit.

    Args:
        guide: page of the documentation that explains it, such as `"plan.md"`.
        command: the typed command.
    """
    return write_document(path, page(answer, guide=guide, command=command, dated=True))


def page(answer: Answer, *, guide: str, command: str = "", dated: bool = False) -> str:
    """The page's HTML."""
    blocks = [block for block in answer.blocks if block.views & View.PAGE]
    first_section = next((index for index, block in enumerate(blocks) if block.heading), len(blocks))
    before = blocks[:first_section]
    lead_end = next((index for index, block in enumerate(before) if not isinstance(block, Lines)), first_section)

    lead = el("div", el("h1", answer.headline), *_blocks(before[:lead_end]), class_=f"lead {answer.state}")
    header = el("header", lead, *_blocks(before[lead_end:]))
    body = join([header, *_sections(blocks[first_section:])], "\n")
    return document(answer.title, body, charts(answer), guide=guide, command=command, dated=dated)


def charts(answer: Answer) -> dict[str, Any]:
    """The charts by place, as the page's script draws them."""
    return {
        chart.place: {"traces": list(chart.traces), "x": chart.x, "y": chart.y, "hovermode": chart.hovermode}
        for chart in _flat(answer.blocks)
        if isinstance(chart, Chart)
    }


def _flat(blocks: Iterable[AnswerBlock]) -> Iterator[AnswerBlock]:
    """The blocks, with those of each `Beside` in its place."""
    for block in blocks:
        if isinstance(block, Beside):
            yield from _flat(block.blocks)
        else:
            yield block


def _sections(blocks: Sequence[AnswerBlock]) -> Iterator[Html]:
    """Sections, each from a heading to the next."""
    starts = [index for index, block in enumerate(blocks) if block.heading]
    ends = [*starts[1:], len(blocks)]
    for start, end in zip(starts, ends, strict=False):
        first = blocks[start]
        yield el("section", el("h2", first.heading), *_blocks(blocks[start:end]), id=first.name or None)


def _blocks(blocks: Iterable[AnswerBlock]) -> Iterator[Html]:
    for block in blocks:
        if not block.views & View.PAGE or is_empty(block):
            continue
        if block.folded:
            yield el("details", el("summary", block.folded), *_block(block))
        else:
            yield from _block(block)


def _block(block: AnswerBlock) -> Iterator[Html]:
    match block:
        case Lines():
            yield from _lines(block)
        case Facts():
            yield _facts(block)
        case Changes():
            yield el("ol" if block.numbered else "ul", *map(_change, block.items), class_="changes")
        case Code():
            if block.intro:
                yield el("p", block.intro)
            yield el("div", el("pre", join(block.lines, " \\\n" if block.words else "\n")), class_="code")
        case Table():
            columns = block.kept_columns()
            cells = [[_cell(as_cell(row[column])) for column, _ in columns] for row in block.rows]
            table = _table(block.caption, [name for _, name in columns], cells, label=block.heading)
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


def _lines(block: Lines) -> Iterator[Html]:
    if block.kind == "note" and len(block.lines) > 1:
        yield el("ul", *(el("li", line) for line in block.lines), class_="soft")
        return
    for line in block.lines:
        text = el("strong", line) if block.kind in ("strong", "warning") else line
        yield el("p", text, class_="soft" if block.kind == "note" else None)


def _facts(block: Facts) -> Html:
    rows = [(el("dt", name), el("dd", value)) for name, value in block.rows]
    if block.form == "tiles":
        return el("dl", *(el("div", *row) for row in rows), class_="tiles")
    return el("dl", *(part for row in rows for part in row), class_=block.form)


def _change(item: Item) -> Html:
    basis = f" ({item.basis.rstrip('.')})" if item.basis else ""
    saves = f" Saves {item.saves}{basis}." if item.saves else ""
    costs = el("span", f" Costs: {item.costs}", class_="soft") if item.costs else None
    setting = el("code", item.setting) if item.setting else None
    return el("li", setting, ": " if item.setting and item.text else "", item.text, saves, costs)


def _cell(cell: Cell) -> Html:
    text = el("strong", cell.text) if cell.strong else cell.text
    return join([text, el("small", cell.note) if cell.note else None])


def _table(
    caption: str, columns: Sequence[str], rows: Iterable[Sequence[Html | str]], kind: str = "", label: str = ""
) -> Html:
    """A table that scrolls if too wide. A narrow screen shows a row's cells below one another, with column names."""
    names = [name.removeprefix(">") for name in columns]
    classes = ["n" if name.startswith(">") else None for name in columns]
    head = [el("th", name, class_=class_, scope="col") for name, class_ in zip(names, classes, strict=True)]
    body = []
    for row in rows:
        row_parts = zip(row, names, classes, strict=True)
        body.append(el("tr", *(el("td", cell, class_=class_, data_column=name) for cell, name, class_ in row_parts)))

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
        return _parts_table(block, block.gpu)
    largest = max((bar.size for bar in block.rows), default=0) or 1
    rows = []
    for bar in block.rows:
        drawn = el("div", class_="bar", style=_part_style(bar.size / largest, f"background: var(--{bar.colour})"))
        rows.append((bar.name, *bar.cells, drawn))
    first, *others = block.columns
    return _table(block.caption, (first, *(f">{name}" for name in others), ""), rows, "bars")


class _Part(NamedTuple):
    """A part of a GPU's memory, with its colour: a CSS class or style."""

    name: str
    gib: float
    class_: str = ""
    style: str = ""


def _parts(block: Bars, gpu: WholeGpu) -> list[_Part]:
    """The parts of the GPU's memory. With a known capacity the last one is the free or missing memory."""
    bars_gib = sum(bar.size for bar in block.rows)
    parts = [_Part(bar.name, bar.size, style=f"background: var(--{bar.colour})") for bar in block.rows]
    parts.append(_Part("reserved, unused", max(0.0, gpu.reserved - bars_gib), "cached"))
    parts.append(_Part("outside the allocator", gpu.outside, "outside"))
    if gpu.capacity is None:
        return parts
    free = gpu.capacity - sum(part.gib for part in parts)
    if free <= -0.005:  # visible with two decimals
        parts.append(_Part(_MISSING, -free, "line dash", "border-color: var(--bad)"))
    else:
        parts.append(_Part(_FREE, max(0.0, free)))
    return parts


def _parts_table(block: Bars, gpu: WholeGpu) -> Html:
    parts = _parts(block, gpu)
    whole = gpu.capacity or sum(part.gib for part in parts) or 1.0
    rows = []
    for part in parts:
        name = join([_chip(part.style, part.class_), part.name])
        rows.append((name, f"{part.gib:.2f}", f"{100 * part.gib / whole:.0f} %"))
    return _table(block.caption, ("what", ">GiB", ">of the GPU" if gpu.capacity else ">of all"), rows)


def _picture(block: Bars, gpu: WholeGpu) -> Html:
    """The GPU as one bar, with a line where its memory ends if more is needed."""
    parts = _parts(block, gpu)
    used = [part for part in parts if part.gib > 0 and part.name not in (_MISSING, _FREE)]
    whole = gpu.capacity or sum(part.gib for part in used) or 1.0
    width = max(whole, sum(part.gib for part in used))
    drawn = []
    for part in used:
        style = _part_style(part.gib / width, part.style)
        drawn.append(el("span", class_=part.class_ or None, title=f"{part.name}: {part.gib:.2f} GiB", style=style))
    if parts[-1].name == _MISSING:
        title = f"The GPU has {whole:.2f} GiB"
        drawn.append(el("span", class_="end", title=title, style=f"left: {100 * whole / width:.2f}%"))
    label = ", ".join(f"{part.name} {part.gib:.2f} GiB" for part in used)
    return el("div", *drawn, class_="card", role="img", aria_label=f"Of {whole:.2f} GiB: {label}")


def _part_style(share: float, fill: str) -> str:
    return f"width: {100 * share:.2f}%; {fill}"


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
