"""Proofs by rule: each shows the real library refusing or ignoring what the rule is about, and says which it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Fails = Literal["silent", "late", "loud", "unshown"]
"""How the library fails in a proof; where it shows several ways, the first of these.

silent: no error, warnings or not: it trains on, or does nothing, and not what was asked for.
late: an error, but only when the model is made or loaded, when Trainer or the engine is built, or in a step.
loud: an error while arguments, options or files are read, before there is a model.
unshown: no failure. The proof measures or reads what the rule goes by: a size, a table, the source of a kernel.
"""


@dataclass(frozen=True, slots=True)
class Proof:
    """What shows a rule, and how the library fails in it."""

    run: Callable[[], None]
    fails: Fails


PROOFS: dict[str, Proof] = {}

REFUSALS: list[bool] = []
"""For each error that `real.refused` has seen, since whoever runs the proofs cleared this: was there a model then?"""


def proof(rule: str, *, fails: Fails) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Adds the decorated function as the proof of `rule`."""

    def add(function: Callable[[], None]) -> Callable[[], None]:
        assert rule not in PROOFS, f"two proofs of {rule!r}"
        PROOFS[rule] = Proof(function, fails)
        return function

    return add
