"""How much each row of a data set holds: lengths of columns, headers of images and sound. No row is made a tensor of.

Sizes rank the rows of one data set; they need not be tokens: what a collator makes of a row is found out by it
(`batches.py`).
"""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

__all__ = ["RowSizes", "elements", "row_sizes"]

LIMIT_S: Final = 60.0
"""How long rows are read; after it those that were read stand for all."""

_STREAM_S: Final = 10.0
_STREAMED: Final = 2_000
"""Of a stream, which may come over the network and has no end: so many rows, or as many as come in that time."""


@dataclass(frozen=True, slots=True)
class RowSizes:
    """Sizes of the rows that were read.

    Attributes:
        sizes: of the rows, in their order; where only a sample was read, -1 for the others.
        rows: how many the data set has; None: a stream, of which `kept` are the first rows.
        kept: rows of a stream, which cannot be read twice.
        unreadable: what cannot be read: its row, and why.
    """

    sizes: np.ndarray[Any, np.dtype[np.int64]]
    rows: int | None
    kept: list[Any] = field(default_factory=list)
    unreadable: tuple[int, str] | None = None

    @property
    def read(self) -> int:
        return int((self.sizes >= 0).sum())


def row_sizes(dataset: Any) -> RowSizes:
    """Sizes of a data set's rows: by its columns where it has some in Arrow, else row by row, in random order as long
    as time allows."""
    if not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
        return _of_stream(dataset)
    until = time.monotonic() + LIMIT_S
    found = _of_columns(dataset, until)
    return _one_by_one(dataset.__getitem__, len(dataset), elements, until) if found is None else found


def elements(value: Any) -> int:
    """Numbers in a row or a batch; of texts their characters."""
    if isinstance(value, Mapping):
        return sum(map(elements, value.values()))
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, tuple | list):
        return len(value) if value and isinstance(value[0], int | float) else sum(map(elements, value))
    shape = getattr(value, "shape", None) or getattr(value, "size", None)  # an image has a size
    return int(np.prod(shape)) if isinstance(shape, tuple) else int(isinstance(value, int | float))


def _of_stream(dataset: Iterable[Any]) -> RowSizes:
    until = time.monotonic() + _STREAM_S
    kept: list[Any] = []
    for row in dataset:
        kept.append(row)
        if len(kept) >= _STREAMED or time.monotonic() > until:
            break
    return RowSizes(np.array([elements(row) for row in kept], np.int64), None, kept)


def _one_by_one(read: Callable[[int], Any], rows: int, size: Callable[[Any], int], until: float) -> RowSizes:
    sizes = np.full(rows, -1, np.int64)
    unreadable = None
    for number in np.random.default_rng(0).permutation(rows).tolist():
        try:
            sizes[number] = size(read(number))
        except Exception as error:
            unreadable = unreadable or (number, f"{type(error).__name__}: {error}")
        if time.monotonic() > until:
            break
    return RowSizes(sizes, rows, unreadable=unreadable)


# ---- columns in Arrow ----


def _of_columns(dataset: Any, until: float) -> RowSizes | None:
    """None where it has no columns in Arrow."""
    inner, chosen = getattr(dataset, "dataset", None), getattr(dataset, "indices", None)
    if inner is not None and chosen is not None:  # torch's Subset
        found = _of_columns(inner, until)
        return found and RowSizes(found.sizes[np.asarray(chosen)], len(dataset), unreadable=found.unreadable)
    table, features = getattr(getattr(dataset, "data", None), "table", None), getattr(dataset, "features", None)
    if table is None or features is None:
        return None
    indices = None if dataset._indices is None else dataset._indices.column(0).to_numpy()
    names = dataset.format["columns"] or dataset.column_names
    sizes = np.zeros(len(table), np.int64)
    unreadable = None
    texts = np.zeros(len(table), np.int64)
    for name in names:
        feature = features[name]
        if type(feature).__name__ in ("Image", "Audio"):
            measured = _of_files(table.column(name), feature, until)
            sizes, unreadable = sizes + measured.sizes, unreadable or measured.unreadable
        elif type(feature).__name__ == "Value" and feature.dtype in ("string", "large_string"):
            texts += _leaves(table.column(name).combine_chunks())
        else:
            sizes += _leaves(table.column(name).combine_chunks())
    if not (sizes > 1).any():  # no lists: what is a text becomes tokens later
        sizes = sizes + texts
    return RowSizes(sizes if indices is None else sizes[indices], len(dataset), unreadable=unreadable)


def _leaves(array: Any) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Numbers in each entry of an Arrow array, however it is nested; of texts their characters."""
    import pyarrow as pa  # type: ignore[import-untyped, unused-ignore]
    import pyarrow.compute as pc  # type: ignore[import-untyped, unused-ignore]

    kind = array.type
    if isinstance(kind, pa.ExtensionType):
        return _leaves(array.storage)
    if pa.types.is_struct(kind):
        return np.asarray(np.sum([_leaves(part) for part in array.flatten()], axis=0, dtype=np.int64))
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        lengths = np.asarray(pc.list_value_length(array).fill_null(0), np.int64)
        if pa.types.is_primitive(kind.value_type):
            return lengths
        before = np.concatenate([[0], np.cumsum(_leaves(array.flatten()))])
        ends = np.cumsum(lengths)
        return np.asarray(before[ends] - before[ends - lengths])
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return np.asarray(pc.utf8_length(array).fill_null(0), np.int64)
    return np.ones(len(array), np.int64)


def _of_files(column: Any, feature: Any, until: float) -> RowSizes:
    """Pixels or samples by the headers of files, which lie in the table or beside it."""
    measure = _pixels if type(feature).__name__ == "Image" else _samples

    def size(row: Any) -> int:
        held = row.as_py()
        if held is None:
            return 0
        return measure(io.BytesIO(held["bytes"]) if held.get("bytes") else held["path"])

    return _one_by_one(column.__getitem__, len(column), size, until)


def _pixels(file: Any) -> int:
    from PIL import Image

    with Image.open(file) as image:
        return int(np.prod(image.size))


def _samples(file: Any) -> int:
    import soundfile  # type: ignore[import-not-found, import-untyped, unused-ignore]

    return int(soundfile.info(file).frames)
