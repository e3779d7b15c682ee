"""HTML that escapes automatically: text becomes `Html` only through `el` and `join`."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable
from typing import Final

from hf_memkit.common.answer.safe_text import printable
from hf_memkit.common.resources import REPOSITORY

_LONGEST: Final = 4000


class Html(str):
    """A piece of HTML. Only `el` and `join` make one from text; constants of this package are HTML too."""

    __slots__ = ()


def join(parts: Iterable[Html | str | None], between: str = "") -> Html:
    """The joined parts. Text is escaped, and addresses of memkit's documentation in it become links."""
    shown = (
        part if isinstance(part, Html) else _ADDRESS.sub(_link, _escaped(part)) for part in parts if part is not None
    )
    return Html(between.join(shown))


def el(tag: str, *children: Html | str | None, **attributes: str | None) -> Html:
    """`el("a", "x < y", class_="n", data_step="3")` → `<a class="n" data-step="3">x &lt; y</a>`. Values and children
    may be any text; tags and names of attributes are constants of this package."""
    shown = (
        f' {name.rstrip("_").replace("_", "-")}="{_escaped(value)}"'
        for name, value in attributes.items()
        if value is not None
    )
    return Html(f"<{tag}{''.join(shown)}>{join(children)}</{tag}>")


_ADDRESS: Final = re.compile(re.escape(REPOSITORY) + r"(?:/blob/main/([\w./#-]*[\w]))?")


def _link(address: re.Match[str]) -> str:
    page, _, part = (address[1] or "").removeprefix("docs/").partition("#")
    named = part.replace("-", " ") or page.removesuffix(".md").replace("-", " ")
    return f'<a href="{address[0]}">{named or "memkit"}</a>'


def _escaped(part: Html | str) -> str:
    return str(part) if isinstance(part, Html) else html.escape(printable(part, _LONGEST), quote=True)
