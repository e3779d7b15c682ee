"""Text of models, paths, logs and libraries, made safe to print."""

from __future__ import annotations

import unicodedata
from typing import Any, Final

_STEERING: Final = frozenset({"Cc", "Cf", "Co", "Cs", "Zl", "Zp"})
"""Unicode categories that control a terminal or browser: control characters (as in ANSI escapes), formatting (such as
bidirectional overrides), private use, surrogates, line and paragraph separators."""


def text(value: Any, limit: int = 200) -> str:
    """`value` on one line of at most `limit` characters; control characters are written out, such as `\\x1b`."""
    raw = value if isinstance(value, str) else str(value)
    shown = []
    for character in raw[: limit + 1]:
        if character in "\t\n\r":
            shown.append(" ")
        elif unicodedata.category(character) in _STEERING:
            code = ord(character)
            shown.append(f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}" if code < 65536 else f"\\U{code:08x}")
        else:
            shown.append(character)
    if len(raw) > limit:
        return "".join(shown[: limit - 1]) + "…"
    return "".join(shown)


def sentence(value: str) -> str:
    """The text with a capital letter and a full stop. A name such as vLLM or adamw_torch keeps its first letter."""
    first = value.partition(" ")[0].strip(",;:.").replace("-", "")
    capital = value[:1].upper() + value[1:] if first.isalpha() and first.islower() else value
    return f"{capital.rstrip('.')}."
