"""HTML that escapes by itself, and what every page is made of: its head, sections, tables. In: tags, attributes, text.
Out: `Html`, which text becomes only escaped."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable
from typing import Final

from hf_memkit.common.resources import REPOSITORY
from hf_memkit.measuring.report.sanitize import text

_LONGEST: Final = 4000


class Html(str):
    """A piece of finished HTML. Only `el` and `join` make one from text, and constants of this package are one."""

    __slots__ = ()


def join(parts: Iterable[Html | str | None], between: str = "") -> Html:
    """The parts in a row; those that are text are escaped, and addresses of memkit's documentation become links."""
    return Html(between.join(_linked(_escaped(part), part) for part in parts if part is not None))


def el(tag: str, *children: Html | str | None, **attributes: str | None) -> Html:
    """`el("a", "x < y", class_="n", data_step="3")` → `<a class="n" data-step="3">x &lt; y</a>`. Tags and names of
    attributes are constants of this package; values and children may be anything."""
    shown = (
        f' {name.rstrip("_").replace("_", "-")}="{_escaped(value)}"'
        for name, value in attributes.items()
        if value is not None
    )
    return Html(f"<{tag}{''.join(shown)}>{join(children)}</{tag}>")


def section(name: str | None, heading: str, *children: Html | str | None) -> Html:
    """`name`: its id."""
    return el("section", el("h2", heading), *children, id=name)


def lead(first: str, lines: Iterable[str], state: str | None, *, heading: str = "h1") -> Html:
    """The answer, and below it what it is of. `state`: `"near"`, `"bad"`, or another word where all is well."""
    return el(
        "div", el(heading, first), *(el("p", line) for line in lines), class_=f"lead {state}" if state else "lead"
    )


def tiles(rows: Iterable[tuple[str, str]]) -> Html:
    """The figures that matter most, by what they are."""
    return el("dl", *(el("div", el("dt", name), el("dd", value)) for name, value in rows), class_="tiles")


def terms(rows: Iterable[tuple[str, str]], kind: str) -> Html:
    """A list of names and what they are. `kind`: `"facts"` or `"glossary"`."""
    return el("dl", *(part for name, value in rows for part in (el("dt", name), el("dd", value))), class_=kind)


def figure_table(
    caption: str, columns: Iterable[str], rows: Iterable[Iterable[Html | str]], *, numbers: Iterable[int] = ()
) -> Html:
    """A table that scrolls by itself where it is wider than the screen. `numbers`: columns set to the right."""
    right = set(numbers)

    def cell(tag: str, i: int, child: Html | str, **attributes: str) -> Html:
        return el(tag, child, class_="n" if i in right else None, **attributes)

    head = el("tr", *(cell("th", i, name, scope="col") for i, name in enumerate(columns)))
    body = [el("tr", *(cell("td", i, child) for i, child in enumerate(row))) for row in rows]
    table = el("table", el("caption", caption), el("thead", head), el("tbody", *body))
    # Reached by keyboard too, where it can be scrolled.
    return el("div", table, class_="scroll", tabindex="0", role="region", aria_label=caption)


_ADDRESS: Final = re.compile(re.escape(REPOSITORY) + r"(?:/blob/main/([\w./#-]*[\w]))?")


def _linked(escaped: str, part: Html | str) -> str:
    """Escaped text with links. Nothing is loaded from there unless somebody follows one."""
    return escaped if isinstance(part, Html) else _ADDRESS.sub(_link, escaped)


def _link(address: re.Match[str]) -> str:
    return f'<a href="{address[0]}">{address[1] or "memkit"}</a>'


def _escaped(part: Html | str) -> str:
    return str(part) if isinstance(part, Html) else html.escape(text(part, _LONGEST), quote=True)
