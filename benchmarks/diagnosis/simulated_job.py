"""A job on a simulated GPU: what it holds, what happens in each of its steps, and what no record tells of it."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

GROUPS: Final = 4
"""The layers are allocated in groups, so that a run is simulated in a fraction of a second."""

Shape = tuple[int, int]
"""Samples and sequence length of one forward."""


@dataclass(frozen=True)
class Job:
    """What does not change while the job runs; sizes in bytes."""

    capacity: int
    weights: int
    gradients: int
    optimizer: int
    hidden: int
    layers: int
    vocabulary: int
    checkpointing: bool = False
    quadratic_heads: int = 0
    """Attention heads whose scores are kept: eager attention. 0: a fused kernel that keeps none."""
    foreach: bool = False
    """The optimizer makes a temporary as large as the weights (torch's foreach implementation)."""
    expandable: bool = False
    empty_cache_steps: int | None = None
    token_us: float = 40.0
    nvml: str = "all"
    """`all`, `device` (a container: this process is not found in NVML's list) or `none`."""
    ram_gib: float = 64.0

    def saved(self, shape: Shape) -> tuple[int, int]:
        """What one group of layers keeps for backward: of attention and of the rest.

        34 bytes a token, hidden unit and layer in 16-bit, and 2 for each kept attention score: Korthikanti et al.,
        "Reducing Activation Recomputation in Large Transformer Models", equation 1, dropout left out.
        """
        samples, length = shape
        layers = self.layers / GROUPS
        one = samples * length * self.hidden
        scores = 2 * samples * self.quadratic_heads * length * length
        if self.checkpointing:
            return int(one * 2 * layers), 0
        return int((one * 14 + scores) * layers), int(one * 20 * layers)

    def working(self, shape: Shape) -> int:
        """What lives only while one layer computes; with checkpointing that is all that a layer keeps, too."""
        samples, length = shape
        one = samples * length * self.hidden
        scores = 2 * samples * self.quadratic_heads * length * length
        return one * 34 + scores if self.checkpointing else one * 8 + scores

    def step_bytes(self, shape: Shape) -> int:
        """About what a step needs beyond weights, gradients and states: to plan batches with."""
        tokens = shape[0] * shape[1]
        return GROUPS * sum(self.saved(shape)) + max(self.working(shape), tokens * self.vocabulary * 10)


@dataclass
class Plan:
    """What happens in which step (from 1)."""

    shapes: Sequence[tuple[Shape, ...]]
    """By step, the micro-batches."""
    keeps: Mapping[int, int] = field(default_factory=dict)
    """Bytes that this step allocates and never frees."""
    leaks: bool = False
    """Whether what `keeps` says is a leak."""
    others: Sequence[int] | None = None
    """Bytes that other processes hold on the GPU, by step."""
    context: Mapping[int, int] = field(default_factory=dict)
    """Growth of this process outside the allocator: kernels loaded late, NCCL."""
    evaluations: Mapping[int, Shape] = field(default_factory=dict)
    """After this step, an evaluation with batches of that shape."""
    saves: frozenset[int] = frozenset()
    resume: tuple[int, int] | None = None
    """Killed after the first step, and begun again from a checkpoint of the second."""
    rss_growth_gib: float = 0.0
    """How much the host's RSS grows over the first epoch (mapped data), levelling off."""
    prefetched: int = 0
    """Bytes of the next batch that live at a step's end, at most."""


@dataclass
class Hidden:
    """What no record tells, by step; sizes in bytes."""

    leaked: list[int] = field(default_factory=list)
    others: list[int] = field(default_factory=list)
    peak: list[int] = field(default_factory=list)
    reserved: list[int] = field(default_factory=list)
    outside: list[int] = field(default_factory=list)
    highest: list[int] = field(default_factory=list)
    """The highest allocated so far in this process, evaluations and loading included."""
    measured: list[bool] = field(default_factory=list)
    """Whether NVML was read in this step."""


@dataclass(frozen=True)
class Draft:
    """A run before it is simulated. `meant`: the kinds of the states that it is drawn for; `may`: those that may come
    with them."""

    job: Job
    plan: Plan
    meant: frozenset[str] = frozenset()
    may: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Scenario:
    """`cards`: how often it is in the deck."""

    cards: int
    draw: Callable[[random.Random], Draft]
