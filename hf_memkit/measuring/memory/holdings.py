"""Bytes held by a model, its optimizer and DeepSpeed's engine, by category and place, found by walking over their
tensors. Activations, buckets of torch's DistributedDataParallel, and workspaces of libraries are out of reach."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from hf_memkit.common.terms import Category, Place
from hf_memkit.common.units import GIB
from hf_memkit.deepspeed.engine_tensors import engine_tensors, swapped_bytes
from hf_memkit.measuring.memory.optimizer_state import (
    innermost,
    optimizer_chain,
    optimizer_layers,
    states_of,
    tensors_in,
)
from hf_memkit.measuring.record_types import CategorySizes

Holdings = dict[tuple[Category, str], int]
"""(category, place) → bytes. Places: `device`, `host`, `pinned`, `disk`, and `elsewhere` for another accelerator."""

_REPEATED_LOOKS = 100


def walk(model: nn.Module, optimizer: Any = None, device: torch.device | None = None) -> Holdings:
    """Bytes by category and place; empty ones are absent.

    Each storage counts once, in the first of these that reaches it: DeepSpeed's engine (each of its terms has a
    category), weights and buffers of the model, gradients, optimizer; so tied weights count once. A tensor subclass
    (torchao's OptimState8bit, DTensor) counts by its inner tensors, a quantized weight of bitsandbytes with its
    scales. A parameter that ZeRO-3 has gathered is in `buffers`, its partition in `weights`. `device`: the one whose
    allocator is measured (default: any except CPU and meta).
    """
    count = StorageCount(device)
    inner = innermost(optimizer)
    for layer in optimizer_layers(optimizer):
        for (_, term), tensors in engine_tensors(layer, model).items():
            for tensor in tensors:
                count.add(term.category, tensor)
    parameters = list(model.parameters())
    for parameter in parameters:
        gathered = hasattr(parameter, "ds_tensor") and not getattr(parameter, "ds_persist", False)
        count.add("buffers" if gathered else "weights", parameter)
        for tensor in attached_tensors(parameter):
            count.add("weights", tensor)
    for buffer in model.buffers():
        count.add("weights", buffer)
    groups = getattr(inner, "param_groups", None) or ()
    optimized = [parameter for group in groups for parameter in group.get("params", ())]
    for parameter in (*parameters, *optimized):
        count.add("gradients", parameter.grad if parameter.is_leaf else None)
    for parameter in optimized:
        count.add("optimizer", parameter)  # fp32 copies; weights have been counted
    for state in states_of(inner):
        for tensor in tensors_in(state):
            count.add("optimizer", tensor)
    return count.holdings


class Inventory:
    """Repeats the walk only when sizes may have changed. Sizes of weights and optimizer states are constant: they are
    walked again when the number of states changes, after `_REPEATED_LOOKS` looks, and always under DeepSpeed, which
    moves its tensors. Gradients are counted at every look."""

    def __init__(self, model: nn.Module, device: torch.device | None, swap_folders: tuple[Path, ...] = ()) -> None:
        self._gradients: list[tuple[nn.Parameter, int]] = []
        # A training that raised has no end event: the references to its gradients are freed with its model.
        kept = self._gradients
        self._model = weakref.ref(model, lambda _: kept.clear())
        self._device = device
        self._swap_folders = swap_folders
        self._walked: Holdings = {}
        self._counts: tuple[int, int] | None = None
        self._looks = 0
        self.moving = False
        """Whether DeepSpeed runs the optimizer and moves its tensors."""

    def look(self, optimizer: Any, *, fresh: bool = False) -> Holdings:
        """Current holdings."""
        inner = innermost(optimizer)
        groups = getattr(inner, "param_groups", None) or ()
        counts = (len(getattr(inner, "state", None) or ()), sum(len(group.get("params", ())) for group in groups))
        self._looks += 1
        self.moving = any(name.startswith("DeepSpeed") for name in optimizer_chain(optimizer))
        if fresh or self.moving or counts != self._counts or self._looks > _REPEATED_LOOKS:
            model = self._model()
            if model is None:
                return {}
            self._walked = walk(model, optimizer, self._device)
            self._counts = counts
            self._looks = 0
            kind = "cpu" if self._device is None else self._device.type
            trained = [p for p in model.parameters() if p.requires_grad and p.device.type == kind]
            shares = [getattr(p, "_local_tensor", p) for p in trained]  # of a DTensor, this rank's share
            self._gradients[:] = [(p, own.nbytes) for p, own in zip(trained, shares, strict=True)]
            return dict(self._walked)
        rest = {key: size for key, size in self._walked.items() if key != ("gradients", self._own_place)}
        gradients = self.gradient_bytes()
        return {**rest, ("gradients", self._own_place): gradients} if gradients else rest

    def gradient_bytes(self) -> int:
        """Bytes of the parameters' gradients on the device, without a walk."""
        return sum([size for parameter, size in self._gradients if parameter.grad is not None])

    def swapped(self, rank: int) -> Holdings:
        """Bytes of this process in ZeRO-Infinity's files."""
        holdings: Holdings = {}
        for folder in self._swap_folders:
            for term, size in swapped_bytes(folder, rank).items():
                if size:
                    key = (term.category, "disk")
                    holdings[key] = holdings.get(key, 0) + size
        return holdings

    @property
    def _own_place(self) -> str:
        return "host" if self._device is None else "device"


def held_json(holdings: Holdings) -> dict[Place, CategorySizes]:
    """`{place: {category_gib}}`, as in a record, without other accelerators."""
    held: dict[str, dict[str, float]] = {}
    for (category, place), size in holdings.items():
        if place != "elsewhere":
            held.setdefault(place, {})[f"{category}_gib"] = round(size / GIB, 10)
    return cast(dict[Place, CategorySizes], held)


def attached_tensors(parameter: nn.Parameter) -> Iterator[torch.Tensor]:
    """Tensors attached to a weight: its partition (ZeRO-3), its scales (bitsandbytes in 4 and 8 bits)."""
    for name in ("ds_tensor", "CB", "SCB"):
        tensor = getattr(parameter, name, None)
        if isinstance(tensor, torch.Tensor):
            yield tensor
    state = getattr(parameter, "quant_state", None)
    while state is not None:
        yield from tensors_in(vars(state))
        state = getattr(state, "state2", None)


class StorageCount:
    """Adds up storages, each once."""

    def __init__(self, device: torch.device | None) -> None:
        self.holdings: Holdings = {}
        self._device = device
        self._seen: set[int] = set()

    def count_module(self, parameters: list[Any], buffers: list[torch.Tensor]) -> Holdings:
        """Holdings of these parameters and buffers without storages counted before."""
        self.holdings = {}
        attached = (tensor for parameter in parameters for tensor in (parameter, *attached_tensors(parameter)))
        for tensor in (*attached, *buffers):
            self.add("weights", tensor)
        return self.holdings

    def add(self, category: Category, tensor: torch.Tensor | None) -> None:
        if tensor is None or tensor.device.type == "meta":
            return
        flatten = getattr(tensor, "__tensor_flatten__", None)
        if flatten is not None:
            parts = [getattr(tensor, name) for name in flatten()[0]]
            for part in parts:
                if isinstance(part, torch.Tensor):  # a DTensor of torch 2.13 also names its mesh
                    self.add(category, part)
            return
        if tensor.layout is torch.sparse_coo:  # the gradient of a sparse embedding
            self.add(category, tensor._indices())
            self.add(category, tensor._values())
            return
        storage = tensor.untyped_storage()
        if storage._cdata in self._seen:
            return
        self._seen.add(storage._cdata)
        if storage.nbytes():
            key = (category, self._place(tensor))
            self.holdings[key] = self.holdings.get(key, 0) + storage.nbytes()

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
