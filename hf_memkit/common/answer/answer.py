"""What a verb answers: a verdict, and blocks in the order in which a person reads them.

```
verb's figures ─> Answer ─┬─> terminal.py   what the terminal shows, in full or with --short
                          └─> page.py       one HTML file
```
A verb fills one `Answer`. Each block says where it is shown (`views`), so that the three views never differ in words
or figures. Strings are plain text: the renderers escape them, and nothing in them is markup.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Flag
from typing import Any, Final, Literal, TypeVar

State = Literal["good", "near", "bad", "none"]
"""The colour of a verdict. `near`: works, but little is left; `none`: nothing is judged."""

NONE: Final = "—"
"""What is not known. A column of a table in which every row has it is omitted."""


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
        heading: begins a section. Blocks without one belong to the section before them. The terminal omits it with
            `--short` and above sentences.
        name: the section's id on the page.
        folded: the page shows the block when a person opens this line.
    """

    heading: str = ""
    name: str = ""
    views: View = View.ALL
    folded: str = ""


@dataclass(frozen=True, slots=True)
class Lines(AnswerBlock):
    """Sentences, one below the other. A line of kind `command` is never broken, because it is to be copied.
    `short_limit`: characters of each with `--short`."""

    lines: Sequence[str]
    kind: Literal["text", "strong", "warning", "note", "command"] = "text"
    short_limit: int = 140


@dataclass(frozen=True, slots=True)
class Facts(AnswerBlock):
    """Names and values. `tiles` and `glossary` are forms of the page: large figures, and explained words."""

    rows: Sequence[tuple[str, str]]
    form: Literal["facts", "tiles", "glossary"] = "facts"


@dataclass(frozen=True, slots=True)
class Item:
    """A change to make, or a setting that helps or does not. Without `setting` it is a plain sentence."""

    text: str
    setting: str = ""
    saves: str = ""
    costs: str = ""
    basis: str = ""


@dataclass(frozen=True, slots=True)
class Changes(AnswerBlock):
    """What to change."""

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


@dataclass(frozen=True, slots=True)
class Table(AnswerBlock):
    """
    Attributes:
        columns: a name that begins with `>` is set to the right. On a terminal a heading replaces the first name.
        caption: what the rows are; the page shows it, and the terminal where there is no heading.
        rows_shown, short_rows: rows that the terminal shows, and that it shows with `--short`; None: all.
        marked: rows that are strong have an arrow on the terminal.
        tall: the page shows it in a box that scrolls.
        whole: the terminal never breaks a text of the first column, which is copied.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[str | Cell]]
    caption: str = ""
    rows_shown: int | None = None
    short_rows: int | None = None
    marked: bool = False
    tall: bool = False
    whole: bool = False


@dataclass(frozen=True, slots=True)
class Bar:
    """A size with its name, what is printed of it, and a colour of `palette.COLOURS`."""

    name: str
    size: float
    cells: tuple[str, ...]
    colour: str


@dataclass(frozen=True, slots=True)
class WholeGpu:
    """What a GPU holds beside the bars, in GiB: the page draws all of it as one bar. `reserved` includes the bars."""

    reserved: float
    outside: float
    capacity: float | None


@dataclass(frozen=True, slots=True)
class Bars(AnswerBlock):
    """Sizes by name, each with a bar. `columns`: of the name and the cells. With `gpu` the sizes are GiB."""

    caption: str
    columns: Sequence[str]
    rows: Sequence[Bar]
    gpu: WholeGpu | None = None


@dataclass(frozen=True, slots=True)
class Chart(AnswerBlock):
    """A chart of the page, as Plotly's own traces; colours are CSS variables. `points`: labelled points, explained."""

    place: str
    caption: str
    traces: Sequence[Mapping[str, Any]]
    x: str
    y: str
    hovermode: str = "x unified"
    points: Sequence[tuple[str, str]] = ()


@dataclass(frozen=True, slots=True)
class Beside(AnswerBlock):
    """Blocks beside one another, where the screen is wide enough."""

    blocks: Sequence[AnswerBlock]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """
    Attributes:
        title: of the page's window.
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
    """Whether there is nothing to show."""
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
    """The blocks, shown in these views only; those that would be shown in none are omitted."""
    return [replace(each, views=each.views & views) for each in blocks if each.views & views]
