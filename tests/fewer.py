"""Selects the cases of a list or of a product of lists that run by default, always the same ones. The others run with
`scripts/test --exhaustive`, which CI does not call.

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
    """All cases. The first one runs by default; the others test the same mechanism and run with `--exhaustive`."""
    return some(cases, *cases[:1])


def some(cases: Sequence[Any], *kept: Any) -> list[Any]:
    """All cases. The kept ones run by default, the others with `--exhaustive`."""
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)),
            marks=[] if case in kept else [pytest.mark.exhaustive],
        )
        for case in cases
    ]


def pairs(cases: Sequence[tuple[str, str]], *, quick: int) -> list[Any]:
    """All cases. By default one case runs for each of the first `quick` first values, with a different second value
    each time if possible; the others run with `--exhaustive`.

    Cases with bf16 in their second value get the marker `bf16`.
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
    """All cases. By default the first case with each value of each key runs; without keys only the first case."""
    seen: set[tuple[int, Hashable]] = set()
    parameters = []
    for case in cases:
        values = {(number, key(case)) for number, key in enumerate(keys)} or {(0, None)}
        marks = [pytest.mark.exhaustive] if values <= seen else []
        seen |= values
        parameters.append(pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=marks))
    return parameters
