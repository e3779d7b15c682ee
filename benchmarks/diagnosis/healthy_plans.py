"""Healthy trainings, most of them with something that looks like trouble. In: a random generator. Out: a draft."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Final

from benchmarks.diagnosis.job_sketches import Sketch, ordinary_plan, sketch_job
from benchmarks.diagnosis.simulated_job import Draft, Scenario
from hf_memkit.units import GIB


def _healthy(rng: random.Random) -> Sketch:
    return sketch_job(rng, held=rng.uniform(0.1, 0.5), peak=rng.uniform(0.5, 0.8))


def _roomy(rng: random.Random) -> Sketch:
    """Far from the limit, with batches that vary: steps are simulated one by one, so fewer."""
    held = rng.uniform(0.1, 0.45)
    return sketch_job(rng, held=held, peak=held + rng.uniform(0.08, 0.3), most_steps=1000)


def _plain(rng: random.Random) -> Draft:
    sketch = _healthy(rng)
    return Draft(sketch.job, ordinary_plan(sketch))


def _padded(rng: random.Random) -> Draft:
    sketch = _roomy(rng)
    return Draft(
        sketch.job, ordinary_plan(sketch, sketch.shapes(sketch.padded(rng.uniform(0.1, 0.4), rng.uniform(0.2, 0.5))))
    )


def _grouped(rng: random.Random) -> Draft:
    """Trainer's group_by_length: within 50 batches from long to short, the longest of all first."""
    sketch = _roomy(rng)
    draw = sketch.padded(rng.uniform(0.1, 0.4), rng.uniform(0.2, 0.5))
    lengths = [draw(step) for step in range(sketch.steps)]
    for start in range(0, sketch.steps, 50):
        lengths[start : start + 50] = sorted(lengths[start : start + 50], reverse=True)
    longest = lengths.index(max(lengths))
    lengths[0], lengths[longest] = lengths[longest], lengths[0]
    return Draft(sketch.job, ordinary_plan(sketch, sketch.shapes(lengths.__getitem__)))


def _cyclical(rng: random.Random) -> Draft:
    sketch = _roomy(rng)
    period = rng.uniform(4, max(sketch.steps / 12, 5))
    shapes = sketch.shapes(lambda step: 0.55 + 0.4 * math.sin(2 * math.pi * step / period))
    return Draft(sketch.job, ordinary_plan(sketch, shapes))


def _rare_longest(rng: random.Random) -> Draft:
    """One batch longer than all others, and far from the limit."""
    held = rng.uniform(0.1, 0.4)
    sketch = sketch_job(rng, held=held, peak=held + rng.uniform(0.08, 0.2), most_steps=1000)
    rare = int(rng.uniform(0.2, 0.95) * sketch.steps)
    usual = sketch.padded(rng.uniform(0.4, 0.6), 0.05)
    return Draft(sketch.job, ordinary_plan(sketch, sketch.shapes(lambda step: 1.0 if step == rare else usual(step))))


def _cache_levels_off(rng: random.Random) -> Draft:
    """Something is kept in ever fewer steps, and from a third of the run on no more: tables, compiled shapes."""
    sketch = _healthy(rng)
    plan = ordinary_plan(sketch)
    last = max(int(rng.uniform(0.08, 0.35) * sketch.steps), 4)
    total = rng.uniform(0.005, 0.05) * sketch.job.capacity
    weight = {step: math.exp(-3 * step / last) for step in range(2, last) if rng.random() < 0.6}
    plan.keeps = {step: int(total * share / sum(weight.values())) for step, share in weight.items()}
    return Draft(sketch.job, plan)


def _jump_at_evaluation(rng: random.Random) -> Draft:
    """The first evaluation leaves a buffer that later ones use again."""
    sketch = _healthy(rng)
    plan = ordinary_plan(sketch)
    every = max(sketch.steps // rng.choice((2, 3, 6)), 10)
    plan.evaluations = dict.fromkeys(range(every, sketch.steps, every), (sketch.samples, sketch.longest))
    plan.keeps = {every + 1: int(rng.uniform(0.005, 0.06) * sketch.job.capacity)}
    return Draft(sketch.job, plan)


def _evaluation_fills_cache(rng: random.Random) -> Draft:
    sketch = sketch_job(rng, held=rng.uniform(0.1, 0.4), peak=rng.uniform(0.45, 0.6))
    plan = ordinary_plan(sketch, sketch.shapes(lambda step: 1.0))
    every = max(sketch.steps // rng.choice((1, 3, 6)) - 1, 10)
    shape = (max(int(sketch.samples * rng.uniform(1, 2)), 1), sketch.longest)
    plan.evaluations = dict.fromkeys(range(every, sketch.steps, every), shape)
    return Draft(sketch.job, plan)


def _resumed(rng: random.Random) -> Draft:
    sketch = _healthy(rng)
    plan = ordinary_plan(sketch)
    checkpoint = int(rng.uniform(0.2, 0.8) * sketch.steps)
    plan.resume = (min(checkpoint + rng.randrange(10), sketch.steps), checkpoint)
    return Draft(sketch.job, plan)


def _neighbour_from_start(rng: random.Random) -> Draft:
    sketch = sketch_job(rng, held=rng.uniform(0.1, 0.3), peak=rng.uniform(0.4, 0.6))
    plan = ordinary_plan(sketch)
    theirs = int(rng.uniform(0.02, 0.2) * sketch.job.capacity)
    leaves = sketch.steps if rng.random() < 0.7 else int(rng.uniform(0.2, 0.9) * sketch.steps)
    plan.others = [theirs if step < leaves else 0 for step in range(sketch.steps)]
    return Draft(sketch.job, plan)


def _nearly_full(rng: random.Random) -> Draft:
    sketch = sketch_job(rng, held=rng.uniform(0.3, 0.6), peak=rng.uniform(0.84, 0.95))
    return Draft(sketch.job, ordinary_plan(sketch, sketch.shapes(lambda step: 1.0)))


def _expandable(rng: random.Random) -> Draft:
    draft = _padded(rng)
    return replace(draft, job=replace(draft.job, expandable=True))


def _emptied(rng: random.Random) -> Draft:
    draft = _padded(rng) if rng.random() < 0.5 else _plain(rng)
    return replace(draft, job=replace(draft.job, empty_cache_steps=rng.choice((1, 4, 10, 50))))


def _context_grows(rng: random.Random) -> Draft:
    """Kernels loaded late and NCCL's buffers: outside the allocator, and this process's own."""
    sketch = _healthy(rng)
    plan = ordinary_plan(sketch)
    late = int(rng.uniform(0.05, 0.9) * sketch.steps) + 2
    plan.context = {1: int(rng.uniform(0.1, 0.9) * GIB), late: int(rng.uniform(0.02, 0.2) * GIB)}
    return Draft(replace(sketch.job, nvml="all"), plan)


def _noisy_floor(rng: random.Random) -> Draft:
    """Prefetched batches of pictures, of which more or fewer are there when a step ends."""
    sketch = _healthy(rng)
    plan = ordinary_plan(sketch)
    plan.prefetched = int(rng.uniform(0.001, 0.02) * sketch.job.capacity)
    return Draft(sketch.job, plan)


def _kept_scalars(rng: random.Random) -> Draft:
    """`losses.append(loss.detach())`: 512 bytes a step, for ever."""
    sketch = _healthy(rng)
    plan = ordinary_plan(sketch)
    plan.keeps = dict.fromkeys(range(1, sketch.steps + 1), 512)
    plan.leaks = True
    return Draft(sketch.job, plan)


HEALTHY: Final[dict[str, Scenario]] = {
    "plain": Scenario(3, _plain),
    "padded": Scenario(2, _padded),
    "grouped by length": Scenario(1, _grouped),
    "cyclical lengths": Scenario(1, _cyclical),
    "rare longest batch": Scenario(2, _rare_longest),
    "cache that levels off": Scenario(2, _cache_levels_off),
    "jump at an evaluation": Scenario(2, _jump_at_evaluation),
    "evaluation fills the cache": Scenario(1, _evaluation_fills_cache),
    "resumed": Scenario(1, _resumed),
    "neighbour from the start": Scenario(1, _neighbour_from_start),
    "nearly full": Scenario(1, _nearly_full),
    "expandable segments": Scenario(1, _expandable),
    "cache emptied": Scenario(1, _emptied),
    "context grows": Scenario(1, _context_grows),
    "noisy floor": Scenario(1, _noisy_floor),
    "scalars kept": Scenario(1, _kept_scalars),
}
