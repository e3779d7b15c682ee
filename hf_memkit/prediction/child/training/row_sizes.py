"""How much each row of a data set holds: lengths of columns, headers of images and sound. No row is made a tensor of.

Sizes rank the rows of one data set and need not be tokens: what a collator makes of a row is found out by it
(`batches.py`). An image's pixels say little about its tokens: a processor may stop at `max_pixels` (Qwen2.5-VL), make
as many tokens of each image (Gemma 3), or cut tiles by its shape (SmolVLM). So rows with images have `marks` besides,
by each of which another row may be the largest.
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

LIMIT_S: Final = 60.0
"""How long rows are read; after it those that were read stand for all."""

_STREAM_S: Final = 10.0
_STREAMED: Final = 2_000
"""Of a stream, which may come over the network and has no end: so many rows, or as many as come in that time."""


_FILES: Final = ("Image", "Audio", "Video")
"""Features of `datasets` whose values are files."""

Numbers = np.ndarray[Any, np.dtype[np.int64]]

Needs = tuple[int, int]
"""(tokens, or characters of what is not tokenised yet; numbers of images and sound) of a row or a batch."""

Marks = tuple[int, int, int, int, int]
_NO_MARKS: Final[Marks] = (0, 0, 0, 0, 0)
"""Of a row: see `RowSizes.marks`."""


@dataclass(frozen=True, slots=True)
class RowSizes:
    """Sizes of the rows that were read.

    Attributes:
        sizes: of the rows, in their order; -1 for those that were not read.
        rows: how many the data set has; None: a stream, of which `kept` are the first rows: it cannot be read twice.
        unreadable: what cannot be read: its row, and why.
        marks: of rows with images or sound, an array a mark: tokens and characters; pixels and samples; of images
            their number, and how square and how long they are. None: rows without.
        columns: sizes of each column, where several of them differ: a collator pads each by itself. Else none.
        characters: whether that is what sizes are: the collator makes tokens of them.
    """

    sizes: Numbers
    rows: int | None
    kept: list[Any] = field(default_factory=list)
    unreadable: tuple[int, str] | None = None
    marks: Numbers | None = None
    columns: Sequence[Numbers] = ()
    characters: bool = False

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
    return _one_by_one(dataset.__getitem__, len(dataset), _marks, until) if found is None else found


def elements(value: Any) -> int:
    """Numbers in a row or a batch; of texts their characters."""
    return sum(needs(value))


def needs(value: Any) -> Needs:
    """What of a row or a batch is text, and what is image or sound: tensors of whole numbers with two dimensions at
    most hold ids, masks and labels of tokens."""
    if isinstance(value, Mapping):
        return _sum(map(needs, value.values()))
    if isinstance(value, str | bytes):
        return len(value), 0
    if isinstance(value, tuple | list):
        if not value or not isinstance(value[0], int | float):
            return _sum(map(needs, value))
        return (0, len(value)) if isinstance(value[0], float) else (len(value), 0)
    shape = getattr(value, "shape", None) or getattr(value, "size", None)  # an image has a size
    if not isinstance(shape, tuple):
        return int(isinstance(value, int | float)), 0
    size, kind = int(np.prod(shape)), str(getattr(value, "dtype", ""))
    return (size, 0) if len(shape) <= 2 and ("int" in kind or "bool" in kind) else (0, size)


def _sum(several: Iterable[Needs]) -> Needs:
    tokens = media = 0
    for one, other in several:
        tokens, media = tokens + one, media + other
    return tokens, media


def _of_stream(dataset: Iterable[Any]) -> RowSizes:
    until = time.monotonic() + _STREAM_S
    kept: list[Any] = []
    for row in dataset:
        kept.append(row)
        if len(kept) >= _STREAMED or time.monotonic() > until:
            break
    return replace(_one_by_one(kept.__getitem__, len(kept), _marks, math.inf), rows=None, kept=kept)


def _one_by_one(read: Callable[[int], Any], rows: int, measure: Callable[[Any], Marks], until: float) -> RowSizes:
    found: dict[int, Marks] = {}
    unreadable = None
    for number in np.random.default_rng(0).permutation(rows).tolist():
        try:
            found[number] = measure(read(number))
        except Exception as error:
            unreadable = unreadable or (number, f"{type(error).__name__}: {error}")
        if time.monotonic() > until:
            break
    sizes = np.full(rows, -1, np.int64)
    sizes[list(found)] = [each[0] + each[1] for each in found.values()]
    if not any(media > tokens for tokens, media, *_ in found.values()):  # a score or two beside ids is no image
        return RowSizes(sizes, rows, unreadable=unreadable)
    marks = np.zeros((len(_NO_MARKS), rows), np.int64)
    marks[:, list(found)] = np.array(list(found.values())).T
    return RowSizes(sizes, rows, unreadable=unreadable, marks=marks)


def _marks(value: Any) -> Marks:
    """Of a row as it is read."""
    tokens, media = needs(value)
    images = [leaf.size for leaf in _leaf_values(value) if hasattr(leaf, "getbands")]
    return tokens, media, *_shapes(images)


def _leaf_values(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        value = list(value.values())
    elif isinstance(value, tuple | list) and value and isinstance(value[0], int | float):
        return  # ids, of which there are many
    if isinstance(value, tuple | list):
        for each in value:
            yield from _leaf_values(each)
    else:
        yield value


def _shapes(images: Sequence[tuple[int, int]]) -> tuple[int, int, int]:
    """How many images of these widths and heights there are, how square they are and how long, in percent."""
    ratios = [max(each) / max(1, min(each)) for each in images]
    return len(images), round(sum(100 / ratio for ratio in ratios)), round(sum(100 * ratio for ratio in ratios))


# ---- columns in Arrow ----


def _of_columns(dataset: Any, until: float) -> RowSizes | None:
    """None where it has no columns in Arrow."""
    places = np.arange(len(dataset))
    while hasattr(dataset, "dataset") and hasattr(dataset, "indices"):  # torch's Subset
        places = np.asarray(dataset.indices)[places]
        dataset = dataset.dataset
    table, features = getattr(getattr(dataset, "data", None), "table", None), getattr(dataset, "features", None)
    if table is None or features is None:
        return None
    if dataset._indices is not None:
        places = dataset._indices.column(0).to_numpy()[places]
    names = dataset.format["columns"] or dataset.column_names
    sizes = np.zeros(len(table), np.int64)
    texts = np.zeros(len(table), np.int64)
    columns: list[Numbers] = []
    for name in names:
        feature = features[name]
        if type(feature).__name__ in _FILES:
            continue
        own = _leaves(table.column(name).combine_chunks())
        if type(feature).__name__ == "Value" and feature.dtype in ("string", "large_string"):
            texts += own
        else:
            sizes += own
        if (own > 1).any() and not any(np.array_equal(own, each) for each in columns):
            columns.append(own)
    with_files = {name: features[name] for name in names if _holds_files(features[name])}
    if with_files:
        found = _of_files(table, with_files, places, until)
        tokens = np.where(found.sizes < 0, 0, (sizes + texts)[places])
        marks = None if found.marks is None else np.vstack([found.marks[:1] + tokens, found.marks[1:]])
        return replace(found, sizes=found.sizes + tokens, marks=marks)
    characters = not (sizes > 1).any() and bool(texts.any())  # no lists: what is a text becomes tokens later
    if characters:
        sizes = sizes + texts
    several = [each[places] for each in columns] if len(columns) > 1 else ()
    return RowSizes(sizes[places], len(places), columns=several, characters=characters)


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


def _holds_files(feature: Any) -> bool:
    return type(feature).__name__ in _FILES or any(map(_holds_files, _inner(feature)))


def _inner(feature: Any) -> Iterable[Any]:
    """Of a list its entries' feature, of a struct those of its fields."""
    if isinstance(feature, Mapping):
        return feature.values()
    return feature if isinstance(feature, list) else [feature.feature] if hasattr(feature, "feature") else ()


def _of_files(table: Any, features: Mapping[str, Any], places: Numbers, until: float) -> RowSizes:
    """Marks by the headers of files, which lie in the table or beside it."""

    def measured(number: int) -> Marks:
        pixels, samples, images = 0, 0, list[tuple[int, int]]()
        place = int(places[number])
        held = [(feature, table.column(name)[place].as_py()) for name, feature in features.items()]
        for kind, file in _files(held):
            if kind == "Image":
                from PIL import Image

                with Image.open(file) as image:
                    images.append(image.size)
                pixels += math.prod(images[-1])
            else:
                samples += _samples(file) if kind == "Audio" else _bytes(file)
        return 0, pixels + samples, *_shapes(images)

    return _one_by_one(lambda number: number, len(places), measured, until)


def _files(held: Iterable[tuple[Any, Any]]) -> Iterator[tuple[str, Any]]:
    """(kind, file or path) of each image and sound in values of these features."""
    for feature, value in held:
        kind = type(feature).__name__
        if value is None:
            continue
        if kind in _FILES:
            yield kind, io.BytesIO(value["bytes"]) if value.get("bytes") is not None else value["path"]
        elif isinstance(feature, Mapping):
            yield from _files((inner, value[name]) for name, inner in feature.items())
        else:
            yield from _files((inner, each) for inner in _inner(feature) for each in value)


def _samples(file: Any) -> int:
    """Of sound in a format that nothing here reads, its bytes, which grow with its length."""
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
