"""The allocator's timeline within one step, and the categories of its peak.

A step is a row of segments; a mark of the allocator ends each. Boundaries of phases end segments in every step; in a
closely watched step these do too:

* the output embedding is about to run (or, without one, the last layer has run): bytes allocated by forward until here
  are activations, later ones the loss;
* the gradient of the embedding's input has been computed: the loss's part of backward is over;
* a layer begins in forward, or is finished in backward.

Certain parts of the peak are named, the rest is `other`:

* weights, optimizer states, buffers: from the walk over the device. Optimizer states created in this step count from
  the optimizer's phase on.
* gradients: those alive when the segment began. Gradients added within it are not separated.
* activations: in forward, bytes allocated since it began; later, the bytes that forward's body left behind, and in
  backward the part of them still alive at the layer with the peak. That layer's activations are freed one by one while
  its gradients are computed: an upper bound, up to its own activations.
* loss: only between the output embedding and its gradient, the bytes in addition to the above.
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
"""Part of a step that a segment belongs to. `loss`: from the output embedding on, in forward and in backward."""


class Moment(NamedTuple):
    """The allocator at one boundary, in bytes."""

    allocated: int
    gradients: int | None
    """Gradients of parameters on the device; None if the step is not closely watched."""
    passing: int = 0
    """The gradient that passes through this boundary."""


class Segment(NamedTuple):
    """The time between two boundaries; `base` is None before the first forward of the step."""

    part: Part
    peak: int
    start: Moment
    base: Moment | None
    activations: int
    """Bytes allocated by the bodies of finished forwards."""
    losses: int
    """Further bytes left by earlier forwards of this micro-batch."""
    body_start: int | None
    """Allocated bytes at the start of the current forward, in its body."""


class Timeline:
    """Timeline of one training. `gradient_bytes` counts the gradients on the device, in watched steps only."""

    _body_start: int | None
    _tail_start: int | None

    def __init__(self, gradient_bytes: Callable[[], int]) -> None:
        self.splits = False
        """Whether forward's body and the loss are separated: `body_ends` will be called."""
        self._gradient_bytes = gradient_bytes
        self._last: Moment | None = None
        self.begin_step(watched=False)

    def begin_step(self, *, watched: bool) -> None:
        """Start a step at the end of the previous one."""
        self.watched = watched
        self.best: Segment | None = None
        self.part: Part = "data"
        self.micro_batch = 0
        self._new_micro_batch = True
        self.base: Moment | None = None
        self._reset_micro_batch()
        if self._last is not None:
            self._last = Moment(self._last.allocated, self._gradients())

    def watch(self) -> None:
        """Watch closely from the last mark on."""
        self.watched = True
        if self._last is not None:
            self._last = self._last._replace(gradients=self._gradients())

    def end_micro_batch(self) -> None:
        self._new_micro_batch = True

    def mark(self, mark: Mark, part: Part | None = None, *, passing: int = 0) -> None:
        """End the segment at a boundary; the next one belongs to `part` (default: the same)."""
        if mark.allocated is None:
            self.part = part or self.part
            return
        moment = Moment(mark.allocated, self._gradients(), passing)
        if self.watched and self._last is not None and mark.peak_allocated is not None:
            peak = max(mark.peak_allocated, self._last.allocated, moment.allocated)
            if self.best is None or peak > self.best.peak:
                self.best = self._segment(peak, self._last)
        self._last = moment
        self.part = part or self.part

    def forward_begins(self) -> None:
        """Start of a forward at the last mark, after the boundary between data and forward."""
        new = self._new_micro_batch
        if new:
            self._new_micro_batch = False
            self.micro_batch += 1
        if self._last is None:
            return
        if new:
            self._reset_micro_batch()
            self.base = self._last
        elif self._tail_start is not None:  # another forward of this micro-batch: memory of the previous one remains
            self._losses += max(0, self._last.allocated - self._tail_start)
            self._tail_start = None
        if self.splits and self._body_start is None:
            self._body_start = self._last.allocated
        self._forwards += 1

    def body_ends(self) -> None:
        """End of forward's body at the last mark, before the output embedding. The last call counts."""
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

    def resume_body(self) -> None:
        """Continue forward's body: another layer begins after `body_ends`."""
        if self.part == "loss" and self._body_start is None:
            self._body_start, self._tail_start = self._tail_start, None
            self.part = "forward"

    def end_loss(self) -> bool:
        """The gradient has reached the hidden states of one forward. Returns whether it was the last forward."""
        self._forwards_left_by_backward += 1
        return self._forwards_left_by_backward >= self._forwards

    def at(self, mark: Mark) -> Segment | None:
        """This moment as a segment without length, for an error in the middle of a step."""
        if mark.allocated is None:
            return None
        moment = Moment(mark.allocated, self._gradient_bytes())
        start = self._last if self._last is not None and self.watched else moment
        segment = self._segment(mark.allocated, start)
        if segment.base is not None and segment.base.gradients is None:
            # Trainer drops the gradients after each step, and later micro-batches add to them in place.
            earlier = 0 if self.micro_batch == 1 else moment.gradients
            segment = segment._replace(base=segment.base._replace(gradients=earlier))
        return segment

    def _segment(self, peak: int, start: Moment) -> Segment:
        return Segment(self.part, peak, start, self.base, max(0, self._activations), self._losses, self._body_start)

    def _gradients(self) -> int | None:
        return self._gradient_bytes() if self.watched else None

    def _reset_micro_batch(self) -> None:
        """Start a micro-batch in which nothing has run."""
        self._activations = self._losses = 0
        self._body_start = self._tail_start = None
        self._forwards = self._forwards_left_by_backward = 0


def categories_of(
    segment: Segment, holdings: Holdings, states_before: int | None = None, *, engine_gradients: int = 0
) -> dict[Category, int]:
    """Bytes by category at the segment's peak: none is negative, and they add up to `segment.peak`.

    Args:
        segment: the segment with the peak.
        holdings: walk in the optimizer's phase, when all tensors exist.
        states_before: the optimizer's bytes before that phase, if different.
        engine_gradients: bytes of gradients in DeepSpeed's own tensors.
    """
    states = holdings.get(("optimizer", "device"), 0)
    if segment.part != "optimizer" and states_before is not None:
        states = min(states, states_before)
    sizes: dict[Category, int] = {
        "weights": holdings.get(("weights", "device"), 0),
        "optimizer": states,
        "buffers": holdings.get(("buffers", "device"), 0),
        "gradients": (segment.start.gradients or 0) + engine_gradients,
    }
    activations = sizes["activations"] = _activations(segment)
    if segment.part == "loss" and segment.base is not None:
        grown = segment.peak - segment.base.allocated - _new_gradients(segment)
        sizes["loss"] = grown - activations
    elif segment.part == "forward":
        sizes["loss"] = segment.losses
    left = segment.peak
    result: dict[Category, int] = dict.fromkeys(CATEGORIES, 0)
    for category, size in sizes.items():
        result[category] = max(0, min(size, left))
        left -= result[category]
    result["other"] = left
    return result


def categories_gib(categories: Mapping[Category, int], peak_gib: float) -> CategorySizes:
    """`{category_gib}` as in a record, rounded so that they add up to `peak_gib`."""
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
    """Gradients created by this micro-batch so far; later micro-batches add to them in place."""
    if segment.base is None or segment.base.gradients is None or segment.start.gradients is None:
        return 0
    return max(0, segment.start.gradients - segment.base.gradients)
