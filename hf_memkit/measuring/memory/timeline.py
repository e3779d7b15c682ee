"""What the allocator did within one step, and what its peak is made of. In: marks at its boundaries, and what a walk
found. Out: the segment with the peak, and bytes by category.

A step is a row of segments; a mark of the allocator ends each. Boundaries of phases end segments in every step, and in
a step that is watched closely these do too:

* the output embedding is about to run (or, without one, the last layer has run): what forward has allocated until
  here are activations; what follows is the loss;
* the gradient of the hidden states that entered it has been computed: the loss's part of backward is over;
* a layer begins in forward, or has been left by backward.

Of the peak, what is certain gets its name, the rest is `other`:

* weights, optimizer states, buffers: what the walk found on the device. Optimizer states that are made in this step
  count from the optimizer's phase on.
* gradients: those that lived when the segment began. What is added to them within it is not told apart.
* activations: in forward, what it has allocated since it began; later, what forward's body left behind, and in
  backward of that what still lived when backward came to the layer that holds the peak. That layer's own are freed
  one by one while its gradients are made: up to its own activations this is an upper bound.
* loss: only between the output embedding and its gradient, what is there on top of all that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple, cast

from hf_memkit.common.terms import CATEGORIES, Category
from hf_memkit.common.units import GIB
from hf_memkit.measuring.memory.holdings import Holdings
from hf_memkit.measuring.memory.readers.base import Mark
from hf_memkit.measuring.record_types import CategorySizes

Part = Literal["data", "forward", "loss", "backward", "optimizer"]
"""What a segment belongs to. `loss`: from the output embedding on, in forward and in backward."""


class Moment(NamedTuple):
    """The allocator at one boundary, in bytes."""

    allocated: int
    gradients: int | None
    """Gradients of parameters on the device; None where the step is not watched closely."""
    passing: int = 0
    """The gradient that passes through this boundary itself."""


class Segment(NamedTuple):
    """What happened between two boundaries; `base` is None before the first forward of the step."""

    part: Part
    peak: int
    start: Moment
    base: Moment | None
    activations: int
    """Allocated by the bodies of the forwards that are over."""
    losses: int
    """What earlier forwards of this micro-batch left behind on top of that."""
    body_start: int | None
    """Where the running forward began, in its body."""


class Timeline:
    """Follows one training. `gradient_bytes` counts the gradients on the device; it is asked in watched steps only."""

    _body_start: int | None
    _tail_start: int | None
    _forwards: int

    def __init__(self, gradient_bytes: Callable[[], int]) -> None:
        self.splits = False
        """Whether forward's body and the loss can be told apart: somebody will call `body_ends`."""
        self._gradient_bytes = gradient_bytes
        self._last: Moment | None = None
        self.begin_step(watched=False)

    def begin_step(self, *, watched: bool) -> None:
        """A step begins where the one before has ended."""
        self.watched = watched
        self.best: Segment | None = None
        self.part: Part = "data"
        self.micro_batch = 0
        self._new_micro_batch = True
        self.base: Moment | None = None
        self._forget()
        if self._last is not None:
            self._last = Moment(self._last.allocated, self._gradients())

    def watch(self) -> None:
        """Watches closely from the last mark on."""
        self.watched = True
        if self._last is not None:
            self._last = self._last._replace(gradients=self._gradients())

    def end_micro_batch(self) -> None:
        self._new_micro_batch = True

    def mark(self, mark: Mark, part: Part | None = None, *, passing: int = 0) -> None:
        """A boundary: the segment ends here, and the next one belongs to `part` (default: the same)."""
        if mark.allocated is None:
            self.part = part or self.part
            return
        now = Moment(mark.allocated, self._gradients(), passing)
        if self.watched and self._last is not None and mark.peak_allocated is not None:
            peak = max(mark.peak_allocated, self._last.allocated, now.allocated)
            if self.best is None or peak > self.best.peak:
                self.best = self._segment(peak, self._last)
        self._last = now
        self.part = part or self.part

    def forward_begins(self) -> None:
        """After the boundary between data and forward, at the last mark."""
        new = self._new_micro_batch
        if new:
            self._new_micro_batch = False
            self.micro_batch += 1
        if self._last is None:
            return
        if new:
            self._forget()
            self.base = self._last
        elif self._tail_start is not None:  # another forward of this micro-batch: what the one before left is there
            self._losses += max(0, self._last.allocated - self._tail_start)
            self._tail_start = None
        if self.splits and self._body_start is None:
            self._body_start = self._last.allocated
        self._forwards += 1

    def body_ends(self) -> None:
        """At the last mark: the output embedding is about to run. Said twice, the later one counts."""
        if self._last is None:
            return
        if self._body_start is None:
            if self._tail_start is None:
                return
            self._activations += self._last.allocated - self._tail_start
        else:
            self._activations += max(0, self._last.allocated - self._body_start)
        self._body_start, self._tail_start = None, self._last.allocated
        self.part = "loss"

    def body_goes_on(self) -> None:
        """It had not ended after all: another layer begins."""
        if self.part == "loss" and self._body_start is None:
            self._body_start, self._tail_start = self._tail_start, None
            self.part = "forward"

    def loss_is_over(self) -> bool:
        """The gradient has reached the hidden states of one forward; True if it was the last one's."""
        self._forwards_left_by_backward += 1
        return self._forwards_left_by_backward >= self._forwards

    def at(self, mark: Mark) -> Segment | None:
        """This moment, as a segment without length: for what fails in the middle of a step."""
        if mark.allocated is None:
            return None
        now = Moment(mark.allocated, self._gradient_bytes())
        start = self._last if self._last is not None and self.watched else now
        segment = self._segment(mark.allocated, start)
        if segment.base is not None and segment.base.gradients is None:
            # Trainer drops the gradients after each step, and later micro-batches add to them in place.
            before = 0 if self.micro_batch == 1 else now.gradients
            segment = segment._replace(base=segment.base._replace(gradients=before))
        return segment

    def _segment(self, peak: int, start: Moment) -> Segment:
        return Segment(self.part, peak, start, self.base, max(0, self._activations), self._losses, self._body_start)

    def _gradients(self) -> int | None:
        return self._gradient_bytes() if self.watched else None

    def _forget(self) -> None:
        """Nothing of this micro-batch has run."""
        self._activations = 0
        self._losses = 0
        self._body_start = None
        self._tail_start = None
        self._forwards = 0
        self._forwards_left_by_backward = 0


def categories_of(
    segment: Segment, holdings: Holdings, *, states_before: int | None = None, engine_gradients: int = 0
) -> dict[Category, int]:
    """Bytes by category at the segment's peak: none is negative, and they add up to `segment.peak`.

    `holdings` is from the optimizer's phase, when everything lives; `states_before` are the optimizer's bytes before
    that phase, where they are known to differ; `engine_gradients` those that DeepSpeed keeps beside the parameters'.
    """
    states = holdings.get(("optimizer", "device"), 0)
    if segment.part != "optimizer" and states_before is not None:
        states = min(states, states_before)
    found: dict[Category, int] = {
        "weights": holdings.get(("weights", "device"), 0),
        "optimizer": states,
        "buffers": holdings.get(("buffers", "device"), 0),
        "gradients": (segment.start.gradients or 0) + engine_gradients,
    }
    activations = found["activations"] = _activations(segment)
    if segment.part == "loss" and segment.base is not None:
        grown = segment.peak - segment.base.allocated - _new_gradients(segment)
        found["loss"] = grown - activations
    elif segment.part == "forward":
        found["loss"] = segment.losses
    left = segment.peak
    result: dict[Category, int] = dict.fromkeys(CATEGORIES, 0)
    for category, size in found.items():
        result[category] = max(0, min(size, left))
        left -= result[category]
    result["other"] = left
    return result


def categories_gib(categories: Mapping[Category, int], peak_gib: float) -> CategorySizes:
    """`{category_gib}` as a record has it, rounded so that it adds up to `peak_gib`."""
    rounded = {f"{name}_gib": round(size / GIB, 10) for name, size in categories.items() if name != "other"}
    rounded["other_gib"] = round(max(0.0, peak_gib - sum(rounded.values())), 10)
    return cast(CategorySizes, rounded)


def _activations(segment: Segment) -> int:
    if segment.base is None or segment.part in ("data", "optimizer"):
        return 0
    if segment.part == "forward":
        running = 0 if segment.body_start is None else max(0, segment.peak - segment.body_start)
        return segment.activations + running
    if segment.part == "loss":
        return segment.activations
    grown = segment.start.allocated - segment.base.allocated - segment.start.passing - _new_gradients(segment)
    return max(0, min(segment.activations, grown))


def _new_gradients(segment: Segment) -> int:
    """Gradients that this micro-batch has made so far; later ones are added to in place."""
    if segment.base is None or segment.base.gradients is None or segment.start.gradients is None:
        return 0
    return max(0, segment.start.gradients - segment.base.gradients)
