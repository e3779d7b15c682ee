"""Text of models, paths, logs and libraries, made safe to print."""

from __future__ import annotations

import unicodedata
from typing import Any, Final

from hf_memkit.common.secrets import masked

_CONTROLS: Final = frozenset({"Cc", "Cf", "Co", "Cs", "Zl", "Zp"})
"""Unicode categories that control a terminal or browser: control characters (as in ANSI escapes), formatting (such as
bidirectional overrides), private use, surrogates, line and paragraph separators."""


def printable(value: Any, limit: int = 200) -> str:
    """`value` on one line of at most `limit` characters, without secrets; control characters are written out, such as
    `\\x1b`."""
    raw = value if isinstance(value, str) else str(value)
    raw = masked(raw[: 4 * limit])  # a secret is whole where it is shown
    characters = [_printable_character(character) for character in raw[: limit + 1]]
    if len(raw) > limit:
        characters[limit - 1 :] = "…"
    return "".join(characters)


def _printable_character(character: str) -> str:
    if character in "\t\n\r":
        return " "
    if unicodedata.category(character) not in _CONTROLS:
        return character
    return character.encode("unicode_escape").decode()


def sentence(value: str) -> str:
    """The text with a capital letter and a full stop. A name such as vLLM or adamw_torch keeps its first letter."""
    first_word = value.partition(" ")[0].strip(",;:.").replace("-", "")
    if first_word.isalpha() and first_word.islower():
        value = value[:1].upper() + value[1:]
    return f"{value.rstrip('.')}."
