"""Activation checkpointing over segments of several consecutive layers (Chen et al. 2016, arXiv 1604.06174).

Transformers checkpoints layer by layer: it keeps every layer's input and recomputes one layer at a time. A segment
keeps one input for several layers and recomputes all of them together. Peak of backward, for L
layers in segments of k: ceil(L / k) inputs + k layers.

A model's forward loops over its layers and passes different keyword arguments to each, so no module contains a whole
segment. Hooks open torch's checkpoint before the first layer of a segment and close it after the last, as
torch:torch/distributed/_composable/checkpoint_activation.py does; recomputing calls the same layers with the same
arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    _checkpoint_without_reentrant_generator,  # torch has no public function that opens and closes separately
    noop_context_fn,
)
from transformers.cache_utils import Cache
from transformers.modeling_layers import GradientCheckpointingLayer


def install(model: nn.Module, *, segment_layers: int) -> Callable[[], None]:
    """Checkpoints every `segment_layers` consecutive layers of `model` together; returns a function that undoes it.

    Raises:
        ValueError: the model has no list of layers that transformers can checkpoint.
    """
    if segment_layers < 1:
        raise ValueError(f"segment_layers={segment_layers}: must be at least 1")
    stacks = [_Stack(owner, list(layers), segment_layers) for owner, layers in _stacks_of(model)]
    if not stacks:
        raise ValueError(
            f"{type(model).__name__} has no nn.ModuleList of GradientCheckpointingLayer. Omit segment-checkpointing"
        )

    # With this flag on the modules around the layers, a model makes no cache in training. It stays off on the layers,
    # where it would checkpoint each layer once more.
    around: list[Any] = [
        module
        for module in model.modules()
        if hasattr(module, "gradient_checkpointing") and not isinstance(module, GradientCheckpointingLayer)
    ]
    flags = [module.gradient_checkpointing for module in around]
    for module in around:
        module.gradient_checkpointing = True
    for stack in stacks:
        stack.owner.__dict__[_REPLICATE] = _no_replicas

    def undo() -> None:
        for stack in stacks:
            stack.remove()
            stack.owner.__dict__.pop(_REPLICATE, None)
        for module, flag in zip(around, flags, strict=True):
            module.gradient_checkpointing = flag

    return undo


_REPLICATE = "_replicate_for_data_parallel"


def _no_replicas() -> Any:
    """Replaces the method that nn.DataParallel copies a module with (torch:torch/nn/parallel/replicate.py). The copies
    share their hooks and run at the same time: one would close a segment that another opened."""
    raise RuntimeError(
        "segment-checkpointing does not work under nn.DataParallel, which Trainer uses if one process sees several "
        "GPUs. Start one process per GPU (torchrun --nproc-per-node N), or set CUDA_VISIBLE_DEVICES to one GPU"
    )


def _stacks_of(model: nn.Module) -> list[tuple[nn.Module, nn.ModuleList]]:
    """(owner module, list of layers) for each list that is not inside a layer."""
    inner = {
        id(part)
        for layer in model.modules()
        if isinstance(layer, GradientCheckpointingLayer)
        for part in layer.modules()
    }
    return [
        (owner, child)
        for owner in model.modules()
        for child in owner.children()
        if isinstance(child, nn.ModuleList)
        and id(child) not in inner
        and len(child) > 0
        and all(isinstance(layer, GradientCheckpointingLayer) for layer in child)
    ]


class _Stack:
    """One list of layers, cut into segments, and the segment that is open in the forward pass."""

    def __init__(self, owner: nn.Module, layers: list[nn.Module], length: int) -> None:
        self.owner = owner
        self._open: Generator[None, None, None] | None = None
        self._calls: list[_Call] = []
        self._previous: Tensor | None = None
        self._recomputing = False
        self._count, self._length = len(layers), length
        self._handles: list[Any] = [owner.register_forward_hook(self._after_all, always_call=True)]
        for index, layer in enumerate(layers):
            self._handles += [
                layer.register_forward_pre_hook(self._before(index), with_kwargs=True),
                layer.register_forward_hook(self._after(index), always_call=True),
            ]

    def remove(self) -> None:
        self._abandon()
        while self._handles:
            self._handles.pop().remove()

    def _before(self, index: int) -> Callable[..., Any]:
        def hook(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if self._recomputing or not layer.training or not torch.is_grad_enabled():
                return None
            # A layer that runs again would add its keys to a cache a second time.
            args = tuple(None if isinstance(value, Cache) else value for value in args)
            kwargs = {name: None if isinstance(value, Cache) else value for name, value in kwargs.items()}
            if kwargs.get("use_cache"):
                kwargs["use_cache"] = False
            call = _Call(layer, args, kwargs)
            if index % self._length == 0:
                self._abandon()
                self._begin(call.hidden)
            elif self._open is None or not _same(call.hidden, self._previous):
                self._abandon()
                raise RuntimeError(
                    f"segment_layers={self._length}: {type(layer).__name__} {index} does not receive the unchanged "
                    "output of the layer before it, so the two cannot share a segment. Write segment_layers=1"
                )
            self._calls.append(call.without_hidden())
            return args, kwargs

        return hook

    def _after(self, index: int) -> Callable[..., None]:
        last = index % self._length == self._length - 1 or index == self._count - 1

        def hook(layer: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            if self._recomputing or self._open is None:
                return
            if output is None:  # the layer raised
                self._abandon()
            elif last:
                self._end()
            else:
                self._previous = _hidden_of(output)

        return hook

    def _after_all(self, *_: Any) -> None:
        # Still open only if the model's own code raised between two layers, or left the loop early.
        if not self._recomputing:
            self._abandon()

    def _begin(self, hidden: Tensor) -> None:
        calls: list[_Call] = []

        def recompute(hidden: Tensor) -> None:
            self._recomputing = True
            try:
                for call in calls:
                    hidden = _hidden_of(call(hidden))
            finally:  # torch ends the recomputation by an exception once it has all that it needs
                self._recomputing = False

        # fn, preserve_rng_state, context_fn, determinism_check, debug, early_stop, *inputs
        opened = _checkpoint_without_reentrant_generator(
            recompute, True, noop_context_fn, "default", False, True, hidden
        )
        next(opened)
        self._open, self._calls = opened, calls

    def _end(self) -> None:
        opened, self._open, self._previous = self._open, None, None
        self._calls = []
        assert opened is not None
        if next(opened, "ended") != "ended":
            raise RuntimeError("torch's checkpoint did not end with the segment. Omit segment-checkpointing")

    def _abandon(self) -> None:
        """Closes the segment of a forward pass that did not finish, because torch's hooks would stay installed."""
        opened, self._open, self._previous = self._open, None, None
        self._calls = []
        if opened is not None:
            opened.close()


class _Call:
    """A layer's call, with the hidden states separate from the other arguments."""

    def __init__(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._layer, self._args, self._kwargs = layer, args, kwargs
        hidden = args[0] if args else kwargs.get("hidden_states")
        if not isinstance(hidden, Tensor):
            raise RuntimeError(
                f"{type(layer).__name__} was called without a hidden_states tensor, which a segment needs. Omit "
                "segment-checkpointing"
            )
        self.hidden: Tensor = hidden

    def without_hidden(self) -> _Call:
        """The same call without its hidden states, which must be freed inside a segment."""
        if self._args:
            self._args = (None, *self._args[1:])
        else:
            self._kwargs = {**self._kwargs, "hidden_states": None}
        del self.hidden
        return self

    def __call__(self, hidden: Tensor) -> Any:
        if self._args:
            return self._layer(hidden, *self._args[1:], **self._kwargs)
        return self._layer(**{**self._kwargs, "hidden_states": hidden})


def _hidden_of(output: Any) -> Tensor:
    hidden = output[0] if isinstance(output, tuple | list) else output
    if not isinstance(hidden, Tensor):
        raise RuntimeError(
            f"a layer returned {type(hidden).__name__} as its hidden states; a segment needs a tensor. Omit "
            "segment-checkpointing"
        )
    return hidden


def _same(one: Tensor, other: Tensor | None) -> bool:
    """Whether both tensors have the same unchanged storage; DeepSpeed passes on an alias of a layer's output."""
    return (
        other is not None
        and one.shape == other.shape
        and one.data_ptr() == other.data_ptr()
        and one._version == other._version
    )
