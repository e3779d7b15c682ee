"""Batches in words, for the one who reads a prediction."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from hf_memkit.prediction.child.training.row_sizes import elements, needs

Batch = Any


def shape_of(batch: Batch) -> str:
    """`"8 × 1024 tokens"`; of what is no text the largest tensor: `"8 × 3 × 224 × 224 pixel_values"`; or both, with
    `" and "`; of rows that are no tensors yet `"8 rows of 1,204 characters"`."""
    by_size = sorted(_tensors("numbers", batch), key=lambda pair: pair[1].numel())
    tensors = {name: each for name, each in by_size if each.dim()}
    ids = {name: each for name, each in tensors.items() if name.endswith("input_ids")}
    media = {name: each for name, each in tensors.items() if needs(each)[1] and (not ids or each.dim() > 1)}
    shapes = []
    for kind in (ids, media if ids or media or _has_text(batch) else tensors):
        if kind:
            name = max(kind, key=lambda each: kind[each].numel())
            shape = " × ".join(f"{size:,}" for size in kind[name].shape)
            shapes.append(f"{shape} {'tokens' if kind is ids else name}")
    if shapes:
        return " and ".join(shapes)
    columns = batch.values() if isinstance(batch, Mapping) else [batch]
    rows = max((len(each) for each in columns if isinstance(each, list | tuple)), default=1)
    of = "characters" if _has_text(batch) else "numbers"
    return f"{rows:,} row{'s' if rows > 1 else ''} of {elements(batch):,} {of}"


def told_apart(batches: Sequence[Batch]) -> list[str]:
    """The shape of each; where those of batches that differ are the same, with all that they hold, such as boxes
    beside images."""
    shapes = [shape_of(each) for each in batches]
    if len(set(shapes)) == len(set(zip(shapes, map(needs, batches), strict=True))):
        return shapes
    return [f"{shape}, {elements(each):,} numbers in all" for shape, each in zip(shapes, batches, strict=True)]


def _has_text(value: Any) -> bool:
    if isinstance(value, Mapping):
        value = list(value.values())
    return isinstance(value, str) or (isinstance(value, list | tuple) and any(map(_has_text, value)))


def _tensors(name: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Of a batch, by the innermost name that each has."""
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from _tensors(str(key), each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(name, each)
