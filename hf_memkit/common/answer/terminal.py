"""An answer on a terminal, or as plain text. Nothing in it is read as markup."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table as Grid
from rich.text import Text

from hf_memkit.common.answer.answer import (
    NONE,
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
    is_empty,
)
from hf_memkit.common.answer.palette import COLOURS
from hf_memkit.common.answer.safe_text import text

_STATES: Final = {"good": "bold green", "near": "bold yellow", "bad": "bold red", "none": "bold"}
_STYLES: Final = {"text": "", "strong": "bold", "warning": "yellow", "note": "dim", "command": ""}
_LONGEST: Final = 1000
_SHORT_LONGEST: Final = 232
"""Characters of a sentence, in full and with `--short`: a library's message may be longer. `--json` has all of it."""

_WIDEST_TABLE: Final = 110
_SHORTEST_BAR: Final = 8
_BETWEEN: Final = 4
"""Columns between blocks that are side by side."""


def show(answer: Answer, *, short: bool = False, console: Console | None = None) -> None:
    """Prints the answer at once. Lines wider than the terminal are not cut."""
    console = console or Console(highlight=False)
    console.print(rendered(answer, console.width, short=short), crop=False)
    console.file.flush()


def show_blocks(blocks: Iterable[AnswerBlock], *, short: bool = False, console: Console | None = None) -> None:
    """Prints blocks that follow a printed answer."""
    console = console or Console(highlight=False)
    console.print(Group(*_blocks(blocks, console.width, short=short)), crop=False)


def rendered(answer: Answer, width: int, *, short: bool = False) -> Group:
    """For a Rich console of `width` characters."""
    reason = f": {text(answer.reason, _SHORT_LONGEST if short else _LONGEST)}" if answer.reason else ""
    first = Text.assemble((text(answer.verdict, _LONGEST), _STATES[answer.state]), reason)
    return Group(first, *_blocks(answer.blocks, width, short=short))


def plain(answer: Answer, width: int) -> str:
    """The answer as text without colour; only lines to copy may be longer than `width`."""
    out = io.StringIO()
    console = Console(file=out, width=width, color_system=None, force_terminal=False, legacy_windows=False)
    console.print(rendered(answer, width), crop=False)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def _blocks(blocks: Iterable[AnswerBlock], width: int, *, short: bool) -> Iterator[RenderableType]:
    """The blocks, with an empty line between them unless both are sentences without a heading."""
    before: AnswerBlock | None = Lines(())
    for block in blocks:
        if not block.views & (View.SHORT if short else View.TERMINAL) or is_empty(block):
            continue
        heading = "" if short or isinstance(block, Lines | Table) else block.heading
        tight = (_is_text(block) and _is_text(before)) or (isinstance(block, Code) and isinstance(before, Code))
        if (block.heading and not short) or not tight:
            yield Text("")
        if heading:
            yield Text(text(heading), "bold")
        yield from _block(block, width, short=short)
        before = block


def _is_text(block: AnswerBlock | None) -> bool:
    """Whether the block consists of sentences."""
    return isinstance(block, Lines) or (isinstance(block, Changes) and not any(item.setting for item in block.items))


def _block(block: AnswerBlock, width: int, *, short: bool) -> Iterator[RenderableType]:
    match block:
        case Lines():
            limit = block.short_limit if short else _LONGEST
            whole = block.kind == "command"
            for line in block.lines:
                yield Text(text(line, limit), _STYLES[block.kind], no_wrap=whole, overflow="ignore" if whole else None)
        case Facts():
            yield _facts(block.rows)
        case Changes():
            yield from _changes(block, _SHORT_LONGEST if short else _LONGEST)
        case Code():
            yield from _code(block, width)
        case Table():
            yield from _table(block, width, short=short)
        case Bars():
            yield _bars(block, width)
        case Beside():
            shown = [each for each in block.blocks if each.views & View.ON_TERMINAL]
            if len(shown) < 2 or sum(map(_least, shown)) + _BETWEEN * (len(shown) - 1) > width:
                yield from _blocks(shown, width, short=short)
                return
            grid = Grid.grid(padding=(0, _BETWEEN, 0, 0))
            each_width = (width - _BETWEEN * (len(shown) - 1)) // len(shown)
            grid.add_row(*(Group(*_block(each, each_width, short=short)) for each in shown))
            yield grid
        case Chart():
            pass  # only for a page


def _facts(rows: Iterable[tuple[str, str]]) -> Grid:
    grid = Grid.grid(padding=(0, 2, 0, 0))
    for name, value in rows:
        grid.add_row(Text(text(name)), Text(text(value, _LONGEST)))
    return grid


def _changes(block: Changes, limit: int) -> Iterator[RenderableType]:
    for number, item in enumerate(block.items, 1):
        if not item.setting:
            yield Text(text(item.text, limit))
            continue
        grid = Grid.grid(padding=(0, 1, 0, 0))
        first, *others = _item(item, limit)
        details = others if block.numbered else [Padding(each, (0, 0, 0, 2)) for each in others]
        grid.add_row(f"  {number}." if block.numbered else " ", Group(first, *details))
        yield grid


def _item(item: Item, limit: int) -> Iterator[Text]:
    saves = f"   saves {item.saves}" if item.saves else ""
    yield Text(f"{text(item.setting, limit)}{saves}", overflow="fold")
    details = ("", item.text), ("Costs: ", item.costs), ("Estimated from: ", item.basis)
    yield from (Text(f"{name}{text(part, limit)}") for name, part in details if part)


def _code(block: Code, width: int) -> Iterator[RenderableType]:
    """Lines to copy, which are not broken."""
    if block.intro:
        yield Text(text(block.intro, _LONGEST))
    indent = "" if block.flush else "  "
    for line in _command(block.lines, width - 4) if block.words else block.lines:
        yield Text(f"{indent}{text(line, 10 * _LONGEST)}", no_wrap=True, overflow="ignore")


def _command(words: Sequence[str], width: int) -> Iterator[str]:
    """Lines of at most `width` characters, which a shell joins; a longer word has its own line."""
    line = ""
    for word in words:
        if line and len(line) + 1 + len(word) > width:
            yield f"{line} \\"
            line = ""
        line = f"{line} {word}".strip()
    yield line


def _table(block: Table, width: int, *, short: bool) -> Iterator[RenderableType]:
    grid = Grid(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    if block.caption and not block.heading:
        yield Text(text(block.caption, _LONGEST), "bold")
    shown = kept_columns(block)
    for place, name in shown:
        first, right = place == 0, name.startswith(">")
        title = block.heading if first and block.heading else name.removeprefix(">")
        whole = first and block.whole and not any(isinstance(row[0], Cell) for row in block.rows)
        grid.add_column(
            text(title), justify="right" if right else "left", no_wrap=right or whole, overflow="fold",
            ratio=1 if first and block.marked else None,
            min_width=max(len(_text(row[0])) for row in block.rows) if first and block.whole else None,
        )  # fmt: skip
    if block.marked:
        grid.width = min(width, _WIDEST_TABLE)
    rows = block.rows[: block.short_rows if short else block.rows_shown]
    for row in rows:
        grid.add_row(*(_cell(row[place], marked=block.marked and place == 0) for place, _ in shown))
    yield grid
    if len(rows) < len(block.rows) and not block.marked:
        yield Text(f"and {len(block.rows) - len(rows)} more", "dim")


def kept_columns(block: Table) -> list[tuple[int, str]]:
    """(place, name) of the first column and of those that are not empty in all rows."""
    empty = ("", NONE, Cell(NONE))
    return [
        (place, name)
        for place, name in enumerate(block.columns)
        if place == 0 or any(row[place] not in empty for row in block.rows)
    ]


def _text(cell: str | Cell) -> str:
    return cell if isinstance(cell, str) else cell.text


def _cell(cell: str | Cell, *, marked: bool) -> RenderableType:
    cell = Cell(cell) if isinstance(cell, str) else cell
    style = "bold" if cell.strong else ""
    if not marked:
        shown = Text(text(cell.text, _LONGEST), style)
        return shown.append(f"\n{text(cell.note, _LONGEST)}", "dim") if cell.note else shown
    grid = Grid.grid(padding=(0, 1, 0, 0))
    grid.add_row(Text("→" if cell.strong else " ", style), Text(text(cell.text, _LONGEST), style))
    if cell.note:
        grid.add_row("", Padding(Text(text(cell.note, _LONGEST), "dim"), (0, 0, 0, 2)))
    return grid


def _bar_columns(block: Bars) -> Sequence[str]:
    """Titles of the columns; empty for names with one size."""
    return block.columns if len(block.columns) > 2 else [""] * len(block.columns)


def _least(block: AnswerBlock) -> int:
    """Minimum width of the block."""
    if not isinstance(block, Bars):
        return 40
    table = zip(_bar_columns(block), *((bar.name, *bar.cells) for bar in block.rows), strict=True)
    return sum(2 + max(map(len, column)) for column in table) + _SHORTEST_BAR


def _bars(block: Bars, width: int) -> RenderableType:
    """A row per bar; the longest bar reaches the right margin, and the smallest is a sliver."""
    columns = _bar_columns(block)
    longest = max(_SHORTEST_BAR, width - _least(block) + _SHORTEST_BAR)
    highest = max((bar.size for bar in block.rows), default=0) or 1
    grid = Grid(
        box=None, show_header=any(columns), padding=(0, 2, 0, 0), pad_edge=False, header_style="bold",
        title=Text(text(block.caption), "bold") if block.caption and not block.heading else None, title_justify="left",
    )  # fmt: skip
    for place, name in enumerate((*columns, "")):
        grid.add_column(name, justify="left" if place in (0, len(columns)) else "right", no_wrap=True)
    for bar in block.rows:
        length = round(longest * bar.size / highest)
        shown = "█" * length if length else "▏" if bar.size > 0 else ""
        grid.add_row(Text(text(bar.name)), *map(Text, bar.cells), Text(shown, COLOURS.get(bar.colour, "white")))
    return grid
