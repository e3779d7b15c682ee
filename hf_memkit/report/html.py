"""HTML that escapes by itself. In: tags, attributes, text. Out: `Html`, which text becomes only escaped."""

from __future__ import annotations

import html
from collections.abc import Iterable
from typing import Final

from hf_memkit.report.sanitize import text

__all__ = ["Html", "el", "figure_table", "join"]

_LONGEST: Final = 4000


class Html(str):
    """A piece of finished HTML. Only `el` and `join` make one from text, and constants of this package are one."""

    __slots__ = ()


def join(parts: Iterable[Html | str | None], between: str = "") -> Html:
    """The parts in a row, those that are text escaped."""
    return Html(between.join(_escaped(part) for part in parts if part is not None))


def el(tag: str, *children: Html | str | None, **attributes: str | None) -> Html:
    """`el("a", "x < y", class_="n", data_step="3")` → `<a class="n" data-step="3">x &lt; y</a>`.

    Tags and names of attributes are constants of this package; values and children may be anything.
    """
    shown = (
        f' {name.rstrip("_").replace("_", "-")}="{_escaped(value)}"'
        for name, value in attributes.items()
        if value is not None
    )
    return Html(f"<{tag}{''.join(shown)}>{join(children)}</{tag}>")


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


def _escaped(part: Html | str) -> str:
    return str(part) if isinstance(part, Html) else html.escape(text(part, _LONGEST), quote=True)
