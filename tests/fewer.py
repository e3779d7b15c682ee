"""Fewer cases of a list or a product of lists, the same ones each time; the others run with `scripts/test --slow` or
`--exhaustive`, which CI does not call.

@pytest.mark.parametrize("event", first(EVENTS))
@pytest.mark.parametrize(("architecture", "setting"), pairs(CASES, quick=6))
@pytest.mark.parametrize(("name", "variant"), one_each(PACK, task, engine))
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import pytest


def first(cases: Sequence[Any]) -> list[Any]:
    """All cases, the first of them in the short run: it shows the mechanism, the others repeat it."""
    return some(cases, *cases[:1])


def some(cases: Sequence[Any], *kept: Any) -> list[Any]:
    """All cases, of which the kept ones run as their test does, and the others with `--exhaustive`."""
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)),
            marks=[] if case in kept else [pytest.mark.exhaustive],
        )
        for case in cases
    ]


def pairs(cases: Sequence[tuple[str, str]], *, quick: int) -> list[Any]:
    """All cases; of the first `quick` first values one runs as its test does, each with another second value where
    there is one, and the others run with `--exhaustive`.

    Those of a second value with bf16 in its name carry that marker.
    """
    used: Counter[str] = Counter()
    kept: list[tuple[str, str]] = []
    for first in list(dict.fromkeys(first for first, _ in cases))[:quick]:
        pair = min((case for case in cases if case[0] == first), key=lambda case: used[case[1]])
        used[pair[1]] += 1
        kept.append(pair)
    return [
        pytest.param(
            *case,
            marks=[
                *([] if case in kept else [pytest.mark.exhaustive]),
                *([pytest.mark.bf16] if "bf16" in case[1] else []),
            ],
        )
        for case in cases
    ]


def one_each(cases: Sequence[Any], *keys: Callable[[Any], Hashable]) -> list[Any]:
    """A case for each value of each key: the first that has it. Without keys: the first case."""
    seen: set[tuple[int, Hashable]] = set()
    found = []
    for case in cases:
        values = {(number, key(case)) for number, key in enumerate(keys)} or {(0, None)}
        marks = [pytest.mark.exhaustive] if values <= seen else []
        seen |= values
        found.append(pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=marks))
    return found
