"""Closely watched steps: where the peak lies, and what it is made of. In: a model's hooks. Out: categories and `held`.

The hook before the output embedding, or after the last layer where there is none that is called, and the hook on the
gradient of what enters it, work in every step: they cost two looks at the allocator. The boundaries between layers and
the walk are for the steps that the schedule picks, and for the first with more tokens than any watched before, because
that is where a job's peak and its out-of-memory errors are.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hf_memkit.common.terms import Phase
from hf_memkit.common.units import GIB
from hf_memkit.measuring.memory.holdings import Holdings, Inventory, held_json
from hf_memkit.measuring.memory.hooks import HookSet, output_embedding
from hf_memkit.measuring.memory.readers.base import Mark
from hf_memkit.measuring.memory.timeline import Part, Timeline, categories_gib, categories_of
from hf_memkit.measuring.memory.windows import window_size
from hf_memkit.measuring.record_types import OomRecord, StepRecord

_FIRST = 3
_EVERY = 10
_SHARE = 0.001
_WINDOWS_A_WATCH = 4


class WatchSchedule:
    """The first three steps, then every tenth; later, where records stand for many steps, one in four records. Not
    while the last one watched has cost more than a thousandth of the time that went by since."""

    def __init__(self) -> None:
        self._cost_s = 0.0
        self._last_s = 0.0

    def is_due(self, index: int, now_s: float) -> bool:
        """Whether step `index` (from 0) is to be watched."""
        if index < _FIRST:
            return True
        size = window_size(index)
        every = _EVERY if size == 1 else max(_EVERY, _WINDOWS_A_WATCH * size)
        return index % every == 0 and self._cost_s <= _SHARE * (now_s - self._last_s)

    def watched(self, cost_s: float, now_s: float) -> None:
        """A step was watched, and that took `cost_s` seconds of it."""
        self._cost_s, self._last_s = cost_s, now_s


class PeakSampler:
    """Watches one training. `sample(phase)` looks at the allocator and lets its peak start again; `backward_runs()`
    says that a gradient has arrived, in case nobody has noticed where backward began."""

    def __init__(
        self,
        model: nn.Module,
        device: torch.device | None,
        sample: Callable[[Phase], Mark],
        backward_runs: Callable[[], object],
        *,
        rank: int = 0,
        swap_folders: tuple[Path, ...] = (),
    ) -> None:
        self.inventory = Inventory(model, device, swap_folders)
        self.timeline = Timeline(self.inventory.gradient_bytes)
        self._rank = rank
        self._sample = sample
        self._backward_runs = backward_runs
        self._schedule = WatchSchedule()
        self._hooks: HookSet | None = None
        self._head_runs = False
        self._largest = 0
        self._cost_s = 0.0
        self._holdings: Holdings = {}
        self._states_before: int | None = None
        self._engine_gradients = 0
        self._walked = False

    def attach(self, model: nn.Module, last_layer: nn.Module | None, hooks: HookSet) -> None:
        """Hooks the output embedding and the last layer. `hooks.remove()` undoes it."""
        self._hooks = hooks
        head = output_embedding(model)
        if head is not None:
            hooks.before_forward(head, self._before_head)
        if last_layer is not None:
            hooks.after_forward(last_layer, self._after_last_layer)
        self.timeline.splits = head is not None or last_layer is not None

    def begin(self, optimizer: Any, *, phases: bool) -> None:
        """Training begins. Without `phases` the peak counter is not ours, and a step's peak cannot be placed."""
        self.timeline.splits &= phases
        self._holdings = self.inventory.look(optimizer, fresh=True)
        self.begin_step(0)

    def begin_step(self, index: int) -> None:
        """Step `index` (from 0) begins, at the boundary that was sampled last."""
        self._cost_s = 0.0
        self._walked = False
        self.timeline.begin_step(watched=self._schedule.is_due(index, time.monotonic()))

    def boundary(self, phase: Phase, mark: Mark) -> None:
        """Another phase begins at `mark`."""
        part: Part | None = None
        if phase == "data" or phase == "forward" or phase == "optimizer":
            part = phase
        elif phase == "backward" and self.timeline.part != "loss":
            part = "backward"
        self.timeline.mark(mark, part)

    def forward(self, size: int) -> None:
        """A training forward begins, with `size` tokens or samples."""
        timeline = self.timeline
        if timeline.part == "loss":  # a second one in the same phase: nobody has sampled a boundary
            timeline.mark(self._sample("forward"), "forward")
        if size > self._largest:
            if not timeline.watched:
                timeline.watch()
            self._largest = size
        timeline.forward_begins()

    def layer(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """A layer begins, in forward."""
        timeline = self.timeline
        if timeline.part == "loss":
            timeline.body_goes_on()
        if not timeline.watched or self._hooks is None:
            return
        started = time.perf_counter()
        timeline.mark(self._sample("forward"))
        hidden = _hidden_states(args, kwargs)
        if hidden is not None:
            self._hooks.on_gradient(hidden, self._left_by_backward)
        self._cost_s += time.perf_counter() - started

    def after_optimizer_step(self, optimizer: Any) -> None:
        """Everything lives: the walk of a watched step."""
        if not self.timeline.watched:
            return
        started = time.perf_counter()
        self.timeline.mark(self._sample("optimizer"))
        self._states_before = self._holdings.get(("optimizer", "device"), 0)
        self._holdings = self.inventory.look(optimizer)
        self._engine_gradients = self._beside_parameters(self._holdings)
        self._walked = True
        self._cost_s += time.perf_counter() - started

    def fields(self, peak_gib: float | None) -> StepRecord:
        """`categories` and `held` of the step that ends, if it was watched."""
        if not self._walked:
            return {}
        started = time.perf_counter()
        fields: StepRecord = {"held": held_json(self._holdings | self.inventory.swapped(self._rank))}
        best = self.timeline.best
        if peak_gib is not None and best is not None and best.peak == round(peak_gib * GIB):
            found = categories_of(
                best, self._holdings, states_before=self._states_before, engine_gradients=self._engine_gradients
            )
            fields["categories"] = categories_gib(found, peak_gib)
        now = time.perf_counter()
        self._schedule.watched(self._cost_s + now - started, time.monotonic())
        return fields

    def at(self, optimizer: Any, mark: Mark) -> OomRecord:
        """`categories` (adding up to what is allocated) and `held` at this moment, from a fresh walk."""
        before = self._holdings.get(("optimizer", "device"), 0)
        holdings = self.inventory.look(optimizer, fresh=True)
        fields: OomRecord = {"held": held_json(holdings | self.inventory.swapped(self._rank))}
        segment = self.timeline.at(mark)
        if segment is not None:
            beside = self._beside_parameters(holdings)
            found = categories_of(segment, holdings, states_before=before, engine_gradients=beside)
            fields["categories"] = categories_gib(found, round(segment.peak / GIB, 10))
        return fields

    def _before_head(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if self._in_body():
            self._head_runs = True
            self._body_ends(_hidden_states(args, kwargs), counts=True)

    def _after_last_layer(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if self._in_body() and not self._head_runs:
            hidden = output[0] if isinstance(output, tuple) and output else output
            self._body_ends(hidden if isinstance(hidden, torch.Tensor) else None, counts=False)

    def _in_body(self) -> bool:
        return self.timeline.part in ("forward", "loss")

    def _body_ends(self, hidden: torch.Tensor | None, *, counts: bool) -> None:
        self.timeline.mark(self._sample("forward"))
        self.timeline.body_ends()
        if hidden is not None and hidden.requires_grad and self._hooks is not None:
            self._hooks.on_gradient(hidden, self._loss_is_over if counts else self._at_last_layer)

    def _at_last_layer(self, gradient: torch.Tensor) -> None:
        if not self._head_runs:  # else it has been told where the head's input was
            self._loss_is_over(gradient)

    def _loss_is_over(self, gradient: torch.Tensor) -> None:
        self._backward_runs()
        if self.timeline.loss_is_over() and self.timeline.part == "loss":
            self.timeline.mark(self._sample("backward"), "backward", passing=gradient.nbytes)

    def _left_by_backward(self, gradient: torch.Tensor) -> None:
        if self.timeline.part != "backward":
            return
        started = time.perf_counter()
        self.timeline.mark(self._sample("backward"), passing=gradient.nbytes)
        self._cost_s += time.perf_counter() - started

    def _beside_parameters(self, holdings: Holdings) -> int:
        """Gradients that DeepSpeed keeps in tensors of its own."""
        if not self.inventory.moving:
            return 0
        return max(0, holdings.get(("gradients", "device"), 0) - self.inventory.gradient_bytes())


def _hidden_states(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor | None:
    """The tensor whose gradient shows that backward has left a module; None if backward does not come here."""
    candidates = (*args[:1], kwargs.get("hidden_states"), *kwargs.values())
    return next((value for value in candidates if isinstance(value, torch.Tensor) and value.requires_grad), None)
