"""The wall between measuring and training. In: any call. Out: its result, or None and a counted error."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_KEPT_MESSAGES = 5

_logger = logging.getLogger(__name__)


class ErrorBarrier:
    """Calls functions so that no Exception leaves them; KeyboardInterrupt and SystemExit are the user's, and pass.
    `count` and the first `messages` go into the end record."""

    def __init__(self) -> None:
        self.count = 0
        self.messages: list[str] = []

    def call(self, name: str, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T | None:
        """What `function` returns, or None if it raised."""
        try:
            return function(*args, **kwargs)
        except Exception as error:
            self.note(name, error)
            return None

    def note(self, name: str, error: Exception) -> None:
        """Counts an error that was caught."""
        self.count += 1
        if len(self.messages) < _KEPT_MESSAGES:
            self.messages.append(f"{name}: {describe(error)}")
        if self.count == 1:
            # The logger and not `warnings`: under `python -W error` a warning would raise into training. A handler or
            # filter of the user's may still.
            with contextlib.suppress(Exception):
                _logger.warning("memkit could not measure (%s); training goes on", self.messages[0])


def describe(error: BaseException) -> str:
    """`"ValueError: text"`, in one line, even if the error cannot print itself."""
    try:
        text = str(error)
    except Exception:
        text = "(no text)"
    return f"{type(error).__name__}: {' '.join(text.split())[:500]}"
