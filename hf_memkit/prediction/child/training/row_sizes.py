"""Measures the rows of a data set from lengths of columns and headers of images and sound, without making tensors.

Sizes rank the rows of a data set and need not be tokens: the collator shows the real size (`batches.py`). The pixels
of an image say little about its tokens: a processor may stop at `max_pixels` (Qwen2.5-VL), make the same number of
tokens for each image (Gemma 3), or cut tiles by its shape (SmolVLM). So rows with images also have `marks`; by any of
them a row may be the largest.
"""

from __future__ import annotations

import contextlib
import io
import math
import time
import wave
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

LIMIT_S: Final = 60.0  # time limit for reading rows; after it the rows that were read represent all

_STREAM_S: Final = 10.0
_STREAMED: Final = 2_000
"""Limits for a stream, which may come over the network and be endless."""

_FILES: Final = ("Image", "Audio", "Video")  # features of `datasets` whose values are files

Numbers = np.ndarray[Any, np.dtype[np.int64]]

Size = tuple[int, int]  # (tokens, or characters before tokenizing; elements of images and sound) of a row or a batch

Marks = tuple[int, int, int, int, int]
_NO_MARKS: Final[Marks] = (0, 0, 0, 0, 0)
"""Marks of a row; see `RowSizes.marks`."""


@dataclass(frozen=True, slots=True)
class RowSizes:
    """Sizes of the rows that were read.

    Attributes:
        rows: number of rows of the data set; None for a stream, whose first rows are `kept`, because it cannot be read
            twice.
        marks: an array per mark, for rows with images or sound: tokens and characters; pixels and samples; number of
            images, sum of their squareness, sum of their elongation. None: there are no such rows.
        columns: sizes of each column, if several columns differ, because a collator pads each separately.
    """

    sizes: Numbers  # by row; -1 for rows that were not read
    rows: int | None
    kept: list[Any] = field(default_factory=list)
    unreadable: tuple[int, str] | None = None  # a row that cannot be read, and the error
    marks: Numbers | None = None
    columns: Sequence[Numbers] = ()
    characters: bool = False  # sizes are characters, which the collator turns into tokens

    @property
    def read(self) -> int:
        return int((self.sizes >= 0).sum())


def row_sizes(dataset: Any) -> RowSizes:
    """Sizes of a data set's rows: from Arrow columns if any, else row by row in random order within the time limit."""
    if not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
        until = time.monotonic() + _STREAM_S
        kept: list[Any] = []
        for row in dataset:
            kept.append(row)
            if len(kept) >= _STREAMED or time.monotonic() > until:
                break
        return replace(_measured(kept.__getitem__, len(kept), _marks, math.inf), rows=None, kept=kept)
    until = time.monotonic() + LIMIT_S
    sizes = _arrow_sizes(dataset, until)
    return _measured(dataset.__getitem__, len(dataset), _marks, until) if sizes is None else sizes


def elements(value: Any) -> int:
    """Elements of a row or a batch; characters of texts."""
    return sum(size_of(value))


def size_of(value: Any) -> Size:
    """The size of a row or batch. Integer tensors of up to two dimensions count as ids, masks and labels of tokens."""
    if isinstance(value, Mapping):
        return _sum(map(size_of, value.values()))
    if isinstance(value, str | bytes):
        return len(value), 0
    if isinstance(value, tuple | list):
        if not value or not isinstance(value[0], int | float):
            return _sum(map(size_of, value))
        return (0, len(value)) if isinstance(value[0], float) else (len(value), 0)
    shape = getattr(value, "shape", None) or getattr(value, "size", None)  # PIL images have a size
    if not isinstance(shape, tuple):
        return int(isinstance(value, int | float)), 0
    size, kind = int(np.prod(shape)), str(getattr(value, "dtype", ""))
    return (size, 0) if len(shape) <= 2 and ("int" in kind or "bool" in kind) else (0, size)


def _sum(sizes: Iterable[Size]) -> Size:
    tokens = media = 0
    for size in sizes:
        tokens, media = tokens + size[0], media + size[1]
    return tokens, media


def _measured(read: Callable[[int], Any], rows: int, measure: Callable[[Any], Marks], until: float) -> RowSizes:
    marks_by_row: dict[int, Marks] = {}
    unreadable = None
    for number in np.random.default_rng(0).permutation(rows).tolist():
        try:
            marks_by_row[number] = measure(read(number))
        except Exception as error:
            unreadable = unreadable or (number, f"{type(error).__name__}: {error}")
        if time.monotonic() > until:
            break
    sizes = np.full(rows, -1, np.int64)
    sizes[list(marks_by_row)] = [tokens + media for tokens, media, *_ in marks_by_row.values()]
    if not any(media > tokens for tokens, media, *_ in marks_by_row.values()):  # some floats next to ids are no image
        return RowSizes(sizes, rows, unreadable=unreadable)
    marks = np.zeros((len(_NO_MARKS), rows), np.int64)
    marks[:, list(marks_by_row)] = np.array(list(marks_by_row.values())).T
    return RowSizes(sizes, rows, unreadable=unreadable, marks=marks)


def _marks(value: Any) -> Marks:
    """The marks of a row."""
    tokens, media = size_of(value)
    images = [leaf.size for leaf in _leaf_values(value) if hasattr(leaf, "getbands")]
    return tokens, media, *_shapes(images)


def _leaf_values(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        value = list(value.values())
    elif isinstance(value, tuple | list) and value and isinstance(value[0], int | float):
        return  # many ids
    if isinstance(value, tuple | list):
        for item in value:
            yield from _leaf_values(item)
    else:
        yield value


def _shapes(images: Sequence[tuple[int, int]]) -> tuple[int, int, int]:
    """(number of images with these widths and heights, sum of squareness, sum of elongation, in percent)."""
    ratios = [max(size) / max(1, min(size)) for size in images]
    return len(images), round(sum(100 / ratio for ratio in ratios)), round(sum(100 * ratio for ratio in ratios))


# ---- Arrow columns ----


def _arrow_sizes(dataset: Any, until: float) -> RowSizes | None:
    """Sizes from Arrow columns; None if there are none."""
    indices = np.arange(len(dataset))
    while hasattr(dataset, "dataset") and hasattr(dataset, "indices"):  # torch's Subset
        indices = np.asarray(dataset.indices)[indices]
        dataset = dataset.dataset
    table, features = getattr(getattr(dataset, "data", None), "table", None), getattr(dataset, "features", None)
    if table is None or features is None:
        return None
    if dataset._indices is not None:
        indices = dataset._indices.column(0).to_numpy()[indices]
    names = dataset.format["columns"] or dataset.column_names
    sizes = np.zeros(len(table), np.int64)
    texts = np.zeros(len(table), np.int64)
    columns: list[Numbers] = []
    for name in names:
        feature = features[name]
        if type(feature).__name__ in _FILES:
            continue
        lengths = _leaves(table.column(name).combine_chunks())
        if type(feature).__name__ == "Value" and feature.dtype in ("string", "large_string"):
            texts += lengths
        else:
            sizes += lengths
        if (lengths > 1).any() and not any(np.array_equal(lengths, column) for column in columns):
            columns.append(lengths)
    with_files = {name: features[name] for name in names if _holds_files(features[name])}
    if with_files:
        files = _file_sizes(table, with_files, indices, until)
        tokens = np.where(files.sizes < 0, 0, (sizes + texts)[indices])
        marks = None if files.marks is None else np.vstack([files.marks[:1] + tokens, files.marks[1:]])
        return replace(files, sizes=files.sizes + tokens, marks=marks)
    characters = not (sizes > 1).any() and bool(texts.any())  # no lists: texts are tokenized later
    if characters:
        sizes = sizes + texts
    several = [column[indices] for column in columns] if len(columns) > 1 else ()
    return RowSizes(sizes[indices], len(indices), columns=several, characters=characters)


def _leaves(array: Any) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Number of values in each entry of a nested Arrow array; characters of texts."""
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


def _holds_files(feature: Any) -> bool:
    return type(feature).__name__ in _FILES or any(map(_holds_files, _inner(feature)))


def _inner(feature: Any) -> Iterable[Any]:
    """Features of a list's entries, or of a struct's fields."""
    if isinstance(feature, Mapping):
        return feature.values()
    if isinstance(feature, list):
        return feature
    return [feature.feature] if hasattr(feature, "feature") else ()


def _file_sizes(table: Any, features: Mapping[str, Any], indices: Numbers, until: float) -> RowSizes:
    """Marks from the headers of files, which are stored in the table or on disk."""

    def measure(number: int) -> Marks:
        pixels, samples, images = 0, 0, list[tuple[int, int]]()
        index = int(indices[number])
        held = [(feature, table.column(name)[index].as_py()) for name, feature in features.items()]
        for kind, file in _files(held):
            if kind == "Image":
                from PIL import Image

                with Image.open(file) as image:
                    images.append(image.size)
                pixels += math.prod(images[-1])
            else:
                samples += _samples(file) if kind == "Audio" else _bytes(file)
        return 0, pixels + samples, *_shapes(images)

    return _measured(lambda number: number, len(indices), measure, until)


def _files(held: Iterable[tuple[Any, Any]]) -> Iterator[tuple[str, Any]]:
    """(kind, file or path) of each file in values of these features."""
    for feature, value in held:
        kind = type(feature).__name__
        if value is None:
            continue
        if kind in _FILES:
            yield kind, io.BytesIO(value["bytes"]) if value.get("bytes") is not None else value["path"]
        elif isinstance(feature, Mapping):
            yield from _files((inner, value[name]) for name, inner in feature.items())
        else:
            yield from _files((inner, item) for inner in _inner(feature) for item in value)


def _samples(file: Any) -> int:
    """Samples of a sound; its bytes, which grow with its length, if no installed library reads the format."""
    with contextlib.suppress(wave.Error, EOFError), wave.open(file) as sound:
        return int(sound.getnframes())
    try:
        import soundfile  # type: ignore[import-not-found, import-untyped, unused-ignore]
    except ImportError:
        return _bytes(file)
    if not isinstance(file, str):
        file.seek(0)
    return int(soundfile.info(file).frames)


def _bytes(file: Any) -> int:
    return Path(file).stat().st_size if isinstance(file, str) else int(file.getbuffer().nbytes)
