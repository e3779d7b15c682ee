"""Which batches the script's own sampler can form: the one that needs most, and a usual one.

In: a data loader. Out: batches as the script's collator makes them, real tensors on the host. Memory follows the
largest batch, and the largest has the longest row: collators pad all rows of a batch to it.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from torch.utils.data import BatchSampler, RandomSampler

from hf_memkit.errors import Unmodelled
from hf_memkit.prediction.child.row_sizes import RowSizes, elements, row_sizes

__all__ = ["Chosen", "chosen_batches", "first_batches", "shape_of"]

_DRAWS: Final = 1_001
_PASSES: Final = 25
_PASSES_S: Final = 10.0
_CANDIDATES: Final = 64
_CANDIDATES_S: Final = 10.0
"""Rows whose sizes only the collator knows are collated alone, the largest first."""

Batch = Any


@dataclass(frozen=True, slots=True)
class Chosen:
    """Batches of a data loader.

    Attributes:
        worst: the one that needs most of those that the sampler can form.
        said: which rows were looked at, and what the worst batch is.
        usual, high: the median batch, and the one that 95 of 100 do not exceed; None: the rows cannot be told apart.
        rows: of the worst batch; 0: unknown.
        half, cut: the worst batch with half of its rows, and with rows cut to so many tokens, the most that 95 of 100
            rows have; None: there is no such batch.
        unreadable: a row that cannot be read, and why.
    """

    worst: Batch
    said: str
    rows: int = 0
    usual: Batch | None = None
    high: Batch | None = None
    half: Batch | None = None
    cut: tuple[Batch, int] | None = None
    unreadable: tuple[int, str] | None = None


def chosen_batches(loader: Any) -> Chosen:
    """The worst and a usual batch of a data loader.

    Raises:
        Unmodelled: it gives no batch.
    """
    dataset, collate = getattr(loader, "dataset", None), getattr(loader, "collate_fn", None)
    sampler = _innermost(getattr(loader, "batch_sampler", None))
    size = int(getattr(loader, "batch_size", None) or getattr(sampler, "batch_size", None) or 0)
    why = "it does not tell its rows"
    if dataset is not None and collate is not None and (size or sampler is not None):
        try:
            return _chosen(dataset, collate, sampler, size)
        except Exception as error:  # rows that cannot be put together by number, such as those of a sampler's own kind
            why = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"
    worst = max(first_batches(loader, 2), key=elements)
    return Chosen(
        worst, f"the larger of the first 2 batches of the script's own data loader ({why}): {shape_of(worst)}"
    )


def _chosen(dataset: Any, collate: Any, sampler: Any, size: int) -> Chosen:
    found = row_sizes(dataset)
    if not found.read:
        raise LookupError(f"no row can be read: {found.unreadable}")

    def rows(numbers: Sequence[int]) -> list[Any]:
        return [dataset[number] if found.rows is not None else found.kept[number] for number in numbers]

    def made(numbers: Sequence[int]) -> Batch:
        return collate(rows(numbers))

    if found.rows is None:
        candidates = draws = [list(range(at, min(at + size, found.read))) for at in range(0, found.read, size)]
    elif _is_shuffled(sampler):
        ranked = _ranked(found, size, made)
        candidates = [list(itertools.islice(itertools.cycle(ranked[:size]), size))]
        draws = _drawn(found, size)
    else:
        passes = _passes(sampler)
        draws = candidates = next(passes)
        for formed in passes:
            candidates = _largest([*_largest(candidates, found.sizes), *formed], found.sizes)
    worst, numbers = max(((made(each), each) for each in _largest(candidates, found.sizes)), key=_elements_of_first)
    numbers = sorted(numbers, key=lambda number: -int(found.sizes[number]))
    draws = sorted(draws, key=lambda each: _padded(each, found.sizes))
    usual, high = (draws[int(share * (len(draws) - 1))] for share in (0.5, 0.95))
    return Chosen(
        worst,
        _said(found, numbers[0], worst),
        len(numbers),
        made(usual),
        made(high),
        _if_possible(made, numbers[: len(numbers) // 2]) if len(numbers) % 2 == 0 else None,
        _if_possible(_cut, rows(numbers), rows([_at(0.95, found)]), collate),
        found.unreadable,
    )


def _if_possible(make: Callable[..., Any], *arguments: Any) -> Any:
    """None where the script's collator does not take such rows."""
    try:
        return make(*arguments)
    except Exception:
        return None


def _elements_of_first(pair: tuple[Batch, list[int]]) -> int:
    return elements(pair[0])


def _said(found: RowSizes, longest: int, worst: Batch) -> str:
    if found.rows is None:
        part = f"the first {found.read:,} rows of the stream"
    elif found.read < found.rows:
        part = f"a sample of {found.read:,} of {found.rows:,} rows"
    else:
        part = f"{found.rows:,} rows"
    return f"the largest batch that {part} can give: {shape_of(worst)}; its largest is row {longest:,}"


def _at(share: float, found: RowSizes) -> int:
    """The row that so many others do not exceed."""
    read = np.flatnonzero(found.sizes >= 0)
    return int(read[np.argsort(found.sizes[read])[int(share * (len(read) - 1))]])


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
        raise Unmodelled("the data loader gives no batch")
    return batches


def shape_of(batch: Batch) -> str:
    """`"8 × 1024 tokens"`; of what is no text the largest tensor: `"8 × 3 × 224 × 224 pixel_values"`."""
    if not isinstance(batch, Mapping):
        batch = {"numbers": batch}
    tensors = {name: each for name, each in batch.items() if isinstance(each, torch.Tensor) and each.dim()}
    ids = {name: each for name, each in tensors.items() if name.endswith("input_ids")}
    if not tensors:
        return "a batch"
    name = max(ids or tensors, key=lambda each: tensors[each].numel())
    shape = " × ".join(f"{size:,}" for size in tensors[name].shape)
    return f"{shape} {'tokens' if ids else name}"


# ---- what a sampler can form ----


def _innermost(sampler: Any) -> Any:
    """Without what accelerate wraps around it for the ranks."""
    while hasattr(sampler, "batch_sampler"):
        sampler = sampler.batch_sampler
    return sampler


def _is_shuffled(sampler: Any) -> bool:
    """Whether any rows may meet in a batch."""
    if sampler is None or type(sampler) is not BatchSampler:
        return False
    inner = sampler.sampler
    return isinstance(inner, RandomSampler) or bool(getattr(inner, "shuffle", False))


def _drawn(found: RowSizes, size: int) -> list[list[int]]:
    """Batches by chance."""
    read = np.flatnonzero(found.sizes >= 0)
    random = np.random.default_rng(0)
    return [random.choice(read, min(size, len(read)), replace=False).tolist() for _ in range(_DRAWS)]


def _passes(sampler: Any) -> Iterator[list[list[int]]]:
    """Batches of a sampler that does not let any rows meet: of a pass, and of others as long as they differ. A sampler
    may have no end."""
    until = time.monotonic() + _PASSES_S
    before: list[list[int]] | None = None
    for _ in range(_PASSES):
        in_time = itertools.takewhile(lambda _: time.monotonic() < until, sampler)
        formed = [[int(number) for number in numbers] for numbers in in_time]
        if not formed or formed == before:
            return
        yield formed
        before = formed


def _ranked(found: RowSizes, size: int, made: Any) -> list[int]:
    """Numbers of the largest rows, the largest first. What the collator makes of each decides, among those that seem
    the largest."""
    order: list[int] = np.argsort(-found.sizes, kind="stable")[: max(_CANDIDATES, 2 * size)].tolist()
    until = time.monotonic() + _CANDIDATES_S
    alone: dict[int, int] = {}
    for number in order:
        try:
            alone[number] = elements(made([number]))
        except Exception:  # a collator that wants two rows at least
            return order
        if time.monotonic() > until:
            break
    return sorted(order, key=lambda number: -alone.get(number, 0))


def _padded(numbers: Sequence[int], sizes: Any) -> int:
    return len(numbers) * int(sizes[list(numbers)].max())


def _largest(batches: Sequence[list[int]], sizes: Any) -> list[list[int]]:
    """The batches that need most: one by its padded rows, and another if it has more without padding."""
    padded = max(batches, key=lambda each: _padded(each, sizes))
    whole = max(batches, key=lambda each: int(sizes[each].sum()))
    return [padded] if whole == padded else [padded, whole]
