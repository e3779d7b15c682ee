"""Traces for the tests of the allocator: by hand, and at random from a seed."""

from __future__ import annotations

import random
from collections.abc import Sequence

from hf_memkit.common.terms import CATEGORIES, Phase
from hf_memkit.common.units import MIB
from hf_memkit.prediction.trace.trace import Trace

SIZES = (1, 300, 5_000, 70_000, MIB, MIB + 1, 3 * MIB, 9 * MIB, 12 * MIB, 50 * MIB)


def trace_of(events: Sequence[int], sizes: Sequence[int], marks: Sequence[tuple[int, Phase]] = ()) -> Trace:
    """A trace of these storages, all `other`, made by one operation."""
    other = CATEGORIES.index("other")
    return Trace(
        events=list(events),
        sizes_bytes=list(sizes),
        category_of=[other] * len(sizes),
        operation_of=[0] * len(sizes),
        module_of=[0] * len(sizes),
        operations=[""],
        modules=[""],
        marks=list(marks),
    )


def random_trace(seed: int, count: int) -> Trace:
    """`count` allocations and frees in random order, with about 100 storages at a time."""
    source = random.Random(seed)
    events: list[int] = []
    sizes: list[int] = []
    alive: list[int] = []
    while len(events) < count:
        if alive and (len(alive) > 100 or source.random() < 0.49):
            events.append(-alive.pop(source.randrange(len(alive))))
        else:
            sizes.append(source.choice((*SIZES, source.randrange(1, 40 * MIB))))
            alive.append(len(sizes))
            events.append(len(sizes))
    thirds = [(count // 3, "forward"), (2 * count // 3, "backward"), (count, "optimizer")]
    return trace_of(events, sizes, thirds)  # type: ignore[arg-type]
