"""Table of a model's modules for the `modules` record, similar to torchinfo's."""

from __future__ import annotations

import itertools
import re
from typing import NamedTuple

import torch
from torch import nn

from hf_memkit.measuring.memory.facts import class_name
from hf_memkit.measuring.memory.holdings import StorageCount
from hf_memkit.measuring.record_types import ModuleFigures

_MOST_ROWS = 300
_WRAPPER = "._checkpoint_wrapped_module"
"""What FSDP's activation checkpointing adds to a name."""


def module_rows(model: nn.Module, device: torch.device | None = None) -> list[ModuleFigures]:
    """A row for each module that owns tensors, in the model's order; equal layers are one row (`h.0…47`,
    `repeats`). With more than 300 rows, the deepest modules are added to their parents."""
    rows = _own_rows(model, device)
    depth = max((row["name"].count(".") for row in rows), default=0)
    folded = _fold_layers(rows)
    while len(folded) > _MOST_ROWS and depth > 0:
        depth -= 1
        rows = _merge_below(rows, depth, dict(model.named_modules()))
        folded = _fold_layers(rows)
    return [{**row, "name": row["name"].replace(_WRAPPER, "")} for row in folded[:_MOST_ROWS]]


def _own_rows(model: nn.Module, device: torch.device | None) -> list[ModuleFigures]:
    rows: list[ModuleFigures] = []
    count = StorageCount(device)
    seen: set[int] = set()
    for name, module in model.named_modules():
        own = [p for p in module._parameters.values() if p is not None and id(p) not in seen]
        buffers = [b for b in module._buffers.values() if b is not None and id(b) not in seen]
        seen.update(id(tensor) for tensor in (*own, *buffers))
        if not own and not buffers:
            continue
        sizes = [(int(getattr(p, "ds_numel", p.numel())), p.requires_grad) for p in own]
        places: dict[str, int] = {}
        for (_, place), size in count.count_module(own, buffers).items():
            places[place] = places.get(place, 0) + size
        row: ModuleFigures = {
            "name": name,
            "class": class_name(module),
            "parameters": sum(size for size, _ in sizes),
            "trainable_parameters": sum(size for size, trainable in sizes if trainable),
            "bytes": sum(places.values()),
            "places": places,
        }
        rows.append(row)
    return rows


class Layer(NamedTuple):
    """Rows of one layer. `prefix`: the name before the layer's number; both are empty for rows outside of layers."""

    prefix: str
    number: str
    rows: list[ModuleFigures]

    @property
    def content(self) -> object:
        """What equal layers have in common: all but the number; a row outside of layers is like no other."""
        if not self.number:
            return object()
        start = len(self.prefix) + len(self.number)
        return self.prefix, [{**row, "name": row["name"][start:]} for row in self.rows]


def _fold_layers(rows: list[ModuleFigures]) -> list[ModuleFigures]:
    """Merge rows of layers that differ in their number only."""
    layers = [Layer(*name, list(own)) for name, own in itertools.groupby(rows, _prefix_and_number)]
    folded: list[ModuleFigures] = []
    for _, group in itertools.groupby(layers, lambda layer: layer.content):
        first, *others = group
        if not others:
            folded += first.rows
            continue
        numbers = f"{first.prefix}{first.number}…{others[-1].number}"
        for row in first.rows:
            rest = row["name"][len(first.prefix) + len(first.number) :]
            folded.append({**row, "name": numbers + rest, "repeats": 1 + len(others)})
    return folded


def _prefix_and_number(row: ModuleFigures) -> tuple[str, str]:
    match = re.match(r"(.*?(?:^|\.))(\d+)(?=\.|$)", row["name"])
    return (match[1], match[2]) if match else ("", "")


def _merge_below(rows: list[ModuleFigures], depth: int, modules: dict[str, nn.Module]) -> list[ModuleFigures]:
    """Add rows deeper than `depth` to their ancestor at that depth."""
    merged: dict[str, ModuleFigures] = {}
    for row in rows:
        name = ".".join(row["name"].split(".")[: depth + 1])
        if name not in merged:
            merged[name] = {**row, "name": name, "class": type(modules[name]).__name__, "places": dict(row["places"])}
            continue
        total = merged[name]
        total["parameters"] += row["parameters"]
        total["trainable_parameters"] += row["trainable_parameters"]
        total["bytes"] += row["bytes"]
        for place, size in row["places"].items():
            total["places"][place] = total["places"].get(place, 0) + size
    return list(merged.values())
