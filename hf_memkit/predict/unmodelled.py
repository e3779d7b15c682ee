"""The error of what cannot be traced: it is refused, or bounded by formulas, and never guessed."""

from __future__ import annotations

from hf_memkit.errors import InputError

__all__ = ["Unmodelled"]


class Unmodelled(InputError):
    """A setting or an operation whose memory the traced training cannot show. The message says which, and why."""
