"""Step records of a made-up training, one thing at a time wrong with it: for the tests of the diagnosis."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

from hf_memkit.report.diagnosis import Finding, diagnose

MIB = 1 / 1024
CAPACITY = 16.0
FLOOR = 4.0
CONTEXT = 0.5

Records = list[dict[str, Any]]
Level = Callable[[int], float]
SEEDS = range(8)


def nothing(step: int) -> float:
    return 0.0


def training(
    steps: int = 200,
    *,
    floor: Level = nothing,
    length: Callable[[int], int] = lambda step: 512,
    gap: Level = nothing,
    retries: Callable[[int], int] = lambda step: 0,
    others: Level = nothing,
    rss: Level = nothing,
    noise: float = 1.0,
    seed: int = 0,
    capacity: float = CAPACITY,
    activations: float = 4.0,
    nvml_every: int = 5,
    own_context_known: bool = True,
) -> Records:
    """A healthy training of `steps` steps on a GPU of 16 GiB, and what is added to it (GiB, from step 1 on).

    4 GiB stay at step end, and 4 more are needed for a sequence of 512; the allocator caches 5 % more than the highest
    peak. `noise` is that of the floor, in MiB.
    """
    chance = random.Random(seed)
    records: Records = []
    highest = 0.0
    for step in range(1, steps + 1):
        warm = 1 - math.exp(-step)
        held = FLOOR * (0.5 if step == 1 else 1.0) + floor(step) + abs(chance.gauss(0, noise)) * MIB
        peak = held + activations * length(step) / 512
        highest = max(highest, peak)
        reserved = min(highest * (1 + 0.05 * warm) + gap(step), capacity - CONTEXT - others(step))
        record: dict[str, Any] = {
            "kind": "step", "step": step, "steps": 1, "step_time_ms": 100.0, "samples": 8, "micro_batches": 1,
            "tokens": 8 * length(step), "longest_sequence": length(step), "allocated_gib": held,
            "reserved_gib": reserved, "fragmentation_gib": reserved - held, "peak_allocated_gib": peak,
            "peak_reserved_gib": reserved, "capacity_gib": capacity, "alloc_retries": retries(step),
            "allocator_ooms": 0, "host_rss_gib": 2 + 0.2 * warm + rss(step), "host_available_gib": 60 - rss(step),
        }  # fmt: skip
        if step % nvml_every == 1:
            record["device_used_gib"] = reserved + CONTEXT * warm + others(step)
            if own_context_known:
                record["outside_allocator_gib"] = CONTEXT * warm
        records.append(record)
    return records


def kinds(records: Records, **kwargs: Any) -> list[str]:
    return [finding.kind for finding in diagnose(records, **kwargs)]


def only(records: Records, kind: str, **kwargs: Any) -> Finding:
    found = diagnose(records, **kwargs)
    assert [finding.kind for finding in found] == [kind]
    return found[0]


def since(begin: int, level: Level) -> Level:
    """`level`, counted from step `begin` on; 0 before."""
    return lambda step: level(step - begin + 1) if step >= begin else 0.0


def changing_lengths(seed: int, least: int = 100, most: int = 512) -> Callable[[int], int]:
    chance = random.Random(seed)
    lengths = [chance.randint(least, most) for _ in range(5000)]
    return lambda step: lengths[step]


def fragments(step: int) -> float:
    return 0.07 * max(0, step - 80)
