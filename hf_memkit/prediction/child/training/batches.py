"""Which batches the script's own sampler can form: the one that needs most, and a usual one, made by its collator.

Memory follows the largest batch, and the largest has the longest row: collators pad all rows of a batch to it. Of
images and sound only headers are read; what the processor makes of them is found out by collating alone the rows that
could be the largest, and some by chance. A batch of the most tokens need not be the one with the largest images, and
which of the two needs more is for the trace to say: both are chosen.
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
from hf_memkit.prediction.child.training.batch_shapes import shape_of, told_apart
from hf_memkit.prediction.child.training.row_sizes import Needs, Numbers, RowSizes, elements, needs, row_sizes
from hf_memkit.prediction.child.training.traced_batches import on_host
from hf_memkit.prediction.traced_training import BatchLengths, BatchShapes

_DRAWS: Final = 1_001
_PASSES: Final = 25
_FORMED: Final = 10_000
_PASSES_S: Final = 10.0
"""Of a sampler that does not let any rows meet, so many passes and batches, or as many as come in that time."""

_CANDIDATES: Final = 64
_CANDIDATES_S: Final = 10.0
"""Rows whose sizes only the collator knows are collated alone, the largest first."""

_BY_CHANCE_S: Final = 5.0
"""As many rows with images or sound, by chance: what a usual batch is."""

_TRIED: Final = 8
"""Batches of images or sound whose estimated sizes say that they may be the largest, and that are collated."""

_MUCH_LARGER: Final = 1.1
"""Times the usual batch: from here on both are traced."""

_MORE: Final = 1.02
"""Times as many tokens, or pixels: so much more makes another batch that may be the worst."""

Batch = Any


@dataclass(frozen=True, slots=True)
class Chosen:
    """Batches of a data loader.

    Attributes:
        worst: the one that needs most of those that the sampler can form.
        said: which rows were looked at, and what the worst batch is.
        rows: of the worst batch; 0: unknown.
        usual, high: the median batch, and the one that 95 of 100 do not exceed; None: the rows cannot be told apart.
        half, cut: the worst batch with half of its rows, and with rows cut to so many tokens, the most that 95 of 100
            rows have; None: there is no such batch.
        unreadable: a row that cannot be read, and why.
        others: more batches that may need most: they have more tokens than `worst` has, or larger images.
        shuffled: whether the sampler lets any rows meet.
        digest: of the sizes of all rows; empty: not all were read.
        mean: how many times the tokens of "usual" and of "worst" batches have on average: with padding, and without.
        padding: share of a batch that is padding, on average, if rows are padded to the longest of a batch, or of two
            where the loader gives one. None, and `mean` empty: sizes are no tokens.
    """

    worst: Batch
    said: str
    rows: int = 0
    usual: Batch | None = None
    high: Batch | None = None
    half: Batch | None = None
    cut: tuple[Batch, int] | None = None
    unreadable: tuple[int, str] | None = None
    others: Sequence[Batch] = ()
    shuffled: bool = False
    digest: str = ""
    mean: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    padding: float | None = None


def chosen_batches(loader: Any) -> Chosen:
    """The worst and a usual batch of a data loader.

    Raises:
        Unmodelled: it gives no batch.
    """
    dataset, collate = getattr(loader, "dataset", None), getattr(loader, "collate_fn", None)
    sampler: Any = getattr(loader, "batch_sampler", None)
    while hasattr(sampler, "batch_sampler"):  # accelerate wraps it for the ranks
        sampler = sampler.batch_sampler
    size = int(getattr(loader, "batch_size", None) or getattr(sampler, "batch_size", None) or 0)
    why = "its rows are unknown"
    if dataset is not None and collate is not None and (size or sampler is not None):
        try:
            return _chosen(dataset, collate, sampler, size)
        except Exception as error:  # rows that cannot be put together by number, such as those of a sampler's own kind
            why = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"
    worst = max(first_batches(loader, 2), key=elements)
    return Chosen(
        worst, f"the larger of the first 2 batches of the script's own data loader ({why}): {shape_of(worst)}"
    )


def lengths_of_batches(loader: Any, columns: Sequence[str]) -> BatchLengths:
    """Lengths of these columns in the batches that `chosen_batches` finds."""
    chosen = chosen_batches(on_host(loader))

    def of(batch: Batch) -> Batch:
        return {name: batch[name] for name in columns}

    def lengths(batch: Batch) -> dict[str, int]:
        return {name: int(batch[name].shape[1]) for name in columns}

    shapes = shapes_of(chosen, of)
    usual = chosen.usual if shapes is not None else None
    return BatchLengths(
        worst=lengths(chosen.worst),
        usual=lengths(usual) if usual is not None else None,
        half=lengths(chosen.half) if chosen.half is not None else None,
        cut=lengths(chosen.cut[0]) if chosen.cut is not None else None,
        rows=chosen.rows,
        said=chosen.said,
        shapes=shapes,
    )


def shapes_of(chosen: Chosen, of: Callable[[Batch], Batch] = lambda batch: batch) -> BatchShapes | None:
    """The worst, usual and high batch in words; `of`: the part of a batch that counts. None: they are about alike."""
    if chosen.usual is None or not _exceeds(needs(of(chosen.worst)), needs(of(chosen.usual)), _MUCH_LARGER):
        return None
    grouping = chosen.shuffled and shape_of(of(chosen.worst)).endswith(" tokens")
    worst, usual, high = told_apart([of(each) for each in (chosen.worst, chosen.usual, chosen.high)])
    return BatchShapes(worst, usual, high, grouping)


def _chosen(dataset: Any, collate: Any, sampler: Any, size: int) -> Chosen:
    found = row_sizes(dataset)
    if not found.read:
        raise LookupError(f"no row can be read: {found.unreadable}")

    def rows(numbers: Sequence[int]) -> list[Any]:
        # Copied: collators take out of rows what the next batch has to find there, such as TRL's an image.
        read = [dataset[number] if found.rows is not None else found.kept[number] for number in numbers]
        return [dict(row) if type(row) is dict else row for row in read]

    def made(numbers: Sequence[int]) -> Batch:
        return collate(rows(numbers))

    alone: dict[int, Needs] = {}
    failed = None
    shuffled = found.rows is not None and _is_shuffled(sampler)
    unknown = found.marks is not None or found.characters  # what the collator makes of a row
    first = _candidates(found, size) if shuffled or unknown else []
    if first:
        alone, failed = _alone(first, made, _CANDIDATES_S)
    sizes = found.sizes
    if found.marks is not None:
        sizes, more = _by_chance(found, size, made)
        alone |= more
    longest = [int(each.argmax()) for each in found.columns]  # of each column, which a collator pads by itself
    if shuffled:
        size = min(size, found.read)  # a row is drawn once
        candidates = _together(alone, size) or [_filled(first, size)]
        candidates += [_filled(list(dict.fromkeys([row, *longest, *first])), size) for row in longest]
        draws = _drawn(sizes, size)
    else:
        sizes, marks = _all_marks(found, alone)
        if found.rows is not None:
            passes = _passes(sampler)
        else:
            passes = iter([[list(range(at, min(at + size, found.read))) for at in range(0, found.read, size)]])
        draws = candidates = next(passes)
        for formed in passes:
            candidates = [*_largest(candidates, marks), *formed]
        images = found.marks is not None and alone
        tried = heapq.nlargest(_TRIED, candidates, key=lambda each: int(sizes[each].sum())) if images else []
        candidates = [list(each) for each in dict.fromkeys(map(tuple, [*_largest(candidates, marks), *tried]))]
    most = {at: needs(made(each)) for at, each in enumerate(candidates)}  # not all of them at once: they are large
    scores = _scores(most)
    chosen = max(most, key=scores.__getitem__)
    largest = {max(most, key=most.__getitem__), max(most, key=lambda at: most[at][1])}
    numbers = candidates[chosen]
    worst = made(numbers)
    others = [made(candidates[at]) for at in sorted(largest) if _exceeds(most[at], most[chosen], _MORE)]
    ranks = _scores(alone)
    rank = {number: (number not in longest, -ranks.get(number, 0.0), -int(found.sizes[number])) for number in numbers}
    numbers = sorted(numbers, key=rank.__getitem__)
    held = _behind if _is_flat(worst, len(numbers)) else _padded
    draws = sorted(draws, key=lambda each: held(each, sizes))
    usual, high = (draws[int(share * (len(draws) - 1))] for share in (0.5, 0.95))
    mean: dict[str, tuple[float, float]] = {}
    padding = None
    known = shuffled or found.read == len(found.sizes)  # else batches have rows of which nothing is known
    if found.marks is None and not found.characters and known:
        named = {"usual": usual, **({} if others else {"worst": numbers})}
        mean = {
            name: (_times(each, draws, sizes, held), _times(each, draws, sizes, _behind))
            for name, each in named.items()
        }
        several = draws if len(usual) > 1 else _drawn(sizes, 2)
        in_all = sum(_padded(each, sizes) for each in several)
        padding = 1 - sum(_behind(each, sizes) for each in several) / max(1, in_all)
    plain = found.marks is None  # a row that is cut loses the tokens that stand for its image
    read = np.flatnonzero(found.sizes >= 0)
    long = int(read[np.argsort(found.sizes[read])[int(0.95 * (len(read) - 1))]])
    return Chosen(
        worst,
        _said(found, numbers[0], worst, others),
        len(numbers),
        made(usual),
        made(high),
        _if_possible(made, numbers[: len(numbers) // 2]) if len(numbers) % 2 == 0 else None,
        _if_possible(_cut, rows(numbers), rows([long]), collate) if plain else None,
        found.unreadable or failed,
        others,
        shuffled,
        hashlib.sha256(found.sizes.tobytes()).hexdigest() if found.read == found.rows else "",
        mean,
        padding,
    )


def _if_possible(make: Callable[..., Any], *arguments: Any) -> Any:
    """None where the script's collator does not take such rows."""
    try:
        return make(*arguments)
    except Exception:
        return None


def _said(found: RowSizes, longest: int, worst: Batch, others: Sequence[Batch]) -> str:
    if found.rows is None:
        part = f"the first {found.read:,} rows of the stream"
    elif found.read < found.rows:
        part = f"{'' if found.unreadable else 'a sample of '}{found.read:,} of {found.rows:,} rows"
    else:
        part = f"{found.rows:,} rows"
    more = "".join(f"; traced too, because it may need more: {shape_of(each)}" for each in others)
    return f"the largest batch that {part} can give: {shape_of(worst)}; its largest is row {longest:,}{more}"


def _cut(rows: Sequence[Any], shorter: Sequence[Any], collate: Any) -> tuple[Batch, int] | None:
    """The batch with rows no longer than `shorter`, and that length."""
    if not all(isinstance(row, Mapping) and hasattr(row.get("input_ids"), "__len__") for row in (*rows, *shorter)):
        return None
    most = max(len(row["input_ids"]) for row in shorter)
    if most in (0, max(len(row["input_ids"]) for row in rows)):
        return None

    def cut(row: Mapping[str, Any]) -> dict[str, Any]:
        length = len(row["input_ids"])
        parts = {name: each for name, each in row.items() if hasattr(each, "__len__") and len(each) == length}
        return {**row, **{name: each[:most] for name, each in parts.items() if not isinstance(each, str)}}

    return collate([cut(row) for row in rows]), most


def first_batches(loader: Any, count: int) -> list[Batch]:
    """The first batches that the loader gives, from its begin again where it has fewer.

    Raises:
        Unmodelled: it gives none.
    """
    batches = list(itertools.islice(itertools.chain.from_iterable(itertools.repeat(loader, count)), count))
    if not batches:
        raise Unmodelled("the data loader gives no batch; check the data set, the sampler and dataloader_drop_last")
    return batches


def _exceeds(one: Needs, other: Needs, times: float) -> bool:
    return any(more > times * less for more, less in zip(one, other, strict=True))


def without_padding(batch: Batch) -> Batch | None:
    """The same rows behind one another, as transformers' `DataCollatorWithFlattening` and TRL's `padding_free` make
    them; None where it is no batch of texts and labels that are padded much."""
    if not isinstance(batch, Mapping) or set(batch) != {"input_ids", "attention_mask", "labels"}:
        return None
    ids, mask, labels = (batch[name] for name in ("input_ids", "attention_mask", "labels"))
    if ids.dim() != 2 or not ids.shape == mask.shape == labels.shape:
        return None
    there = mask.bool()
    if ids.numel() <= _MUCH_LARGER * int(there.sum()):
        return None
    rows = [{"input_ids": ids[row][own], "labels": labels[row][own]} for row, own in enumerate(there) if own.any()]
    return dict(DataCollatorWithFlattening()(rows))


# ---- what a sampler can form ----


def _is_shuffled(sampler: Any) -> bool:
    """Whether any rows may meet in a batch."""
    if sampler is None or type(sampler) is not BatchSampler:
        return False
    inner = sampler.sampler
    return isinstance(inner, RandomSampler) or bool(getattr(inner, "shuffle", False))


def _drawn(sizes: Numbers, size: int) -> list[list[int]]:
    """Batches by chance."""
    read = np.flatnonzero(sizes >= 0)
    random = np.random.default_rng(0)
    return [random.choice(read, size, replace=len(read) < size).tolist() for _ in range(_DRAWS)]


def _passes(sampler: Any) -> Iterator[list[list[int]]]:
    """Batches of a sampler that does not let any rows meet, pass by pass as long as they differ. It may have no
    end."""
    until = time.monotonic() + _PASSES_S
    before: list[list[int]] | None = None
    count = 0
    for number in itertools.count():
        if number >= _PASSES and count >= _FORMED:
            return
        in_time = itertools.takewhile(lambda _: time.monotonic() < until, sampler)
        formed = [[int(number) for number in numbers] for numbers in in_time]
        if not formed or formed == before:
            return
        yield formed
        before, count = formed, count + len(formed)


def _candidates(found: RowSizes, size: int) -> list[int]:
    """Numbers of the rows that may be the largest."""
    count = max(_CANDIDATES, 2 * size)
    if found.marks is None:
        order: list[int] = np.argsort(-found.sizes, kind="stable")[:count].tolist()
        return order
    read = np.flatnonzero(found.sizes >= 0)
    text, *others = (mark[read] for mark in found.marks)
    fronts = itertools.zip_longest(*(_fronts(text, mark) for mark in others if mark.any()), fillvalue=())
    chosen: dict[int, None] = {}
    for front in itertools.chain.from_iterable(fronts):
        chosen |= dict.fromkeys(read[list(front)].tolist())
        if len(chosen) >= 2 * count:
            break
    return list(chosen)


def _fronts(one: Numbers, other: Numbers) -> Iterator[list[int]]:
    """Places of the rows of which no other has more of both, then those of the rest, and so on: whatever grows with
    both is largest in the first."""
    order = np.lexsort((-one, -other))
    while len(order):
        before = np.concatenate([[-1], np.maximum.accumulate(one[order])[:-1]])
        in_front = one[order] > before
        yield order[in_front].tolist()
        order = order[~in_front]


def _alone(
    numbers: Iterable[int], made: Callable[[Sequence[int]], Batch], limit_s: float
) -> tuple[dict[int, Needs], tuple[int, str] | None]:
    """What the collator makes of each row, as long as time allows; and a row of which it makes nothing, and why."""
    until = time.monotonic() + limit_s
    found: dict[int, Needs] = {}
    failed = None
    for number in numbers:
        for rows in ([number], [number, number]):  # a collator may want two rows at least
            try:
                found[number] = needs(made(rows))
                break
            except Exception as error:
                why = f"{type(error).__name__}: {error}"
        else:
            failed = failed or (number, why)
        if time.monotonic() > until:
            break
    return found, failed if found else None


def _by_chance(found: RowSizes, size: int, made: Callable[[Sequence[int]], Batch]) -> tuple[Numbers, dict[int, Needs]]:
    """Sizes of some rows as the collator makes them, -1 for the others; and what those rows need."""
    rows = np.random.default_rng(0).permutation(np.flatnonzero(found.sizes >= 0))[: max(_CANDIDATES, 2 * size)]
    alone, _ = _alone(rows.tolist(), made, _BY_CHANCE_S)
    sizes = np.full(len(found.sizes), -1, np.int64)
    for number, score in _scores(alone).items():
        sizes[number] = round(1e6 * score)
    return (sizes if alone else found.sizes), alone


def _scores(several: Mapping[int, Needs]) -> dict[int, float]:
    """By how much each needs of the most tokens, and of the most images or sound."""
    most = [max(1, *column) for column in zip(*several.values(), strict=True)]
    return {key: each[0] / most[0] + each[1] / most[1] for key, each in several.items()}


def _together(alone: Mapping[int, Needs], size: int) -> list[list[int]]:
    """Rows that may need most together: of the most tokens, to which the others are padded; the one of the most with
    the largest images; the largest images."""
    by_tokens = sorted(alone, key=lambda number: alone[number], reverse=True)
    by_media = sorted(alone, key=lambda number: alone[number][::-1], reverse=True)
    mixed = [*by_tokens[:1], *(number for number in by_media if number != by_tokens[0])]
    picked = dict.fromkeys(tuple(_filled(each, size)) for each in (by_tokens, mixed, by_media) if each)
    return [list(each) for each in picked]


def _filled(numbers: Sequence[int], size: int) -> list[int]:
    """So many, from the first on again where there are fewer."""
    return list(itertools.islice(itertools.cycle(numbers[:size]), size))


def _all_marks(found: RowSizes, alone: Mapping[int, Needs]) -> tuple[Numbers, list[Numbers]]:
    """Sizes of the rows, estimated where only the collator knows them, and all by each of which another batch may be
    the largest: an image may have no more after it than one with fewer pixels."""
    known = np.zeros((2, len(found.sizes)), np.int64)
    for number, each in alone.items():
        known[:, number] = each
    if found.marks is None or not alone:
        return found.sizes, [found.sizes, *known[:1], *found.columns]
    media = found.marks[1]
    order = sorted(alone, key=lambda number: int(media[number]))
    sizes = np.interp(media, media[order], known[1, order]).astype(np.int64)
    return sizes, [sizes, *known, found.sizes, *found.marks]


def _padded(numbers: Sequence[int], sizes: Numbers) -> int:
    return len(numbers) * int(sizes[list(numbers)].max())


def _behind(numbers: Sequence[int], sizes: Numbers) -> int:
    """Of rows that lie behind one another."""
    return int(sizes[list(numbers)].sum())


def _times(
    one: Sequence[int], draws: Sequence[Sequence[int]], sizes: Numbers, held: Callable[[Sequence[int], Numbers], int]
) -> float:
    """How many times what `one` holds batches hold on average."""
    return sum(held(each, sizes) for each in draws) / len(draws) / max(1, held(one, sizes))


def longest_row(batch: Batch) -> int | None:
    """Tokens of the longest row of a padded batch; None: it has no ids."""
    ids, mask = (batch.get(name) if isinstance(batch, Mapping) else None for name in ("input_ids", "attention_mask"))
    if not isinstance(ids, torch.Tensor) or ids.dim() != 2:
        return None
    if isinstance(mask, torch.Tensor) and mask.shape == ids.shape:
        return int(mask.sum(-1).max())
    return int(ids.shape[-1])


def _is_flat(batch: Batch, rows: int) -> bool:
    """Whether the collator lays several rows behind one another."""
    ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
    return rows > 1 and isinstance(ids, torch.Tensor) and ids.dim() == 2 and ids.shape[0] == 1


def _largest(batches: Sequence[list[int]], marks: Sequence[Numbers]) -> list[list[int]]:
    """The batches that need most: by each mark one by its padded rows, and another if it has more without padding."""
    found = []
    for mark in marks:
        found.append(max(batches, key=lambda each: _padded(each, mark)))
        found.append(max(batches, key=lambda each: int(mark[each].sum())))
    return [list(each) for each in dict.fromkeys(map(tuple, found))]
