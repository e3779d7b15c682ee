"""Chooses the worst and a typical batch that the script's sampler can form; its collator makes them.

Memory follows the largest batch, and that has the longest row, because collators pad all rows of a batch to it. Of
images and sound only headers are read. The result of their processor is found by collating single rows: those that may
be the largest, and random ones. The batch with most tokens may not have the largest images; the trace shows which
needs more, so both are chosen.
"""

from __future__ import annotations

import hashlib
import heapq
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import torch
from torch.utils.data import BatchSampler, RandomSampler
from transformers import DataCollatorWithFlattening

from hf_memkit.common.errors import Unmodelled
from hf_memkit.prediction.child.training.batch_shapes import distinct_shapes, shape_of
from hf_memkit.prediction.child.training.row_sizes import Numbers, RowSizes, Size, elements, row_sizes, size_of
from hf_memkit.prediction.child.training.traced_batches import on_host
from hf_memkit.prediction.traced_training import BatchLengths, BatchShapes

_DRAWS: Final = 1_001  # random batches of which the median is the typical one

_ENOUGH_PASSES: Final = 25
_ENOUGH_BATCHES: Final = 10_000
_PASSES_S: Final = 10.0
"""A sampler that does not shuffle all rows is followed for this many passes and batches, or for this time."""

_CANDIDATES: Final = 64
_CANDIDATES_S: Final = 10.0
"""Limits for rows whose size only the collator knows: they are collated singly, the largest first."""

_RANDOM_S: Final = 5.0  # time for random rows with images or sound, from which the typical batch is estimated

_COLLATED: Final = 8
"""Number of batches of images or sound that are collated because their estimated sizes may be the largest."""

_MUCH_LARGER: Final = 1.1
"""A worst batch that is this many times as large as the typical one is traced in addition to it."""

_LARGER: Final = 1.02  # a batch with this many times the tokens, or pixels, of the worst may be the worst, too

Batch = Any


@dataclass(frozen=True, slots=True)
class ChosenBatches:
    """Batches of a data loader.

    Attributes:
        mean: for "typical" and "worst" the mean tokens of a batch divided by that batch's tokens: (with padding,
            without). "worst" is missing if there are `others`.
        padding: average share of padding in a batch if rows are padded to the longest, in batches of two for a loader
            with single rows. None, and `mean` empty: sizes are not tokens.
    """

    worst: Batch  # of those that the sampler can form, the one that needs most memory
    description: str  # which rows were read, and the shape of the worst batch
    rows: int = 0  # of the worst batch; 0: unknown
    typical: Batch | None = None  # the median batch; None: sizes of rows are unknown
    high: Batch | None = None  # the 95th percentile; None: sizes of rows are unknown
    half: Batch | None = None  # the worst batch with half of its rows; None: not possible
    cut: tuple[Batch, int] | None = None  # (rows cut to the 95th percentile of tokens, that length), if possible
    unreadable: tuple[int, str] | None = None  # a row that cannot be read, and the error
    others: Sequence[Batch] = ()  # batches that may need most, too: more tokens than `worst`, or larger images
    shuffled: bool = False  # whether the sampler can combine any rows
    digest: str = ""  # of the sizes of all rows; empty: not all were read
    mean: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    padding: float | None = None


def chosen_batches(loader: Any) -> ChosenBatches:
    """Chooses the worst and a typical batch of a data loader. Raises Unmodelled if the loader yields no batch."""
    dataset, collate = getattr(loader, "dataset", None), getattr(loader, "collate_fn", None)
    sampler: Any = getattr(loader, "batch_sampler", None)
    while hasattr(sampler, "batch_sampler"):  # accelerate's wrapper for ranks
        sampler = sampler.batch_sampler
    size = int(getattr(loader, "batch_size", None) or getattr(sampler, "batch_size", None) or 0)
    why = "its rows are unknown"
    if dataset is not None and collate is not None and (size or sampler is not None):
        try:
            return _choose(dataset, collate, sampler, size)
        except Exception as error:  # rows cannot be combined by index, such as those of a custom sampler
            why = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"
    worst = max(first_batches(loader, 2), key=elements)
    return ChosenBatches(
        worst, f"the larger of the first 2 batches of the script's own data loader ({why}): {shape_of(worst)}"
    )


def lengths_of_batches(loader: Any, columns: Sequence[str]) -> BatchLengths:
    """Lengths of these columns in the chosen batches."""
    chosen = chosen_batches(on_host(loader))

    def lengths(batch: Batch) -> dict[str, int]:
        return {name: int(batch[name].shape[1]) for name in columns}

    shapes = shapes_of(chosen, lambda batch: {name: batch[name] for name in columns})
    return BatchLengths(
        worst=lengths(chosen.worst),
        typical=lengths(chosen.typical) if shapes is not None else None,
        half=lengths(chosen.half) if chosen.half is not None else None,
        cut=lengths(chosen.cut[0]) if chosen.cut is not None else None,
        rows=chosen.rows,
        description=chosen.description,
        shapes=shapes,
    )


def shapes_of(chosen: ChosenBatches, part: Callable[[Batch], Batch] = lambda batch: batch) -> BatchShapes | None:
    """The worst, typical and high batch in words; None if similar in size. `part` selects what of a batch counts."""
    if chosen.typical is None:
        return None
    worst, typical = part(chosen.worst), part(chosen.typical)
    if not _exceeds(size_of(worst), size_of(typical), _MUCH_LARGER):
        return None
    grouping = chosen.shuffled and shape_of(worst).endswith(" tokens")
    shapes = distinct_shapes([worst, typical, part(chosen.high)])
    return BatchShapes(shapes[0], shapes[1], shapes[2], grouping)


def _choose(dataset: Any, collate: Any, sampler: Any, size: int) -> ChosenBatches:
    data = row_sizes(dataset)
    if not data.read:
        raise LookupError(f"no row can be read: {data.unreadable}")
    rows = _Rows(dataset, collate, data)
    shuffled = data.rows is not None and _shuffles(sampler)

    # Rows that may be the largest are collated alone, because only the collator knows the size of some.
    sizes_are_final = data.marks is None and not data.characters
    largest_rows = _largest_rows(data, size) if shuffled or not sizes_are_final else []
    collated, failed = _collate_singly(largest_rows, rows.collate, _CANDIDATES_S)
    sizes = data.sizes
    if data.marks is not None:
        sizes, sampled = _sample_sizes(data, size, rows.collate)
        collated |= sampled
    longest = [int(column.argmax()) for column in data.columns]  # of each column, which a collator pads separately
    if shuffled:
        formed = _form_shuffled(sizes, collated, longest, largest_rows, min(size, data.read))  # a row is drawn once
    else:
        formed = _form_in_order(data, sampler, collated, size)
    sizes = formed.sizes

    # The worst is the largest after collating.
    measured = {index: size_of(rows.collate(batch)) for index, batch in enumerate(formed.candidates)}
    scores = _scores(measured)
    worst_index = max(measured, key=scores.__getitem__)
    worst = rows.collate(formed.candidates[worst_index])
    most_tokens = max(measured, key=measured.__getitem__)
    most_media = max(measured, key=lambda index: measured[index][1])
    others = [
        rows.collate(formed.candidates[index])
        for index in sorted({most_tokens, most_media})
        if _exceeds(measured[index], measured[worst_index], _LARGER)
    ]
    alone = _scores(collated)

    def importance(row: int) -> tuple[bool, float, int]:
        return row in longest, alone.get(row, 0.0), int(data.sizes[row])

    worst_rows = sorted(formed.candidates[worst_index], key=importance, reverse=True)

    tokens_of = _unpadded if len(worst_rows) > 1 and _is_concatenated(worst) else _padded
    batches = sorted(formed.batches, key=lambda batch: tokens_of(batch, sizes))
    typical_rows = batches[int(0.5 * (len(batches) - 1))]
    high_rows = batches[int(0.95 * (len(batches) - 1))]
    mean: dict[str, tuple[float, float]] = {}
    padding = None
    all_known = shuffled or data.read == len(data.sizes)  # else batches contain rows of unknown size
    if sizes_are_final and all_known:
        mean["typical"] = _relative_mean(batches, typical_rows, sizes, tokens_of)
        if not others:
            mean["worst"] = _relative_mean(batches, worst_rows, sizes, tokens_of)
        several = batches if len(typical_rows) > 1 else _draw_batches(sizes, 2)
        padded = sum(_padded(batch, sizes) for batch in several)
        padding = 1 - sum(_unpadded(batch, sizes) for batch in several) / max(1, padded)

    half = cut = None
    if len(worst_rows) % 2 == 0:
        half = _if_possible(rows.collate, worst_rows[: len(worst_rows) // 2])
    if data.marks is None:  # cutting a row with an image would remove the tokens of the image
        read = np.flatnonzero(data.sizes >= 0)
        long_row = int(read[np.argsort(data.sizes[read])[int(0.95 * (len(read) - 1))]])
        cut = _if_possible(_cut, rows.read(worst_rows), rows.read([long_row]), collate)
    return ChosenBatches(
        worst=worst,
        description=_description(data, worst_rows[0], worst, others),
        rows=len(worst_rows),
        typical=rows.collate(typical_rows),
        high=rows.collate(high_rows),
        half=half,
        cut=cut,
        unreadable=data.unreadable or failed,
        others=others,
        shuffled=shuffled,
        digest=hashlib.sha256(data.sizes.tobytes()).hexdigest() if data.read == data.rows else "",
        mean=mean,
        padding=padding,
    )


class _Rows:
    """Reads and collates rows of a data set by their numbers."""

    def __init__(self, dataset: Any, collate: Any, data: RowSizes) -> None:
        self._source = dataset if data.rows is not None else data.kept
        self._collate = collate

    def read(self, numbers: Sequence[int]) -> list[Any]:
        # Copies, because some collators delete columns in place (TRL's the image), and the next batch needs them.
        rows = [self._source[number] for number in numbers]
        return [dict(row) if type(row) is dict else row for row in rows]

    def collate(self, numbers: Sequence[int]) -> Batch:
        return self._collate(self.read(numbers))


def _shuffles(sampler: Any) -> bool:
    """Whether the sampler can combine any rows in a batch."""
    if type(sampler) is not BatchSampler:
        return False
    inner: Any = sampler.sampler
    return isinstance(inner, RandomSampler) or bool(getattr(inner, "shuffle", False))


def _is_concatenated(batch: Batch) -> bool:
    """Whether a collator joined all rows to one."""
    ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
    return isinstance(ids, torch.Tensor) and ids.dim() == 2 and ids.shape[0] == 1


def _relative_mean(
    batches: Sequence[list[int]], one: Sequence[int], sizes: Numbers, tokens_of: Callable[..., int]
) -> tuple[float, float]:
    """Mean tokens of the batches divided by those of one batch: (as the collator makes them, without padding)."""
    mean = sum(tokens_of(batch, sizes) for batch in batches) / len(batches)
    unpadded_mean = sum(_unpadded(batch, sizes) for batch in batches) / len(batches)
    return mean / max(1, tokens_of(one, sizes)), unpadded_mean / max(1, _unpadded(one, sizes))


def _if_possible(make: Callable[..., Any], *arguments: Any) -> Any:
    """The result of `make`; None if the script's collator refuses such rows."""
    try:
        return make(*arguments)
    except Exception:
        return None


def _description(data: RowSizes, longest: int, worst: Batch, others: Sequence[Batch]) -> str:
    if data.rows is None:
        part = f"the first {data.read:,} rows of the stream"
    elif data.read < data.rows:
        part = f"{'' if data.unreadable else 'a sample of '}{data.read:,} of {data.rows:,} rows"
    else:
        part = f"{data.rows:,} rows"
    more = "".join(f"; traced too, because it may need more: {shape_of(batch)}" for batch in others)
    return f"the largest batch that {part} can give: {shape_of(worst)}; its largest is row {longest:,}{more}"


def _cut(rows: Sequence[Any], shorter: Sequence[Any], collate: Any) -> tuple[Batch, int] | None:
    """The batch with rows cut to the longest of `shorter`, and that length."""
    if not all(isinstance(row, Mapping) and hasattr(row.get("input_ids"), "__len__") for row in (*rows, *shorter)):
        return None
    maximum = max(len(row["input_ids"]) for row in shorter)
    if maximum in (0, max(len(row["input_ids"]) for row in rows)):
        return None

    def cut(row: Mapping[str, Any]) -> dict[str, Any]:
        length = len(row["input_ids"])
        parts = {name: value for name, value in row.items() if hasattr(value, "__len__") and len(value) == length}
        return {**row, **{name: value[:maximum] for name, value in parts.items() if not isinstance(value, str)}}

    return collate([cut(row) for row in rows]), maximum


def first_batches(loader: Any, count: int) -> list[Batch]:
    """The first batches of the loader; a shorter loader is repeated. Raises Unmodelled if it yields none."""
    batches = list(itertools.islice(itertools.chain.from_iterable(itertools.repeat(loader, count)), count))
    if not batches:
        raise Unmodelled("the data loader gives no batch; check the data set, the sampler and dataloader_drop_last")
    return batches


def _exceeds(size: Size, other: Size, factor: float) -> bool:
    return any(more > factor * less for more, less in zip(size, other, strict=True))


def without_padding(batch: Batch) -> Batch | None:
    """The same rows concatenated, as by transformers' `DataCollatorWithFlattening` and TRL's `padding_free`; None if
    the batch has other columns or little padding."""
    if not isinstance(batch, Mapping) or set(batch) != {"input_ids", "attention_mask", "labels"}:
        return None
    ids, mask, labels = (batch[name] for name in ("input_ids", "attention_mask", "labels"))
    if ids.dim() != 2 or not ids.shape == mask.shape == labels.shape:
        return None
    text = mask.bool()
    if ids.numel() <= _MUCH_LARGER * int(text.sum()):
        return None
    rows = [{"input_ids": ids[row][kept], "labels": labels[row][kept]} for row, kept in enumerate(text) if kept.any()]
    return dict(DataCollatorWithFlattening()(rows))


# ---- batches that a sampler can form ----


@dataclass(frozen=True, slots=True)
class _FormedBatches:
    """Batches that a sampler can form, each as the numbers of its rows."""

    candidates: list[list[int]]  # may need most memory
    batches: list[list[int]]  # all of a pass, or random ones
    sizes: Numbers  # of the rows, measured or estimated


def _form_shuffled(
    sizes: Numbers, collated: Mapping[int, Size], longest: Sequence[int], largest_rows: Sequence[int], size: int
) -> _FormedBatches:
    """Batches of a sampler that can combine any rows."""
    candidates = _combine_largest(collated, size) or [_repeat_to(size, largest_rows)]
    candidates += [_repeat_to(size, list(dict.fromkeys([row, *longest, *largest_rows]))) for row in longest]
    return _FormedBatches(candidates, _draw_batches(sizes, size), sizes)


def _form_in_order(data: RowSizes, sampler: Any, collated: Mapping[int, Size], size: int) -> _FormedBatches:
    """Batches of any other sampler, or of a stream, as they are formed."""
    sizes, marks = _all_marks(data, collated)
    if data.rows is not None:
        passes = _passes(sampler)
    else:
        starts = range(0, data.read, size)
        passes = iter([[list(range(start, min(start + size, data.read))) for start in starts]])
    batches = candidates = next(passes)
    for formed in passes:
        candidates = [*_largest_batches(candidates, marks), *formed]
    largest = _largest_batches(candidates, marks)
    if data.marks is not None and collated:
        largest += heapq.nlargest(_COLLATED, candidates, key=lambda batch: int(sizes[batch].sum()))
    return _FormedBatches([list(batch) for batch in dict.fromkeys(map(tuple, largest))], batches, sizes)


def _draw_batches(sizes: Numbers, size: int) -> list[list[int]]:
    """Random batches of `size` rows."""
    read = np.flatnonzero(sizes >= 0)
    random = np.random.default_rng(0)
    return [random.choice(read, size, replace=len(read) < size).tolist() for _ in range(_DRAWS)]


def _passes(sampler: Any) -> Iterator[list[list[int]]]:
    """Batches of a sampler that does not shuffle all rows, pass by pass while they differ. A pass may be endless."""
    until = time.monotonic() + _PASSES_S
    before: list[list[int]] | None = None
    count = 0
    for number in itertools.count():
        if number >= _ENOUGH_PASSES and count >= _ENOUGH_BATCHES:
            return
        in_time = itertools.takewhile(lambda _: time.monotonic() < until, sampler)
        formed = [[int(number) for number in numbers] for numbers in in_time]
        if not formed or formed == before:
            return
        yield formed
        before, count = formed, count + len(formed)


def _largest_rows(data: RowSizes, size: int) -> list[int]:
    """Numbers of the rows that may be the largest."""
    count = max(_CANDIDATES, 2 * size)
    if data.marks is None:
        order: list[int] = np.argsort(-data.sizes, kind="stable")[:count].tolist()
        return order
    read = np.flatnonzero(data.sizes >= 0)
    text, *others = (mark[read] for mark in data.marks)
    fronts = itertools.zip_longest(*(_fronts(text, mark) for mark in others if mark.any()), fillvalue=())
    chosen: dict[int, None] = {}
    for front in itertools.chain.from_iterable(fronts):
        chosen |= dict.fromkeys(read[list(front)].tolist())
        if len(chosen) >= 2 * count:
            break
    return list(chosen)


def _fronts(values: Numbers, others: Numbers) -> Iterator[list[int]]:
    """Indices of the rows that no other row exceeds in both values (the Pareto front), then those of the rest, and so
    on. Any size that grows with both values is largest in the first front."""
    order = np.lexsort((-values, -others))
    while len(order):
        before = np.concatenate([[-1], np.maximum.accumulate(values[order])[:-1]])
        in_front = values[order] > before
        yield order[in_front].tolist()
        order = order[~in_front]


def _collate_singly(
    numbers: Iterable[int], make: Callable[[Sequence[int]], Batch], limit_s: float
) -> tuple[dict[int, Size], tuple[int, str] | None]:
    """Collates each row alone within the time limit; returns the sizes, and a row that failed with its error."""
    until = time.monotonic() + limit_s
    sizes: dict[int, Size] = {}
    failed = None
    for number in numbers:
        for rows in ([number], [number, number]):  # a collator may need at least two rows
            try:
                sizes[number] = size_of(make(rows))
                break
            except Exception as error:
                why = f"{type(error).__name__}: {error}"
        else:
            failed = failed or (number, why)
        if time.monotonic() > until:
            break
    return sizes, failed if sizes else None


def _sample_sizes(
    data: RowSizes, size: int, make: Callable[[Sequence[int]], Batch]
) -> tuple[Numbers, dict[int, Size]]:
    """Sizes of random rows after collating, -1 for the others, as one number and as `Size`."""
    rows = np.random.default_rng(0).permutation(np.flatnonzero(data.sizes >= 0))[: max(_CANDIDATES, 2 * size)]
    collated, _ = _collate_singly(rows.tolist(), make, _RANDOM_S)
    if not collated:
        return data.sizes, collated
    sizes = np.full(len(data.sizes), -1, np.int64)
    for number, score in _scores(collated).items():
        sizes[number] = round(1e6 * score)
    return sizes, collated


def _scores(sizes: Mapping[int, Size]) -> dict[int, float]:
    """Tokens relative to their maximum plus image and sound data relative to its maximum."""
    largest = [max(1, *column) for column in zip(*sizes.values(), strict=True)]
    return {key: size[0] / largest[0] + size[1] / largest[1] for key, size in sizes.items()}


def _combine_largest(sizes: Mapping[int, Size], count: int) -> list[list[int]]:
    """Batches that may need most: rows with most tokens, to which others are padded; the row with most tokens and the
    rows with the largest images; the rows with the largest images."""
    by_tokens = sorted(sizes, key=lambda number: sizes[number], reverse=True)
    by_media = sorted(sizes, key=lambda number: sizes[number][::-1], reverse=True)
    mixed = [*by_tokens[:1], *(number for number in by_media if number != by_tokens[0])]
    picked = dict.fromkeys(tuple(_repeat_to(count, rows)) for rows in (by_tokens, mixed, by_media) if rows)
    return [list(rows) for rows in picked]


def _repeat_to(size: int, numbers: Sequence[int]) -> list[int]:
    """The first `size` numbers, repeated if there are fewer."""
    return list(itertools.islice(itertools.cycle(numbers[:size]), size))


def _all_marks(data: RowSizes, collated: Mapping[int, Size]) -> tuple[Numbers, list[Numbers]]:
    """Sizes of all rows, estimated if only the collator knows them, and all values by which a batch may be the
    largest: a large image may become no more tokens than one with fewer pixels."""
    known = np.zeros((2, len(data.sizes)), np.int64)
    for number, size in collated.items():
        known[:, number] = size
    if data.marks is None or not collated:
        return data.sizes, [data.sizes, *known[:1], *data.columns]
    media = data.marks[1]
    order = sorted(collated, key=lambda number: int(media[number]))
    sizes = np.interp(media, media[order], known[1, order]).astype(np.int64)
    return sizes, [sizes, *known, data.sizes, *data.marks]


def _padded(numbers: Sequence[int], sizes: Numbers) -> int:
    return len(numbers) * int(sizes[list(numbers)].max())


def _unpadded(numbers: Sequence[int], sizes: Numbers) -> int:
    return int(sizes[list(numbers)].sum())


def longest_row(batch: Batch) -> int | None:
    """Tokens of the longest row of a padded batch; None if it has no ids."""
    ids, mask = (batch.get(name) if isinstance(batch, Mapping) else None for name in ("input_ids", "attention_mask"))
    if not isinstance(ids, torch.Tensor) or ids.dim() != 2:
        return None
    if isinstance(mask, torch.Tensor) and mask.shape == ids.shape:
        return int(mask.sum(-1).max())
    return int(ids.shape[-1])


def _largest_batches(batches: Sequence[list[int]], marks: Sequence[Numbers]) -> list[list[int]]:
    """The batches that may need most: for each mark the largest with padding and the largest without."""
    largest = []
    for mark in marks:
        largest.append(max(batches, key=lambda rows: _padded(rows, mark)))
        largest.append(max(batches, key=lambda rows: int(mark[rows].sum())))
    return [list(rows) for rows in dict.fromkeys(map(tuple, largest))]
