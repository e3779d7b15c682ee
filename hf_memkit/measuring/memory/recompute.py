"""Counts recomputed layers, and calls a function at each layer in forward. The setting for activation checkpointing
proves nothing; a layer that runs a second time does."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from hf_memkit.measuring.memory.hooks import HookSet
from hf_memkit.measuring.memory.phases import PhaseTracker


class RecomputeCounter:
    """Counts the forwards of checkpointable layers during backward.

    The hook is on the first child of each layer: transformers 5.23 checkpoints a layer's `forward` and 5.17 its
    `__call__`, so a hook on the layer fires in one version only; a child's fires in both. `on_layer(args, kwargs)` is
    called with that child's arguments when a layer begins in forward.

    torch calls modules with hooks in a slower way. So the hooks exist in closely watched steps, which include the
    first ones, and remain only if recomputation was seen.
    """

    def __init__(self, tracker: PhaseTracker) -> None:
        self.layers = 0
        self.on_layer: Callable[[tuple[Any, ...], Mapping[str, Any]], object] | None = None
        self.total = 0
        self._taken = 0
        self._tracker = tracker
        self._hooks: HookSet | None = None
        self._children: list[weakref.ref[nn.Module]] = []  # weak: after a caught exception, `close` is never called
        self._handles: list[RemovableHandle] = []

    def attach(self, model: nn.Module, hooks: HookSet) -> nn.Module | None:
        """Find the checkpointable layers and hook them; returns the last one. `hooks.remove()` undoes it."""
        from transformers.modeling_layers import GradientCheckpointingLayer

        layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
        # A dict keeps the order and counts once a child that two layers share.
        children = {id(child): child for layer in layers if (child := _first_child(layer)) is not None}
        self._hooks = hooks
        self._children = [weakref.ref(child) for child in children.values()]
        self.layers = len(children)
        self.follow(watched=True)
        return layers[-1] if layers else None

    def follow(self, *, watched: bool) -> None:
        """Set or remove the hooks for the next step."""
        if self._hooks is None or self._hooks.removed:
            return
        if (watched or self.total) and not self._handles:
            children = [child for reference in self._children if (child := reference()) is not None]
            self._handles = [self._hooks.before_forward(child, self._before_forward) for child in children]
        elif not (watched or self.total) and self._handles:
            self._hooks.drop(self._handles)
            self._handles = []

    def close(self) -> None:
        """Set no further hooks."""
        self._hooks = None
        self._handles = []

    def take(self) -> int:
        """Number of layers recomputed since the last `take`."""
        new = self.total - self._taken
        self._taken = self.total
        return new

    def _before_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        phase = self._tracker.phase
        if phase == "backward":
            # A forward without gradients (of a reference model, between two others) recomputes nothing.
            self.total += torch.is_grad_enabled()
        elif self.on_layer is not None and phase == "forward":
            self.on_layer(args, kwargs)


def _first_child(module: nn.Module) -> nn.Module | None:
    """The first child that is called itself; a list of modules never is."""
    for child in module.children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            inner = _first_child(child)
            if inner is not None:
                return inner
        else:
            return child
    return None
