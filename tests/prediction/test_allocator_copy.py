"""A trace that goes on from a copy completes on the same GPUs as one replayed from its beginning."""

from __future__ import annotations

import pytest

from hf_memkit.common.units import MIB
from hf_memkit.prediction.allocator.from_the_middle import Started
from hf_memkit.prediction.allocator.replay import replay
from hf_memkit.prediction.allocator.settings import parse_settings
from tests.prediction.traces import random_trace

SETTINGS = ("", "expandable_segments:True", "max_split_size_mb:20", "roundup_power2_divisions:4")


@pytest.mark.parametrize("text", SETTINGS)
def test_the_same_gpus_serve(text: str) -> None:
    settings, outcomes = parse_settings(text)[0], set()
    for seed in range(6):
        trace = random_trace(seed, 400)
        free = replay(trace, settings)
        least = free.peak_requested_bytes
        started = Started(trace, settings, least, gpu_bytes=None)
        for cap in range(
            least, free.peak_reserved_bytes + 2 * MIB, max(MIB, (free.peak_reserved_bytes - least) // 12)
        ):
            expected = replay(trace, settings, cap).completed
            assert started.outcome(cap).completes == expected, (seed, cap)
            outcomes.add(expected)
    assert outcomes == {True, False}, "both happen"


@pytest.mark.parametrize("text", SETTINGS)
def test_an_outcome_is_that_of_every_cap_it_names(text: str) -> None:
    settings, shared = parse_settings(text)[0], 0
    for seed in range(6):
        trace = random_trace(seed, 400)
        free = replay(trace, settings)
        least, top = free.peak_requested_bytes, free.peak_reserved_bytes
        cap = top
        while cap > least:
            # Another one each time: what is known already would answer for itself.
            outcome = Started(trace, settings, least, gpu_bytes=None).outcome(cap)
            low, below = max(least, outcome.from_bytes), outcome.below_bytes or top + 2 * MIB
            assert outcome.from_bytes <= cap < below
            for other in {low, (low + cap) // 2, (cap + below) // 2, below - 1}:
                assert replay(trace, settings, other).completed == outcome.completes, (seed, cap, other)
                shared += other != cap
            cap = min(outcome.from_bytes, cap) - 1
    assert shared > 20, "caps beside those that were replayed"
