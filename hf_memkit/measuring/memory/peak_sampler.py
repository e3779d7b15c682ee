"""Closely watched steps: the place of the peak and its categories, from a model's hooks.

Two hooks work in every step and cost two reads of the allocator: before the output embedding (or after the last layer,
if there is none that is called), and on the gradient of its input. Boundaries between layers and the walk are for
steps that the schedule selects, and for the first with more tokens than any watched before: there a job has its peak
and its out-of-memory errors.
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
    """Selects the first three steps, then every tenth; later, when records contain many steps, one in four records.
    Pauses while the last watched step has cost more than a thousandth of the time since."""

    def __init__(self) -> None:
        self._cost_s = 0.0
        self._last_s = 0.0

    def is_due(self, index: int, now_s: float) -> bool:
        """Whether to watch step `index` (from 0)."""
        if index < _FIRST:
            return True
        size = window_size(index)
        every = _EVERY if size == 1 else max(_EVERY, _WINDOWS_A_WATCH * size)
        return index % every == 0 and self._cost_s <= _SHARE * (now_s - self._last_s)

    def watched(self, cost_s: float, now_s: float) -> None:
        """Record that watching a step took `cost_s` seconds."""
        self._cost_s, self._last_s = cost_s, now_s


class PeakSampler:
    """Watches one training.

    Args:
        model: the model.
        device: device whose allocator is measured.
        sample: reads the allocator for a phase and resets its peak.
        on_backward: called at the first gradient, in case the beginning of backward was missed.
        rank: this process.
        swap_folders: folders of ZeRO-Infinity.
    """

    def __init__(
        self, model: nn.Module, device: torch.device | None, sample: Callable[[Phase], Mark],
        on_backward: Callable[[], object], *, rank: int = 0, swap_folders: tuple[Path, ...] = (),
    ) -> None:  # fmt: skip
        self.inventory = Inventory(model, device, swap_folders)
        self.timeline = Timeline(self.inventory.gradient_bytes)
        self._rank = rank
        self._sample = sample
        self._backward_runs = on_backward
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
        """Hook the output embedding and the last layer. `hooks.remove()` undoes it."""
        self._hooks = hooks
        head = output_embedding(model)
        if head is not None:
            hooks.before_forward(head, self._before_head)
        if last_layer is not None:
            hooks.after_forward(last_layer, self._after_last_layer)
        self.timeline.splits = head is not None or last_layer is not None

    def begin(self, optimizer: Any, *, phases: bool) -> None:
        """Start of training. Without `phases` the peak counter is not reset, so the peak of a step has no place."""
        self.timeline.splits &= phases
        self._holdings = self.inventory.look(optimizer, fresh=True)
        self.begin_step(0)

    def begin_step(self, index: int) -> None:
        """Start of step `index` (from 0), at the last sampled boundary."""
        self._cost_s = 0.0
        self._walked = False
        self.timeline.begin_step(watched=self._schedule.is_due(index, time.monotonic()))

    def boundary(self, phase: Phase, mark: Mark) -> None:
        """Start of another phase at `mark`."""
        part: Part | None = None
        if phase == "data" or phase == "forward" or phase == "optimizer":
            part = phase
        elif phase == "backward" and self.timeline.part != "loss":
            part = "backward"
        self.timeline.mark(mark, part)

    def forward(self, size: int) -> None:
        """Start of a training forward with `size` tokens or samples."""
        timeline = self.timeline
        if timeline.part == "loss":  # a second forward in the same phase, without a boundary
            timeline.mark(self._sample("forward"), "forward")
        if size > self._largest:
            if not timeline.watched:
                timeline.watch()
            self._largest = size
        timeline.forward_begins()

    def layer(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Start of a layer in forward."""
        timeline = self.timeline
        if timeline.part == "loss":
            timeline.resume_body()
        if not timeline.watched or self._hooks is None:
            return
        started = time.perf_counter()
        timeline.mark(self._sample("forward"))
        hidden = _hidden_states(args, kwargs)
        if hidden is not None:
            self._hooks.on_gradient(hidden, self._on_layer_gradient)
        self._cost_s += time.perf_counter() - started

    def after_optimizer_step(self, optimizer: Any) -> None:
        """Walk of a watched step, when all tensors exist."""
        if not self.timeline.watched:
            return
        started = time.perf_counter()
        self.timeline.mark(self._sample("optimizer"))
        self._states_before = self._holdings.get(("optimizer", "device"), 0)
        self._holdings = self.inventory.look(optimizer)
        self._engine_gradients = self._count_engine_gradients(self._holdings)
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
            engine_gradients = self._engine_gradients
            categories = categories_of(best, self._holdings, self._states_before, engine_gradients=engine_gradients)
            fields["categories"] = categories_gib(categories, peak_gib)
        now = time.perf_counter()
        self._schedule.watched(self._cost_s + now - started, time.monotonic())
        return fields

    def at(self, optimizer: Any, mark: Mark) -> OomRecord:
        """`categories` (adding up to the allocated bytes) and `held` at this moment, from a fresh walk."""
        states_before = self._holdings.get(("optimizer", "device"), 0)
        holdings = self.inventory.look(optimizer, fresh=True)
        fields: OomRecord = {"held": held_json(holdings | self.inventory.swapped(self._rank))}
        segment = self.timeline.at(mark)
        if segment is not None:
            engine_gradients = self._count_engine_gradients(holdings)
            categories = categories_of(segment, holdings, states_before, engine_gradients=engine_gradients)
            fields["categories"] = categories_gib(categories, round(segment.peak / GIB, 10))
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
            self._hooks.on_gradient(hidden, self._on_loss_gradient if counts else self._at_last_layer)

    def _at_last_layer(self, gradient: torch.Tensor) -> None:
        if not self._head_runs:  # else the head's input marks the end of the loss
            self._on_loss_gradient(gradient)

    def _on_loss_gradient(self, gradient: torch.Tensor) -> None:
        self._backward_runs()
        if self.timeline.end_loss() and self.timeline.part == "loss":
            self.timeline.mark(self._sample("backward"), "backward", passing=gradient.nbytes)

    def _on_layer_gradient(self, gradient: torch.Tensor) -> None:
        if self.timeline.part != "backward":
            return
        started = time.perf_counter()
        self.timeline.mark(self._sample("backward"), passing=gradient.nbytes)
        self._cost_s += time.perf_counter() - started

    def _count_engine_gradients(self, holdings: Holdings) -> int:
        """Bytes of gradients in DeepSpeed's own tensors."""
        if not self.inventory.moving:
            return 0
        return max(0, holdings.get(("gradients", "device"), 0) - self.inventory.gradient_bytes())


def _hidden_states(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor | None:
    """The tensor whose gradient shows that backward has left a module; None if backward does not reach it."""
    candidates = (*args[:1], kwargs.get("hidden_states"), *kwargs.values())
    return next((value for value in candidates if isinstance(value, torch.Tensor) and value.requires_grad), None)
