"""Proofs by rule: each shows the real library refusing or ignoring what the rule is about."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["PROOFS", "proof"]

PROOFS: dict[str, Callable[[], None]] = {}


def proof(rule: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Adds the decorated function as the proof of `rule`."""

    def add(function: Callable[[], None]) -> Callable[[], None]:
        assert rule not in PROOFS, f"two proofs of {rule!r}"
        PROOFS[rule] = function
        return function

    return add
