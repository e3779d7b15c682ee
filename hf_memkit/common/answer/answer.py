"""The answer of a verb: a verdict, and blocks in the order of reading.

```
verb's figures ─> Answer ─┬─> terminal.py   in full or with --short
                          └─> page.py       one HTML file
```
Each block names the views that show it (`views`), so that these never differ in words or figures. Strings are plain
text, which the renderers escape.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Flag
from typing import Any, Final, Literal, TypeVar

State = Literal["good", "near", "bad", "none"]
"""The colour of a verdict. `near`: works with little headroom; `none`: no verdict."""

LineKind = Literal["text", "strong", "warning", "note", "command"]

NONE: Final = "—"
"""An unknown value. A column with no other values is omitted."""


class View(Flag):
    """Where a block is shown."""

    SHORT = 1
    TERMINAL = 2
    PAGE = 4
    FULL = TERMINAL | PAGE
    ON_TERMINAL = SHORT | TERMINAL
    ALL = SHORT | TERMINAL | PAGE


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerBlock:
    """
    Attributes:
        heading: begins a section, which includes the following blocks without one. The terminal omits it with
            `--short` and above sentences.
        name: the section's id on the page.
        folded: a line on the page; a click on it shows the block.
    """

    heading: str = ""
    name: str = ""
    views: View = View.ALL
    folded: str = ""


@dataclass(frozen=True, slots=True)
class Lines(AnswerBlock):
    """Sentences below one another; a `command` is not broken. `short_limit`: maximum of characters with `--short`."""

    lines: Sequence[str]
    kind: LineKind = "text"
    short_limit: int = 140


@dataclass(frozen=True, slots=True)
class Facts(AnswerBlock):
    """Names and values. On a page `tiles` are large figures, and a `glossary` explains words."""

    rows: Sequence[tuple[str, str]]
    form: Literal["facts", "tiles", "glossary"] = "facts"


@dataclass(frozen=True, slots=True)
class Item:
    """A change to make, or a setting. Without `setting` it is a sentence."""

    text: str
    setting: str = ""
    saves: str = ""
    costs: str = ""
    basis: str = ""


@dataclass(frozen=True, slots=True)
class Changes(AnswerBlock):
    items: Sequence[Item]
    numbered: bool = False


@dataclass(frozen=True, slots=True)
class Code(AnswerBlock):
    """Lines to copy: a command, a config, a diff.

    Attributes:
        words: the lines are words of one command, which a shell joins.
        flush: the terminal does not indent them, as for `patch`.
    """

    intro: str
    lines: Sequence[str]
    words: bool = False
    flush: bool = False


@dataclass(frozen=True, slots=True)
class Cell:
    """A table's cell with a second, quieter line."""

    text: str
    note: str = ""
    strong: bool = False


def as_cell(cell: str | Cell) -> Cell:
    return Cell(cell) if isinstance(cell, str) else cell


@dataclass(frozen=True, slots=True)
class Table(AnswerBlock):
    """
    Attributes:
        columns: a name that begins with `>` is right-aligned. On a terminal a heading replaces the first name.
        caption: describes the rows; the terminal shows it only without a heading.
        rows_shown, short_rows: number of rows on the terminal, in full and with `--short`; None means all.
        marked: the terminal puts an arrow before strong rows.
        tall: the page shows the table in a box that scrolls.
        whole: the terminal does not break the first column, which is for copying.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[str | Cell]]
    caption: str = ""
    rows_shown: int | None = None
    short_rows: int | None = None
    marked: bool = False
    tall: bool = False
    whole: bool = False

    def kept_columns(self) -> list[tuple[int, str]]:
        """(index, name) of the first column, and of each other column with a value in any row."""
        empty = ("", NONE, Cell(NONE))
        return [
            (index, name)
            for index, name in enumerate(self.columns)
            if index == 0 or any(row[index] not in empty for row in self.rows)
        ]


@dataclass(frozen=True, slots=True)
class Bar:
    """A size with its name, printed cells, and a colour of `palette.COLOURS`."""

    name: str
    size: float
    cells: tuple[str, ...]
    colour: str


@dataclass(frozen=True, slots=True)
class WholeGpu:
    """The whole memory of a GPU in GiB, which the page draws as one bar. `reserved` includes the bars."""

    reserved: float
    outside: float
    capacity: float | None


@dataclass(frozen=True, slots=True)
class Bars(AnswerBlock):
    """Sizes as bars. `columns`: titles of the name and the cells. With `gpu` the sizes are GiB."""

    caption: str
    columns: Sequence[str]
    rows: Sequence[Bar]
    gpu: WholeGpu | None = None


@dataclass(frozen=True, slots=True)
class Chart(AnswerBlock):
    """A chart for the page, in Plotly's traces with CSS variables as colours. `points`: explanations of its labels."""

    place: str
    caption: str
    traces: Sequence[Mapping[str, Any]]
    x: str
    y: str
    hovermode: str = "x unified"
    points: Sequence[tuple[str, str]] = ()


@dataclass(frozen=True, slots=True)
class Beside(AnswerBlock):
    """Blocks side by side if the screen is wide enough."""

    blocks: Sequence[AnswerBlock]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """
    Attributes:
        title: title of the page's window.
        verdict: the first words, in the colour of `state`.
        reason: the rest of the first line.
    """

    title: str
    verdict: str
    reason: str = ""
    state: State = "none"
    blocks: Sequence[AnswerBlock] = ()

    @property
    def headline(self) -> str:
        """`"FITS: needs up to 6.8 GiB; …"`."""
        return f"{self.verdict}: {self.reason}" if self.reason else self.verdict

    def then(self, *blocks: AnswerBlock) -> Answer:
        """The answer with further blocks."""
        return replace(self, blocks=(*self.blocks, *blocks))


def is_empty(block: AnswerBlock) -> bool:
    """Whether the block has no content."""
    match block:
        case Lines():
            return not block.lines
        case Facts() | Table() | Bars():
            return not block.rows
        case Changes():
            return not block.items
    return False


AnyBlock = TypeVar("AnyBlock", bound=AnswerBlock)


def only(views: View, *blocks: AnyBlock) -> list[AnyBlock]:
    """The blocks restricted to these views, without those that no view shows."""
    return [replace(each, views=each.views & views) for each in blocks if each.views & views]
