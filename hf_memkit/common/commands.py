"""Commands that memkit prints for a shell."""

from __future__ import annotations

import shlex
from typing import Final

from hf_memkit.common.answer.safe_text import printable
from hf_memkit.common.secrets import MASK, hidden_words

_LONGEST: Final = 4000


def command(*words: object) -> str:
    """The words as one line to paste: quoted, without control characters, and with variables for secrets.

    >>> command("memkit", "run", "my job", "--hub_token", "abc")
    'memkit run \\'my job\\' --hub_token "$HF_TOKEN"'
    """
    return " ".join(map(_quoted, hidden_words([str(word) for word in words])))


def _quoted(word: str) -> str:
    parts = MASK.split(word)  # text, variable, text, variable … text
    if len(parts) == 1:
        return shlex.quote(printable(word, _LONGEST))
    parts[::2] = [shlex.quote(printable(part, _LONGEST)) if part else "" for part in parts[::2]]
    parts[1::2] = [f'"${variable}"' for variable in parts[1::2]]
    return "".join(parts)
