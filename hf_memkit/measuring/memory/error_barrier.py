"""Keeps errors of measuring out of training."""

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
    """Calls functions; catches Exception, not BaseException. `count` and first `messages` go into the end record."""

    def __init__(self) -> None:
        self.count = 0
        self.messages: list[str] = []

    def call(self, name: str, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T | None:
        """The result of `function`, or None if it raised."""
        try:
            return function(*args, **kwargs)
        except Exception as error:
            self.note(name, error)
            return None

    def note(self, name: str, error: Exception) -> None:
        """Count a caught error."""
        self.count += 1
        if len(self.messages) < _KEPT_MESSAGES:
            self.messages.append(f"{name}: {describe(error)}")
        if self.count == 1:
            # The logger, not `warnings`: under `python -W error` a warning would raise into training. The user's
            # handlers and filters may raise too.
            with contextlib.suppress(Exception):
                _logger.warning("memkit could not measure (%s); training goes on", self.messages[0])


def describe(error: BaseException) -> str:
    """`"ValueError: text"` in one line, even if the error cannot print itself."""
    try:
        text = str(error)
    except Exception:
        text = "(no text)"
    return f"{type(error).__name__}: {' '.join(text.split())[:500]}"
