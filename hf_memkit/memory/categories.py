"""From the peak of a step to its categories. In: the segment that holds the peak, and what a walk found. Out: bytes.

What is certain gets its name, the rest is `other`:

* weights, optimizer states, buffers: what the walk found on the device. Optimizer states that are made in this step
  count from the optimizer's phase on.
* gradients: those that lived when the segment began. What is added to them within it is not told apart.
* activations: in forward, what it has allocated since it began; later, what forward's body left behind, and in
  backward of that what still lived when backward came to the layer that holds the peak. That layer's own are freed
  one by one while its gradients are made: up to its own activations this is an upper bound.
* loss: only between the output embedding and its gradient, what is there on top of all that.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from hf_memkit.memory.holdings import Holdings
from hf_memkit.memory.timeline import Segment
from hf_memkit.record_types import CategorySizes
from hf_memkit.terms import CATEGORIES, Category
from hf_memkit.units import GIB

__all__ = ["categories_gib", "categories_of"]


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
    elif segment.part in ("forward", "backward"):
        found["loss"] = segment.losses if segment.part == "forward" else 0
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
