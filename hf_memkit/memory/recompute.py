"""How many checkpointed layers were really computed again. In: a model, and whether it is backward now. Out: a count.

A setting that says "activation checkpointing" proves nothing; a layer that runs a second time does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from hf_memkit.memory.hooks import HookSet

__all__ = ["RecomputeCounter"]


class RecomputeCounter:
    """Counts the forwards of checkpointable layers that happen during backward.

    The hook sits on the first child of each layer, not on the layer: transformers 5.23 checkpoints a layer's `forward`
    and 5.17 its `__call__`, so that a hook on the layer fires in one version only. A child's fires in both.
    """

    def __init__(self, is_backward: Callable[[], bool]) -> None:
        self.layers = 0
        self.total = 0
        self._taken = 0
        self._is_backward = is_backward

    def attach(self, model: nn.Module, hooks: HookSet) -> int:
        """Hooks every checkpointable layer and returns how many there are. `hooks.remove()` undoes it."""
        from transformers.modeling_layers import GradientCheckpointingLayer

        # A dict keeps the order and counts once a child that two layers share.
        children = {
            id(child): child
            for module in model.modules()
            if isinstance(module, GradientCheckpointingLayer) and (child := _first_child(module)) is not None
        }
        for child in children.values():
            hooks.before_forward(child, self._before_forward)
        self.layers = len(children)
        return self.layers

    def take(self) -> int:
        """The layers recomputed since the last `take`."""
        new, self._taken = self.total - self._taken, self.total
        return new

    def _before_forward(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self._is_backward():
            self.total += 1


def _first_child(module: nn.Module) -> nn.Module | None:
    """The first child with a forward of its own; a list of modules is never called."""
    for child in module.children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            inner = _first_child(child)
            if inner is not None:
                return inner
        else:
            return child
    return None
