"""HTML with automatic escaping: text becomes `Html` only through `el` and `join`."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable
from typing import Final

from hf_memkit.common.answer.safe_text import text
from hf_memkit.common.resources import REPOSITORY

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


_ADDRESS: Final = re.compile(re.escape(REPOSITORY) + r"(?:/blob/main/([\w./#-]*[\w]))?")


def _linked(escaped: str, part: Html | str) -> str:
    """Escaped text with links. Nothing is loaded from there unless somebody follows one."""
    return escaped if isinstance(part, Html) else _ADDRESS.sub(_link, escaped)


def _link(address: re.Match[str]) -> str:
    page, _, part = (address[1] or "").removeprefix("docs/").partition("#")
    named = part.replace("-", " ") or page.removesuffix(".md").replace("-", " ")
    return f'<a href="{address[0]}">{named or "memkit"}</a>'


def _escaped(part: Html | str) -> str:
    return str(part) if isinstance(part, Html) else html.escape(text(part, _LONGEST), quote=True)
