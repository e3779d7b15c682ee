"""Jobs of all sizes on GPUs of all sizes. In: a random generator. Out: a job, its batch shapes, an ordinary plan."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import NormalDist

from benchmarks.diagnosis.simulated_job import Job, Plan, Shape
from hf_memkit.units import GIB

# What torch reports of an 8 GB GPU, T4, RTX 3090/4090, A100 40 GB, A6000/L40S and A100 80 GB, in GiB.
_GPUS_GIB = (7.79, 14.56, 23.57, 39.39, 44.42, 79.15)
_LENGTHS = (128, 256, 512, 1024, 2048, 4096)
_VOCABULARIES = (32_000, 50_257, 128_256, 151_936)
# Bytes a parameter of weights, gradients and optimizer states.
_PRECISIONS = {
    "mixed": (4, 4, 8), "bf16": (2, 2, 4), "8-bit": (2, 2, 2), "sgd": (4, 4, 0), "offload": (2, 2, 0),
    "lora": (2, 0.02, 0.08),
}  # fmt: skip

NORMAL = NormalDist()


@dataclass
class Sketch:
    """A job with its batch, before each step has a shape."""

    job: Job
    samples: int
    longest: int
    micro_batches: int
    steps: int
    rng: random.Random

    def shapes(self, length_of: Callable[[int], float]) -> list[tuple[Shape, ...]]:
        """Shapes from a length in shares of the longest, by step (0 for the first)."""
        return [
            tuple((self.samples, self._length(length_of(step))) for _ in range(self.micro_batches))
            for step in range(self.steps)
        ]

    def _length(self, share: float) -> int:
        return min(max(math.ceil(share * self.longest / 8) * 8, 8), self.longest)

    def padded(self, median: float, sigma: float) -> Callable[[int], float]:
        """The longest of a batch whose lengths are lognormal, in shares of the longest that is allowed."""

        def longest_of_batch(step: int) -> float:
            quantile = self.rng.random() ** (1 / self.samples)
            return min(median * math.exp(sigma * NORMAL.inv_cdf(min(quantile, 1 - 1e-9))), 1.0)

        return longest_of_batch

    def usual(self) -> list[tuple[Shape, ...]]:
        """Any of the ways in which batches are made and whose peaks do not rise."""
        way = self.rng.choice(("fixed", "fixed", "packed", "padded", "padded"))
        if way == "fixed":
            return self.shapes(lambda step: 1.0)
        if way == "packed":
            return self.shapes(lambda step: 1.0 if self.rng.random() < 0.97 else self.rng.uniform(0.7, 1))
        return self.shapes(self.padded(self.rng.uniform(0.4, 0.7), self.rng.uniform(0.05, 0.25)))


def sketch_job(
    rng: random.Random, *, held: float, peak: float, most_steps: int = 3000, least_steps: int = 40
) -> Sketch:
    """A job whose weights and states take a share `held` of the GPU, and whose longest step about `peak`."""
    capacity = int(rng.choice(_GPUS_GIB) * GIB)
    weights, gradients, optimizer = _PRECISIONS[rng.choice(tuple(_PRECISIONS))]
    parameters = held * capacity / (weights + gradients + optimizer)
    layers = rng.choice((12, 16, 24, 32, 40))
    hidden = max(round(math.sqrt(parameters / (12 * layers)) / 64) * 64, 256)
    job = Job(
        capacity=capacity,
        weights=int(parameters * weights),
        gradients=int(parameters * gradients),
        optimizer=int(parameters * optimizer),
        hidden=hidden,
        layers=layers,
        vocabulary=rng.choice(_VOCABULARIES),
        checkpointing=rng.random() < 0.4,
        quadratic_heads=hidden // 64 if rng.random() < 0.15 else 0,
        foreach=rng.random() < 0.15,
        expandable=rng.random() < 0.15,
        nvml=rng.choice(("all", "all", "all", "all", "all", "all", "device", "device", "none")),
        ram_gib=rng.choice((16.0, 32.0, 64.0, 256.0)),
    )
    room = (peak - held) * capacity
    longest = rng.choice(_LENGTHS)
    while longest > 64 and job.step_bytes((1, longest)) > room:
        longest //= 2
    samples = min(max(int(room / job.step_bytes((1, longest))), 1), 512)
    micro_batches = rng.choice((1, 1, 1, 2, 4))
    tokens = samples * longest * micro_batches
    return Sketch(
        job=replace(job, token_us=rng.uniform(80, 2500) * 1000 / tokens),
        samples=samples,
        longest=longest,
        micro_batches=micro_batches,
        steps=int(math.exp(rng.uniform(math.log(least_steps), math.log(most_steps / math.sqrt(micro_batches))))),
        rng=rng,
    )


def ordinary_plan(sketch: Sketch, shapes: list[tuple[Shape, ...]] | None = None) -> Plan:
    """The plan of an ordinary run: now and then an evaluation, saves, a context that grows at first."""
    rng, steps = sketch.rng, sketch.steps
    plan = Plan(shapes if shapes is not None else sketch.usual())
    plan.context = {1: int(rng.uniform(0, 0.12) * GIB), 2: int(rng.uniform(0, 0.03) * GIB)}
    if rng.random() < 0.4:
        every = max(steps // rng.choice((2, 4, 8)), 10)
        small = (max(sketch.samples // 2, 1), sketch.longest)
        plan.evaluations = dict.fromkeys(range(every, steps + 1, every), small)
    if rng.random() < 0.4:
        plan.saves = frozenset(range(max(steps // 3, 1), steps + 1, max(steps // 3, 1)))
    plan.prefetched = rng.choice((0, 1, 4)) * sketch.samples * sketch.longest * 24
    plan.rss_growth_gib = rng.choice((0.0, 0.0, 0.2, 1.5))
    return plan
