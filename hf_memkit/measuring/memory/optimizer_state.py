"""Classes, states and parameters of an optimizer inside its wrappers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

_MAX_WRAPPERS = 8
_MAX_DEPTH = 3


def state_summary(optimizer: Any) -> dict[str, dict[str, int]]:
    """`{state: {dtype or tensor subclass: number of tensors}}`, such as `{"exp_avg": {"OptimState8bit": 28}}`."""
    summary: dict[str, dict[str, int]] = {}
    for state in states_of(innermost(optimizer)):
        for name, value in state.items() if isinstance(state, Mapping) else ():
            for tensor in tensors_in(value):
                tensor = getattr(tensor, "_local_tensor", tensor)  # of a DTensor, this rank's share
                plain = type(tensor) in (torch.Tensor, nn.Parameter)
                kind = str(tensor.dtype).removeprefix("torch.") if plain else type(tensor).__name__
                kinds = summary.setdefault(str(name), {})
                kinds[kind] = kinds.get(kind, 0) + 1
    return summary


def optimizer_chain(optimizer: Any) -> list[str]:
    """Class names from the outer wrapper to the optimizer."""
    return [type(layer).__name__ for layer in optimizer_layers(optimizer)]


def innermost(optimizer: Any) -> Any:
    """The optimizer inside accelerate's and DeepSpeed's wrappers, or None."""
    layers = list(optimizer_layers(optimizer))
    return layers[-1] if layers else None


def optimizer_layers(optimizer: Any) -> Iterator[Any]:
    """The wrappers from the outer one, then the optimizer."""
    seen: set[int] = set()
    while optimizer is not None and id(optimizer) not in seen and len(seen) < _MAX_WRAPPERS:
        seen.add(id(optimizer))
        yield optimizer
        optimizer = getattr(optimizer, "optimizer", None)


def states_of(optimizer: Any) -> list[Any]:
    """The states of the parameters that have one."""
    state = getattr(optimizer, "state", None)
    return list(state.values()) if isinstance(state, Mapping) else []


def tensors_in(value: Any, depth: int = 0) -> Iterator[torch.Tensor]:
    """The tensors in nested lists and dictionaries."""
    if isinstance(value, torch.Tensor):
        yield value
    elif depth < _MAX_DEPTH and isinstance(value, Mapping | list | tuple):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from tensors_in(item, depth + 1)
