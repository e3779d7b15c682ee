"""Finds the first words of known messages. Most lines of a log have none, so plain words are searched first."""

from __future__ import annotations

import re
from typing import Final

from hf_memkit.measuring.out_of_memory.engine_failures import FAILURES
from hf_memkit.measuring.out_of_memory.patterns import FORMS, Form

ENGINE_FORMS: Final = tuple(
    Form(row.form, row.cause, "none", row.head, row.words, row.rank) for row in FAILURES if row.head
)
"""Errors that are not about memory."""

FORM_OF: Final = {form.name: form for form in (*FORMS, *ENGINE_FORMS)}

_PATTERNS: Final = tuple(
    (form, re.compile(form.head), tuple(word.lower() for word in form.words)) for form in FORM_OF.values()
)
_WORDS: Final = tuple(dict.fromkeys(word for _, _, words in _PATTERNS for word in words))
_IN_MOST: Final = (
    "memor", "alloc", "kill", "out of", "out_of", "error", "oom", "space", "exhaus", "cudn", "cuda", "signal",
    "unable", "limit", "buffer", "died", "unexpected", "failed", "disk", "file", "exceed", "available",
)  # fmt: skip
_ENDS: Final = ("137", "135", " -9", "=-9", " -7", "=-7")
"""Words that are numbers, of `patterns._pattern_of_end`: without one of these words they are other numbers."""
_OF_ENDS: Final = ("exit", "return", "with")


def _by_stem() -> tuple[tuple[str, tuple[str, ...]], ...]:
    """All words, each once, by a part that several have."""
    grouped: dict[str, list[str]] = {}
    for word in _WORDS:
        grouped.setdefault(next((stem for stem in _IN_MOST if stem in word), word), []).append(word)
    return tuple((stem, tuple(words)) for stem, words in grouped.items())


_BY_STEM: Final = _by_stem()


def words_in(text: str) -> tuple[str, ...]:
    """The words of forms in a block of lines: searching it takes less time than searching each line."""
    lowered = text.lower().replace("\r\n", " ").replace("\n", " ").replace("\r", " ")  # a line may end in a word
    return tuple(word for stem, words in _BY_STEM if stem in lowered for word in words if word in lowered)


def might_be(text: str, words: tuple[str, ...] = _WORDS) -> bool:
    """Whether `text` may have a message: a quick test that most lines fail. `words`: those that its block has."""
    if not words:
        return False
    lowered = text.lower()
    for word in words:  # runs for every line of a log: half the time of any() or of one regular expression
        if word in lowered and (word not in _ENDS or any(other in lowered for other in _OF_ENDS)):
            return True
    return False


def heads(text: str, start: int = 0) -> list[tuple[re.Match[str], Form]]:
    """First words and form of each message in `text` from `start`, in order; at one place, in the order of `FORMS`."""
    lowered = text.lower()
    matches = [
        (match, form)
        for form, pattern, words in _PATTERNS
        if any(word in lowered for word in words)
        for match in pattern.finditer(text, start)
    ]
    if any(not form.general for _, form in matches):
        matches = [match for match in matches if not match[1].general]
    return sorted(matches, key=lambda head: head[0].start())
