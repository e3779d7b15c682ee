"""Describes batches in words for readers of a prediction."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from hf_memkit.prediction.child.training.row_sizes import elements, size_of

Batch = Any


def shape_of(batch: Batch) -> str:
    """`"8 × 1024 tokens"`; without text the largest tensor: `"8 × 3 × 224 × 224 pixel_values"`; or both, joined by
    `" and "`; rows that are not tensors yet: `"8 rows of 1,204 characters"`."""
    by_size = sorted(_tensors("numbers", batch), key=lambda pair: pair[1].numel())
    tensors = {name: tensor for name, tensor in by_size if tensor.dim()}
    ids = {name: tensor for name, tensor in tensors.items() if name.endswith("input_ids")}
    media = {name: tensor for name, tensor in tensors.items() if size_of(tensor)[1] and (not ids or tensor.dim() > 1)}
    shapes = []
    for kind in (ids, media if ids or media or _has_text(batch) else tensors):
        if kind:
            name = max(kind, key=lambda name: kind[name].numel())
            shape = " × ".join(f"{size:,}" for size in kind[name].shape)
            shapes.append(f"{shape} {'tokens' if kind is ids else name}")
    if shapes:
        return " and ".join(shapes)
    columns = batch.values() if isinstance(batch, Mapping) else [batch]
    rows = max((len(column) for column in columns if isinstance(column, list | tuple)), default=1)
    unit = "characters" if _has_text(batch) else "numbers"
    return f"{rows:,} row{'s' if rows > 1 else ''} of {elements(batch):,} {unit}"


def distinct_shapes(batches: Sequence[Batch]) -> list[str]:
    """The shape of each batch; also its number of elements if others share it, such as images with other boxes."""
    shapes = [shape_of(batch) for batch in batches]
    if len(set(shapes)) == len(set(zip(shapes, map(size_of, batches), strict=True))):
        return shapes
    return [f"{shape}, {elements(batch):,} numbers in all" for shape, batch in zip(shapes, batches, strict=True)]


def _has_text(value: Any) -> bool:
    if isinstance(value, Mapping):
        value = list(value.values())
    return isinstance(value, str) or (isinstance(value, list | tuple) and any(map(_has_text, value)))


def _tensors(name: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """(innermost name, tensor) for each tensor of a batch."""
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _tensors(str(key), item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(name, item)
