"""Generated runs with a known truth, to judge a diagnosis by. In: a seed. Out: step records, and what must be said.

This file, `simulated_training.py` and `simulated_allocator.py` are written apart from `hf_memkit.report.diagnosis`.

What counts as true was fixed from a user's point of view, before any detector was seen, in shares of the GPU
(`capacity_gib`):

* Leak. Must be said: bytes that nothing will free grew in at least 4 steps, to at least 0.2 % of the GPU and 32 MiB
  (less is lost in the rounding of what people read), and they either passed 2 % of the GPU within the run, or would
  fill what is left of it within 20 times the run's length at the rate they grew. Must not be said: nothing leaked, or
  less than 0.02 % of the GPU in all.
* Longer batches. Must be said: after the run's first tenth (at least 3 steps) larger inputs set peaks that are more
  than 15 % of the GPU above the highest of that tenth, in a twentieth of the steps (at least 3); or one that is more
  than 5 % above it and within 10 % of all that this process can have. Must not: they set no peak more than 3 % above,
  or less than 8 % above and below 75 % of the GPU.
* Fragmentation. Must be said: after the first tenth at least 3 steps had to give the cache back (`alloc_retries`)
  while more than 10 % of the GPU was cached beyond the highest peak; or in a tenth of the steps (at least 5) more
  than 20 % of the GPU was so cached and the GPU was full to 95 %. Must not: at most one step did (two, at the end of
  a run that leaks), and what is cached beyond the highest peak stays under 10 % of the GPU, or the GPU under 80 %.
* Another process. Must be said: others took at least 3 % of the GPU and 300 MiB more than at the run's start, in at
  least 3 readings; where NVML cannot tell this process from others, 6 % and 1 GiB. Must not: others took less than
  0.4 % of the GPU more.

A run that is neither is not generated: the next one is drawn. A state that begins slowly has no single first step:
`first` and `by` are the step where the cause is there and the one where it must be said, and any answer between them
is right. Of a leak that keeps something every n steps: from n - 1 steps before the first time to the second time. Of
fragmentation: from where half of what is cached beyond the peak at `by` is there.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain, count
from pathlib import Path
from typing import Any, Final, Literal

from benchmarks.diagnosis.faulty_plans import FAULTY
from benchmarks.diagnosis.healthy_plans import HEALTHY
from benchmarks.diagnosis.simulated_job import Draft, Hidden, Scenario
from benchmarks.diagnosis.simulated_training import simulate
from hf_memkit.units import GIB, MIB

RUNS: Final = 300
SCENARIOS: Final[dict[str, Scenario]] = {**HEALTHY, **FAULTY}
Half = Literal["tune", "held-out"]

DECK: Final = tuple(name for name, scenario in SCENARIOS.items() for _ in range(scenario.cards))
_LEAST_STEPS = 40
_DRAWS = Path(__file__).with_name("generated_draws.json")


@dataclass(frozen=True)
class State:
    """A state that must be said; any first step from `first` to `by` is right."""

    kind: str
    first: int
    by: int


@dataclass(frozen=True)
class GeneratedRun:
    """What a detector gets (`steps`, `run`) and what it must find (`states`; none: it must be silent)."""

    name: str
    steps: list[dict[str, Any]]
    run: Mapping[str, Any]
    states: tuple[State, ...]


def half_of(seed: int) -> Half:
    """The tune half is for choosing thresholds; the held-out half is scored once they are fixed."""
    return "tune" if hashlib.sha256(f"run {seed}".encode()).digest()[0] % 2 == 0 else "held-out"


def runs(half: Half) -> Iterator[GeneratedRun]:
    """All runs of a half."""
    return (generate(seed) for seed in range(RUNS) if half_of(seed) == half)


@cache
def generate(seed: int) -> GeneratedRun:
    """The run of this seed; the same on every machine."""
    run = _draw(seed, _draws()[seed])
    assert run is not None, f"seed {seed} shows something else now: python -m benchmarks.diagnosis.generated_runs"
    return run


@cache
def _draws() -> list[int]:
    """By seed, a draw that shows what its scenario means to show."""
    found: list[int] = json.loads(_DRAWS.read_text())
    return found


def _draw(seed: int, draw: int) -> GeneratedRun | None:
    name = DECK[seed % len(DECK)]
    rng = random.Random(f"{seed}/{draw}")
    draft = SCENARIOS[name].draw(rng)
    steps, hidden = simulate(draft.job, draft.plan, rng)
    if len(steps) < _LEAST_STEPS:
        return None
    found_by_nvml = draft.job.nvml == "all"
    states = truth(steps, hidden, draft.job.capacity, found_by_nvml=found_by_nvml, meant=draft.meant)
    if states is None or not draft.meant <= {state.kind for state in states} <= draft.meant | draft.may:
        return None
    return GeneratedRun(f"{seed}: {name}", steps, _run_record(draft), states)


def write_draws() -> None:
    """Searches a draw for each seed whose own shows it no longer: needed after any change to what is simulated or to
    the table above."""
    found = [
        next(draw for draw in chain((known,), count()) if _draw(seed, draw) is not None)
        for seed, known in enumerate(_draws())
    ]
    _DRAWS.write_text(json.dumps(found) + "\n")


def truth(
    steps: Sequence[Mapping[str, Any]],
    hidden: Hidden,
    capacity: int,
    *,
    found_by_nvml: bool = True,
    meant: frozenset[str] = frozenset(),
) -> tuple[State, ...] | None:
    """The states of a run by the table above; None where it lies between the columns.

    `capacity` in bytes; `found_by_nvml`: NVML tells this process from others; `meant`: the kinds it was made to show.
    """
    verdicts = [
        _leak(hidden, capacity),
        _longer_batches(hidden, capacity),
        _fragmentation(steps, hidden, capacity, may_fill="leak" in meant),
        _another_process(hidden, capacity, found_by_nvml),
    ]
    if any(verdict is None for verdict in verdicts):
        return None
    offset = steps[0]["step"]
    return tuple(State(v.kind, v.first + offset, v.by + offset) for v in verdicts if isinstance(v, State))


_Verdict = State | Literal["silent"] | None
"""A state (with indices in place of steps), that there is none, or that it cannot be said."""


def _leak(hidden: Hidden, capacity: int) -> _Verdict:
    leaked = hidden.leaked
    most = max(leaked)
    if most < 0.0002 * capacity:
        return "silent"
    grew = [i for i in range(len(leaked)) if leaked[i] > (leaked[i - 1] if i else 0)]
    usable = min(capacity - out - other for out, other in zip(hidden.outside, hidden.others, strict=True))
    left = usable - max(peak - leak for peak, leak in zip(hidden.peak, leaked, strict=True))
    filled_soon = most / (len(leaked) - grew[0]) * 20 * len(leaked) >= left
    if len(grew) >= 4 and most >= max(0.002 * capacity, 32 * MIB) and (most > 0.02 * capacity or filled_soon):
        return State("leak", max(2 * grew[0] - grew[1] + 1, 0), grew[1])
    return None


def _longer_batches(hidden: Hidden, capacity: int) -> _Verdict:
    peaks = [peak - leak for peak, leak in zip(hidden.peak, hidden.leaked, strict=True)]
    tenth = max(3, len(peaks) // 10)
    before = max(peaks[:tenth])

    def share_above(i: int) -> float:
        return (peaks[i] - before) / capacity

    def fills(i: int) -> bool:
        usable = capacity - hidden.outside[i] - hidden.others[i]
        return share_above(i) > 0.05 and peaks[i] > 0.9 * usable

    later = range(tenth, len(peaks))
    far_above = [i for i in later if share_above(i) > 0.15]
    by = next((i for i in later if fills(i)), None)
    if len(far_above) >= max(3, len(peaks) / 20):
        by = min(far_above[0], by if by is not None else far_above[0])
    if by is not None:
        return State("longer batches", next(i for i in later if share_above(i) > 0.02), by)
    most = max(share_above(i) for i in later)
    return "silent" if most < 0.03 or (most < 0.08 and max(peaks) < 0.75 * capacity) else None


def _fragmentation(steps: Sequence[Mapping[str, Any]], hidden: Hidden, capacity: int, *, may_fill: bool) -> _Verdict:
    retries = [record["alloc_retries"] for record in steps]
    retried = [i for i in range(3, len(retries)) if retries[i] > retries[i - 1]]
    gaps = [(r - h) / capacity for r, h in zip(hidden.reserved, hidden.highest, strict=True)]
    full = [
        (r + out + other) / capacity
        for r, out, other in zip(hidden.reserved, hidden.outside, hidden.others, strict=True)
    ]
    tenth = max(3, len(gaps) // 10)
    late = [i for i in retried if i >= tenth and gaps[i - 1] > 0.1]
    crammed = [i for i in range(3, len(gaps)) if gaps[i] > 0.2 and full[i] > 0.95]
    by = None
    if len(late) >= 3:
        by = late[2]
    if len(crammed) >= max(5, len(gaps) / 10):
        by = min(crammed[0], by if by is not None else crammed[0])
    if by is not None:
        half_open = (gaps[2] + max(gaps[2 : by + 1])) / 2
        return State("fragmentation", next(i for i in range(2, by + 1) if gaps[i] >= half_open), by)
    at_the_end = may_fill and bool(retried) and retried[0] > 0.9 * len(steps)
    few = len(retried) <= (2 if at_the_end else 1)
    return "silent" if few and (max(gaps) < 0.10 or max(full) < 0.8) else None


def _another_process(hidden: Hidden, capacity: int, found_by_nvml: bool) -> _Verdict:
    start = hidden.others[0]
    more = [others - start for others in hidden.others]
    if max(more) < 0.004 * capacity:
        return "silent"
    bar = max(0.03 * capacity, 300 * MIB) if found_by_nvml else max(0.06 * capacity, GIB)
    seen = [i for i in range(len(more)) if more[i] >= bar and hidden.measured[i]]
    if len(seen) < 3:
        return None
    return State("another process", next(i for i in range(len(more)) if more[i] > 0.004 * capacity), seen[0])


def _run_record(draft: Draft) -> dict[str, Any]:
    job, plan = draft.job, draft.plan
    return {
        "schema": 1,
        "kind": "run",
        "time": 1.7e9,
        "start_step": plan.resume[1] if plan.resume is not None else 0,
        "rank": 0,
        "world_size": 1,
        "hardware": {
            "device_type": "cuda",
            "device_count": 1,
            "capacity_gib": job.capacity / GIB,
            "allocator_settings": "expandable_segments:True" if job.expandable else "",
            "ram_gib": job.ram_gib,
        },
        "arguments": {
            "per_device_train_batch_size": plan.shapes[0][0][0],
            "gradient_accumulation_steps": len(plan.shapes[0]),
            "max_steps": len(plan.shapes),
            "activation_checkpointing": job.checkpointing,
            **({"torch_empty_cache_steps": job.empty_cache_steps} if job.empty_cache_steps else {}),
        },
        "vocabulary": job.vocabulary,
    }


if __name__ == "__main__":
    write_draws()
