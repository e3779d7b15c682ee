"""Trainings whose memory goes wrong, one way or several at once. In: a random generator. Out: a draft."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from benchmarks.diagnosis.job_sketches import NORMAL, Sketch, ordinary_plan, sketch_job
from benchmarks.diagnosis.simulated_job import Draft, Job, Plan, Scenario, Shape
from benchmarks.diagnosis.simulated_training import simulate
from hf_memkit.units import GIB

# --- leaks ---


def _leaking(
    rng: random.Random, sketch: Sketch, plan: Plan, at: list[int], *, share: tuple[float, float] = (0.01, 0.35)
) -> Draft:
    """Keeps a tensor at each of these steps, together a share of the GPU."""
    low, high = share
    each = math.exp(rng.uniform(math.log(low), math.log(high))) * sketch.job.capacity / max(len(at), 1)
    plan.keeps = {step: int(each * rng.lognormvariate(0, 0.2)) for step in at}
    plan.leaks = True
    return Draft(sketch.job, plan, frozenset({"leak"}))


def _every_step(rng: random.Random) -> Draft:
    sketch = sketch_job(rng, held=rng.uniform(0.1, 0.4), peak=rng.uniform(0.45, 0.7), most_steps=1200)
    return _leaking(rng, sketch, ordinary_plan(sketch), list(range(1, sketch.steps + 1)))


def _per_log(rng: random.Random) -> Draft:
    sketch = sketch_job(rng, held=rng.uniform(0.1, 0.4), peak=rng.uniform(0.45, 0.7), least_steps=60)
    every = min(rng.choice((5, 10, 50, 100)), sketch.steps // 8)
    return _leaking(rng, sketch, ordinary_plan(sketch), list(range(every, sketch.steps + 1, every)))


def _evaluation_outputs(rng: random.Random) -> Draft:
    """Outputs of every evaluation are kept."""
    sketch = sketch_job(rng, held=rng.uniform(0.1, 0.4), peak=rng.uniform(0.45, 0.7), least_steps=100)
    plan = ordinary_plan(sketch)
    every = sketch.steps // rng.randint(6, 15)
    plan.evaluations = {
        step: (max(sketch.samples // 2, 1), sketch.longest) for step in range(every, sketch.steps, every)
    }
    return _leaking(rng, sketch, plan, [step + 1 for step in plan.evaluations], share=(0.03, 0.35))


def _late(rng: random.Random) -> Draft:
    sketch = sketch_job(rng, held=rng.uniform(0.1, 0.4), peak=rng.uniform(0.45, 0.7), most_steps=1500)
    start = int(rng.uniform(0.15, 0.7) * sketch.steps)
    return _leaking(rng, sketch, ordinary_plan(sketch), list(range(start, sketch.steps + 1)))


def _pausing(rng: random.Random) -> Draft:
    """Stops for a while, and goes on."""
    sketch = sketch_job(rng, held=rng.uniform(0.1, 0.4), peak=rng.uniform(0.45, 0.7), least_steps=80, most_steps=1500)
    stop = rng.uniform(0.25, 0.5)
    go_on = stop + rng.uniform(0.1, 0.3)
    at = [step for step in range(2, sketch.steps + 1) if not stop <= step / sketch.steps < go_on]
    return _leaking(rng, sketch, ordinary_plan(sketch), at, share=(0.02, 0.35))


def _to_the_end(rng: random.Random) -> Draft:
    """Leaks until the GPU is full."""
    sketch = sketch_job(rng, held=rng.uniform(0.1, 0.4), peak=rng.uniform(0.5, 0.7), least_steps=70, most_steps=1000)
    return _leaking(rng, sketch, ordinary_plan(sketch), list(range(1, sketch.steps + 1)), share=(0.4, 1.0))


def _resumed_leak(rng: random.Random) -> Draft:
    draft = _every_step(rng)
    checkpoint = int(rng.uniform(0.3, 0.6) * len(draft.plan.shapes))
    draft.plan.resume = (checkpoint, checkpoint)
    return draft


# --- longer batches ---

_LONGER: Final = frozenset({"longer batches"})


def _growing(rng: random.Random, most_steps: int = 800) -> Sketch:
    held = rng.uniform(0.1, 0.35)
    return sketch_job(rng, held=held, peak=rng.uniform(max(held + 0.3, 0.6), 0.93), most_steps=most_steps)


def _curriculum(rng: random.Random) -> Draft:
    """Longer sequences in a few stages."""
    sketch = _growing(rng, 2000)
    stages = sorted(rng.uniform(0.15, 0.85) for _ in range(rng.choice((1, 1, 2, 3))))
    low = rng.uniform(0.15, 0.5)
    jitter = rng.choice((0.0, 0.08))

    def length(step: int) -> float:
        stage = sum(step >= start * sketch.steps for start in stages)
        return (low + (1 - low) * stage / len(stages)) * (1 - jitter * rng.random())

    return Draft(sketch.job, ordinary_plan(sketch, sketch.shapes(length)), _LONGER)


def _ascending(rng: random.Random) -> Draft:
    """Data sorted by length, the shortest first."""
    sketch = _growing(rng)
    median, sigma = rng.uniform(0.2, 0.5), rng.uniform(0.2, 0.5)

    def length(step: int) -> float:
        return min(median * math.exp(sigma * NORMAL.inv_cdf((step + 0.5) / sketch.steps)), 1.0)

    # No cached piece is as long as what the next step needs, so that the cache may well fill the GPU.
    return Draft(sketch.job, ordinary_plan(sketch, sketch.shapes(length)), _LONGER, frozenset({"fragmentation"}))


def _giant(rng: random.Random) -> Draft:
    """One batch, or a few, that fill the GPU."""
    sketch = sketch_job(rng, held=rng.uniform(0.1, 0.35), peak=rng.uniform(0.85, 0.98), most_steps=800)
    first = int(rng.uniform(0.15, 0.95) * sketch.steps)
    giants = {first, *(rng.randrange(first, sketch.steps) for _ in range(rng.choice((0, 0, 2))))}
    usual = sketch.padded(rng.uniform(0.15, 0.4), rng.uniform(0.05, 0.3))
    return Draft(
        sketch.job,
        ordinary_plan(sketch, sketch.shapes(lambda step: rng.uniform(0.93, 1) if step in giants else usual(step))),
        _LONGER,
    )


# --- fragmentation ---


def _varied_sizes(rng: random.Random) -> Draft:
    """Each micro-batch needs other sizes than those that are cached, on a GPU that is nearly full."""
    sketch = sketch_job(rng, held=rng.uniform(0.1, 0.4), peak=rng.uniform(0.8, 1.0), most_steps=700)
    by_tokens = rng.random() < 0.5
    draw = sketch.padded(rng.uniform(0.3, 0.6), rng.uniform(0.25, 0.6))
    micro_batches = rng.choice((2, 4, 4, 8))

    def one() -> Shape:
        """Batches of so many samples, or of so many tokens."""
        share = draw(0)
        samples = sketch.samples * rng.uniform(0.5, 1) / share if by_tokens else sketch.samples
        return max(int(samples), 1), max(int(share * sketch.longest / 8) * 8, 8)

    shapes = [tuple(one() for _ in range(micro_batches)) for _ in range(min(sketch.steps, 400))]
    # The highest peak comes early: what follows is the cache's doing.
    largest = max(range(len(shapes)), key=lambda step: max(map(sketch.job.step_bytes, shapes[step])))
    early = rng.randrange(max(3, len(shapes) // 10))
    shapes[early], shapes[largest] = shapes[largest], shapes[early]
    job = replace(
        sketch.job,
        expandable=False,
        quadratic_heads=sketch.job.hidden // 64 if by_tokens and rng.random() < 0.5 else sketch.job.quadratic_heads,
        token_us=sketch.job.token_us * sketch.micro_batches / micro_batches,
    )
    plan = ordinary_plan(sketch, shapes)
    return Draft(_on_a_tight_gpu(job, plan, rng), plan, frozenset({"fragmentation"}))


def _on_a_tight_gpu(job: Job, plan: Plan, rng: random.Random) -> Job:
    """The job on a slice of a GPU that has room for its highest peak, and not for all that it would cache."""
    _, hidden = simulate(replace(job, capacity=4 * job.capacity), plan, random.Random(rng.random()))
    peak, cached = max(hidden.peak), max(hidden.reserved)
    tight = peak + int(0.6 * GIB + rng.uniform(0.1, 0.7) * (cached - peak))
    return replace(job, capacity=min(tight, job.capacity))


def _varied_later(rng: random.Random) -> Draft:
    """Batches of one size, and from some step on of many."""
    draft = _varied_sizes(rng)
    plan, steps = draft.plan, len(draft.plan.shapes)
    start = int(rng.uniform(0.15, 0.6) * steps)
    largest = max(plan.shapes, key=lambda shapes: max(map(draft.job.step_bytes, shapes)))
    plan.shapes = [largest] * start + list(plan.shapes[start:])
    return Draft(_on_a_tight_gpu(draft.job, plan, rng), plan, draft.meant)


# --- another process ---

_ANOTHER: Final = frozenset({"another process"})


def _comes(rng: random.Random, steps: int, share: float, capacity: int) -> list[int]:
    start = int(rng.uniform(0.1, 0.85) * steps)
    return [int(share * capacity) if step >= start else 0 for step in range(steps)]


def _neighbour(rng: random.Random, others: Callable[[random.Random, int, float, int], list[int]]) -> Draft:
    sketch = sketch_job(rng, held=rng.uniform(0.1, 0.35), peak=rng.uniform(0.4, 0.6))
    plan = ordinary_plan(sketch)
    plan.others = others(rng, sketch.steps, rng.uniform(0.04, 0.25), sketch.job.capacity)
    job = sketch.job if sketch.job.nvml != "none" else replace(sketch.job, nvml="all")
    return Draft(job, plan, _ANOTHER)


def _comes_and_goes(rng: random.Random, steps: int, share: float, capacity: int) -> list[int]:
    start = int(rng.uniform(0.1, 0.6) * steps)
    period = max(int(rng.uniform(0.05, 0.2) * steps), 4)
    return [
        int(share * capacity) if step >= start and (step - start) // period % 2 == 0 else 0 for step in range(steps)
    ]


def _grows(rng: random.Random, steps: int, share: float, capacity: int) -> list[int]:
    start = int(rng.uniform(0.1, 0.6) * steps)
    base = rng.choice((0.0, 0.05)) * capacity
    return [int(base + share * capacity * max(step - start, 0) / (steps - start)) for step in range(steps)]


# --- several at once ---


def _leak_and_longer(rng: random.Random) -> Draft:
    sketch = _growing(rng)
    start = rng.uniform(0.2, 0.8) * sketch.steps
    low = rng.uniform(0.2, 0.5)
    plan = ordinary_plan(sketch, sketch.shapes(lambda step: 1.0 if step >= start else low))
    draft = _leaking(rng, sketch, plan, list(range(1, sketch.steps + 1)), share=(0.02, 0.15))
    return replace(draft, meant=draft.meant | _LONGER)


def _leak_and_neighbour(rng: random.Random) -> Draft:
    draft = _every_step(rng)
    draft.plan.others = _comes(rng, len(draft.plan.shapes), rng.uniform(0.04, 0.15), draft.job.capacity)
    return replace(draft, job=replace(draft.job, nvml="all"), meant=draft.meant | _ANOTHER)


def _longer_and_neighbour(rng: random.Random) -> Draft:
    draft = _curriculum(rng)
    draft.plan.others = _comes(rng, len(draft.plan.shapes), rng.uniform(0.04, 0.1), draft.job.capacity)
    return replace(draft, job=replace(draft.job, nvml="all"), meant=draft.meant | _ANOTHER)


FAULTY: Final[dict[str, Scenario]] = {
    "leak every step": Scenario(2, _every_step),
    "leak per log": Scenario(1, _per_log),
    "leak of evaluation outputs": Scenario(1, _evaluation_outputs),
    "leak from a later step": Scenario(2, _late),
    "leak that pauses": Scenario(1, _pausing),
    "leak until full": Scenario(1, _to_the_end),
    "leak, resumed": Scenario(1, _resumed_leak),
    "curriculum": Scenario(2, _curriculum),
    "sorted ascending": Scenario(2, _ascending),
    "giant batch": Scenario(2, _giant),
    "varied sizes": Scenario(3, _varied_sizes),
    "varied sizes later": Scenario(2, _varied_later),
    "neighbour comes": Scenario(2, lambda rng: _neighbour(rng, _comes)),
    "neighbour comes and goes": Scenario(1, lambda rng: _neighbour(rng, _comes_and_goes)),
    "neighbour grows": Scenario(1, lambda rng: _neighbour(rng, _grows)),
    "leak and longer batches": Scenario(2, _leak_and_longer),
    "leak and another process": Scenario(1, _leak_and_neighbour),
    "longer batches and another process": Scenario(1, _longer_and_neighbour),
}
