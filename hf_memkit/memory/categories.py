"""What memory holds, found by walking. In: a model and its optimizer. Out: bytes by category and place.

Only what can be reached from the model and the optimizer is counted. DeepSpeed ZeRO keeps gradients and buffers where
no walk reaches them, and those bytes stay in `other`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from hf_memkit.terms import Category
from hf_memkit.units import GIB

__all__ = ["categories_at_peak", "innermost", "optimizer_chain", "state_summary", "walk"]

_MAX_WRAPPERS = 8
_MAX_DEPTH = 3


def walk(model: nn.Module, optimizer: Any = None, device: torch.device | None = None) -> dict[str, int]:
    """Bytes as `{"weights_device_bytes": …, "optimizer_host_bytes": …}`; what holds nothing is absent.

    Each storage counts once, in the first category that reaches it (weights, gradients, optimizer), so tied weights
    count once. A tensor subclass (torchao's OptimState8bit, DTensor) counts by its inner tensors. `device` is the one
    whose allocator is measured (default: any that is neither CPU nor meta); tensors on another accelerator are
    `elsewhere`, and those on meta hold nothing.
    """
    count = _Count(device)
    inner = innermost(optimizer)
    parameters = list(model.parameters())
    for parameter in parameters:
        count.add("weights", parameter)
        count.add("weights", getattr(parameter, "ds_tensor", None))  # this rank's part under ZeRO-3
    for buffer in model.buffers():
        count.add("weights", buffer)
    groups = getattr(inner, "param_groups", None) or []
    own = [parameter for group in groups for parameter in group.get("params", ())]
    for parameter in (*parameters, *own):
        count.add("gradients", parameter.grad if parameter.is_leaf else None)
    for parameter in own:
        count.add("optimizer", parameter)  # fp32 copies; those that are the weights have been counted
    for state in _states(inner):
        for tensor in _tensors_in(state):
            count.add("optimizer", tensor)
    return count.bytes


def categories_at_peak(
    walked: Mapping[str, int],
    peak_gib: float,
    *,
    peak_phase: str | None = None,
    micro_batches: int = 1,
    optimizer_bytes_before: int | None = None,
) -> dict[Category, float]:
    """The categories of a step at its peak, adding up to `peak_gib` (GiB).

    `walked` is from after the optimizer step, when everything lives. What did not live yet at the peak is left out:
    gradients before the first backward, optimizer states before the first step. In backward the gradients grow, so
    there they are an upper bound. What the walk found beyond the peak (it lies outside the allocator) is cut.
    """
    gradients = walked.get("gradients_device_bytes", 0)
    if peak_phase in ("data", "forward") and micro_batches == 1:
        gradients = 0
    states = walked.get("optimizer_device_bytes", 0)
    if peak_phase in ("data", "forward", "backward") and optimizer_bytes_before is not None:
        states = min(states, optimizer_bytes_before)
    found: dict[Category, int] = {
        "weights": walked.get("weights_device_bytes", 0),
        "optimizer": states,
        "gradients": gradients,
    }
    left = peak_gib
    result: dict[Category, float] = {}
    for category, size_bytes in found.items():
        result[category] = min(size_bytes / GIB, left)
        left -= result[category]
    result["other"] = left
    return result


def state_summary(optimizer: Any) -> dict[str, dict[str, int]]:
    """`{state: {dtype or tensor subclass: number of tensors}}`, such as `{"exp_avg": {"OptimState8bit": 28}}`."""
    summary: dict[str, dict[str, int]] = {}
    for state in _states(innermost(optimizer)):
        for name, value in state.items() if isinstance(state, Mapping) else ():
            for tensor in _tensors_in(value):
                plain = type(tensor) in (torch.Tensor, nn.Parameter)
                kind = str(tensor.dtype).removeprefix("torch.") if plain else type(tensor).__name__
                kinds = summary.setdefault(str(name), {})
                kinds[kind] = kinds.get(kind, 0) + 1
    return summary


def optimizer_chain(optimizer: Any) -> list[str]:
    """Class names from the outer wrapper to the optimizer itself."""
    return [type(layer).__name__ for layer in _layers(optimizer)]


def innermost(optimizer: Any) -> Any:
    """The optimizer under accelerate's and DeepSpeed's wrappers; None if there is none."""
    layers = list(_layers(optimizer))
    return layers[-1] if layers else None


def _layers(optimizer: Any) -> Iterator[Any]:
    seen: set[int] = set()
    while optimizer is not None and id(optimizer) not in seen and len(seen) < _MAX_WRAPPERS:
        seen.add(id(optimizer))
        yield optimizer
        optimizer = getattr(optimizer, "optimizer", None)


def _states(optimizer: Any) -> Iterable[Any]:
    state = getattr(optimizer, "state", None)
    return list(state.values()) if isinstance(state, Mapping) else []


def _tensors_in(value: Any, depth: int = 0) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif depth < _MAX_DEPTH and isinstance(value, Mapping | list | tuple):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors_in(item, depth + 1)


class _Count:
    """Adds up storages, each once."""

    def __init__(self, device: torch.device | None) -> None:
        self.bytes: dict[str, int] = {}
        self._device = device
        self._seen: set[int] = set()

    def add(self, category: Category, tensor: torch.Tensor | None) -> None:
        if tensor is None or tensor.device.type == "meta":
            return
        flatten = getattr(tensor, "__tensor_flatten__", None)
        if flatten is not None:
            for name in flatten()[0]:
                self.add(category, getattr(tensor, name))
            return
        storage = tensor.untyped_storage()
        if storage._cdata in self._seen:
            return
        self._seen.add(storage._cdata)
        if storage.nbytes():
            key = f"{category}_{self._place(tensor)}_bytes"
            self.bytes[key] = self.bytes.get(key, 0) + storage.nbytes()

    def _place(self, tensor: torch.Tensor) -> str:
        if getattr(tensor, "is_paged", False):
            return "host"  # bitsandbytes' paged states: managed memory, outside torch's allocator
        if self._device is not None and tensor.device.type == self._device.type:
            same = None in (tensor.device.index, self._device.index) or tensor.device == self._device
            return "device" if same else "elsewhere"
        if tensor.device.type == "cpu":
            cuda = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
            return "pinned" if cuda and tensor.is_pinned() else "host"
        return "device" if self._device is None else "elsewhere"
