"""An answer on a terminal, or as plain text. Nothing in it is read as markup."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Column
from rich.table import Table as Grid
from rich.text import Text

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
    Lines,
    Table,
    View,
    as_cell,
    is_empty,
)
from hf_memkit.common.answer.palette import COLOURS
from hf_memkit.common.answer.safe_text import printable

_VERDICT_STYLES: Final = {"good": "bold green", "near": "bold yellow", "bad": "bold red", "none": "bold"}
_LINE_STYLES: Final = {"text": "", "strong": "bold", "warning": "yellow", "note": "dim", "command": ""}

_LONGEST: Final = 1000
"""Maximum length of a sentence. A library's message may be longer; `--json` has all of it."""

_LONGEST_SHORT: Final = 232
"""Maximum length of a sentence with `--short`."""

_LONGEST_NAME: Final = 200
_LONGEST_CODE: Final = 10_000

_WIDEST_TABLE: Final = 110
_SHORTEST_BAR: Final = 8
_NARROWEST_BLOCK: Final = 40
_GAP: Final = 4
"""Columns between blocks that are side by side."""


def show(answer: Answer, *, short: bool = False, console: Console | None = None) -> None:
    """Prints the answer at once. Lines wider than the terminal are not cut."""
    console = console or Console(highlight=False)
    console.print(render(answer, console.width, short=short), crop=False)
    console.file.flush()


def show_blocks(blocks: Iterable[AnswerBlock], *, short: bool = False, console: Console | None = None) -> None:
    """Prints blocks that follow a printed answer."""
    console = console or Console(highlight=False)
    console.print(Group(*_blocks(blocks, console.width, short=short)), crop=False)


def plain(answer: Answer, width: int) -> str:
    """The answer as text without colour; only lines to copy may be longer than `width`."""
    out = io.StringIO()
    console = Console(file=out, width=width, color_system=None, force_terminal=False, legacy_windows=False)
    console.print(render(answer, width), crop=False)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def render(answer: Answer, width: int, *, short: bool = False) -> Group:
    """The answer for a Rich console of `width` characters."""
    verdict = printable(answer.verdict, _LONGEST), _VERDICT_STYLES[answer.state]
    reason = printable(answer.reason, _LONGEST_SHORT if short else _LONGEST)
    headline = Text.assemble(verdict, f": {reason}" if reason else "")
    return Group(headline, *_blocks(answer.blocks, width, short=short))


def _blocks(blocks: Iterable[AnswerBlock], width: int, *, short: bool) -> Iterator[RenderableType]:
    """The blocks of this view. An empty line precedes each heading, and each change from sentences to other blocks."""
    view = View.SHORT if short else View.TERMINAL
    previous: AnswerBlock = Lines(())  # the headline
    for block in blocks:
        if not block.views & view or is_empty(block):
            continue

        both_sentences = _is_sentences(block) and _is_sentences(previous)
        both_code = isinstance(block, Code) and isinstance(previous, Code)
        starts_section = bool(block.heading) and not short
        if starts_section or not (both_sentences or both_code):
            yield Text("")

        if starts_section and not isinstance(block, Lines | Table):  # a table has it above its first column
            yield _safe(block.heading, "bold", _LONGEST_NAME)
        yield from _block(block, width, short=short)
        previous = block


def _is_sentences(block: AnswerBlock) -> bool:
    return isinstance(block, Lines) or (isinstance(block, Changes) and not any(item.setting for item in block.items))


def _safe(value: str, style: str = "", limit: int = _LONGEST) -> Text:
    """Rich text of a string that may contain anything."""
    return Text(printable(value, limit), style)


def _block(block: AnswerBlock, width: int, *, short: bool) -> Iterator[RenderableType]:
    match block:
        case Lines():
            yield from _lines(block, block.short_limit if short else _LONGEST)
        case Facts():
            yield _facts(block)
        case Changes():
            yield from _changes(block, _LONGEST_SHORT if short else _LONGEST)
        case Code():
            yield from _code(block, width)
        case Table():
            yield from _table(block, width, short=short)
        case Bars():
            yield _bars(block, width)
        case Beside():
            yield from _beside(block, width, short=short)
        case Chart():
            pass  # only for a page


def _lines(block: Lines, limit: int) -> Iterator[Text]:
    for line in block.lines:
        text = _safe(line, _LINE_STYLES[block.kind], limit)
        if block.kind == "command":
            text.no_wrap, text.overflow = True, "ignore"
        yield text


def _facts(block: Facts) -> Grid:
    grid = Grid.grid(padding=(0, 2, 0, 0))
    for name, value in block.rows:
        grid.add_row(_safe(name, limit=_LONGEST_NAME), _safe(value))
    return grid


def _changes(block: Changes, limit: int) -> Iterator[RenderableType]:
    for number, item in enumerate(block.items, 1):
        if not item.setting:
            yield _safe(item.text, limit=limit)
            continue

        saves = f"   saves {item.saves}" if item.saves else ""
        setting = Text(f"{printable(item.setting, limit)}{saves}", overflow="fold")
        details = [("", item.text), ("Costs: ", item.costs), ("Estimated from: ", item.basis)]
        lines = [Text(f"{label}{printable(detail, limit)}") for label, detail in details if detail]

        grid = Grid.grid(padding=(0, 1, 0, 0))
        if block.numbered:
            grid.add_row(f"  {number}.", Group(setting, *lines))
        else:
            grid.add_row(" ", Group(setting, *(Padding(line, (0, 0, 0, 2)) for line in lines)))
        yield grid


def _code(block: Code, width: int) -> Iterator[Text]:
    """Lines to copy, which are not broken."""
    if block.intro:
        yield _safe(block.intro)
    indent = "" if block.flush else "  "
    lines = _command_lines(block.lines, width - 4) if block.words else block.lines
    for line in lines:
        yield Text(f"{indent}{printable(line, _LONGEST_CODE)}", no_wrap=True, overflow="ignore")


def _command_lines(words: Sequence[str], width: int) -> Iterator[str]:
    """Lines of at most `width` characters, which a shell joins; a longer word has its own line."""
    line = ""
    for word in words:
        if line and len(line) + 1 + len(word) > width:
            yield f"{line} \\"
            line = ""
        line = f"{line} {word}".strip()
    yield line


def _table(block: Table, width: int, *, short: bool) -> Iterator[RenderableType]:
    if block.caption and not block.heading:
        yield _safe(block.caption, "bold")

    grid = Grid(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    if block.marked:
        grid.width = min(width, _WIDEST_TABLE)
    columns = block.kept_columns()
    for _, name in columns:
        right = name.startswith(">")
        title = printable(name.removeprefix(">"))
        grid.add_column(title, justify="right" if right else "left", no_wrap=right, overflow="fold")
    _style_first_column(grid.columns[0], block)

    rows = block.rows[: block.short_rows if short else block.rows_shown]
    for row in rows:
        grid.add_row(*(_cell(as_cell(row[column]), marked=block.marked and column == 0) for column, _ in columns))
    yield grid
    left_out = len(block.rows) - len(rows)
    if left_out and not block.marked:
        yield Text(f"and {left_out} more", "dim")


def _style_first_column(column: Column, block: Table) -> None:
    cells = [row[0] for row in block.rows]
    if block.heading:
        column.header = printable(block.heading)
    if block.marked:
        column.ratio = 1
    if block.whole:
        column.min_width = max(len(as_cell(cell).text) for cell in cells)
        column.no_wrap = column.no_wrap or not any(isinstance(cell, Cell) for cell in cells)  # a Cell's note may wrap


def _cell(cell: Cell, *, marked: bool) -> RenderableType:
    style = "bold" if cell.strong else ""
    text = _safe(cell.text, style)
    if not marked:
        return text.append(f"\n{printable(cell.note, _LONGEST)}", "dim") if cell.note else text

    grid = Grid.grid(padding=(0, 1, 0, 0))
    grid.add_row(Text("→" if cell.strong else " ", style), text)
    if cell.note:
        grid.add_row("", Padding(_safe(cell.note, "dim"), (0, 0, 0, 2)))
    return grid


def _bars(block: Bars, width: int) -> RenderableType:
    """A row per bar; the longest bar reaches the right margin, and the smallest is a sliver."""
    titles = _bar_titles(block)
    longest = max(_SHORTEST_BAR, width - _least_width(block) + _SHORTEST_BAR)
    largest = max((bar.size for bar in block.rows), default=0) or 1

    grid = Grid(box=None, show_header=any(titles), padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    if block.caption and not block.heading:
        grid.title, grid.title_justify = _safe(block.caption, "bold", _LONGEST_NAME), "left"
    for column, title in enumerate(titles):
        grid.add_column(title, justify="left" if column == 0 else "right", no_wrap=True)
    grid.add_column("", no_wrap=True)  # the bars

    for bar in block.rows:
        length = round(longest * bar.size / largest)
        drawn = "█" * length or ("▏" if bar.size > 0 else "")
        name = _safe(bar.name, limit=_LONGEST_NAME)
        grid.add_row(name, *map(Text, bar.cells), Text(drawn, COLOURS.get(bar.colour, "white")))
    return grid


def _bar_titles(block: Bars) -> Sequence[str]:
    """Titles of the columns; empty for names with one size."""
    return block.columns if len(block.columns) > 2 else [""] * len(block.columns)


def _beside(beside: Beside, width: int, *, short: bool) -> Iterator[RenderableType]:
    """The blocks side by side, or below one another if the terminal is too narrow."""
    shown = [block for block in beside.blocks if block.views & View.ON_TERMINAL]
    gaps = _GAP * (len(shown) - 1)
    if len(shown) < 2 or sum(map(_least_width, shown)) + gaps > width:
        yield from _blocks(shown, width, short=short)
        return

    grid = Grid.grid(padding=(0, _GAP, 0, 0))
    each_width = (width - gaps) // len(shown)
    grid.add_row(*(Group(*_block(block, each_width, short=short)) for block in shown))
    yield grid


def _least_width(block: AnswerBlock) -> int:
    """Minimum width of a block that is beside another."""
    if not isinstance(block, Bars):
        return _NARROWEST_BLOCK
    rows = [_bar_titles(block), *((bar.name, *bar.cells) for bar in block.rows)]
    widths = (max(map(len, column)) for column in zip(*rows, strict=True))
    return sum(2 + width for width in widths) + _SHORTEST_BAR
