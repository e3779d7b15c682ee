"""A user's rows → the batches that their Trainer would make of them, in a file for the child process.

Rows are collated here, by the user's own collator, so that padding, labels and dtypes are theirs. Of a data set the
longest rows are taken among those that were looked at: memory is decided by the longest batch.
"""

from __future__ import annotations

import inspect
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from hf_memkit.errors import InputError

__all__ = ["KEPT_ELEMENTS", "UserBatches", "batches_of_example", "batches_of_rows", "signature_columns"]

_MOST_ROWS: Final = 1_000
_MOST_SECONDS: Final = 5.0
"""How many rows are looked at, and for how long: reading one may decode an image."""

KEPT_ELEMENTS: Final = 2**20
"""Whole numbers keep their values up to this size (`child/constant_propagation.py` follows them no further)."""

Row = Mapping[str, Any]
Collator = Callable[[list[Any]], Any]


@dataclass(frozen=True, slots=True)
class UserBatches:
    """What a training and its evaluation are fed.

    Attributes:
        train, evaluate: as the collator makes them; large tensors and fractions without values, on the meta device.
        length: tokens of a row, as the first forward pass sees it; 1 where rows are no sequences.
        note: where they come from.
    """

    train: Any
    evaluate: Any
    length: int
    note: str

    def write(self, path: Path) -> None:
        import torch

        torch.save({"train": self.train, "evaluate": self.evaluate}, path)


def batches_of_example(
    example: Mapping[str, Any], collator: Collator | None, *, train_size: int, evaluate_size: int
) -> UserBatches:
    """Batches of copies of one row.

    Args:
        example: name → a tensor, array, (nested) list or number, or `(shape, dtype)` such as
            `((3, 224, 224), "float32")`; without the dimension of the batch.
        collator: as Trainer's `data_collator`; None: rows are stacked.
        train_size, evaluate_size: rows in a batch.

    Raises:
        InputError: a value is neither, or the collator does not take it.
    """
    if not isinstance(example, Mapping) or not example:
        raise InputError(
            "example: must be one row as a dict, such as {'x': ((3, 224, 224), 'float32'), 'labels': 0}, "
            f"and is {'empty' if isinstance(example, Mapping) else type(example).__name__}"
        )
    row = {name: _value(name, given) for name, given in example.items()}
    train, evaluate = (_collated(collator, [dict(row) for _ in range(size)]) for size in (train_size, evaluate_size))
    return UserBatches(_thin(train), _thin(evaluate), _length(train), "every row is your example")


def batches_of_rows(
    dataset: Any, collator: Collator | None, columns: Sequence[str] | None, *, train_size: int, evaluate_size: int
) -> UserBatches:
    """Batches of the longest rows of a data set.

    Args:
        dataset: as Trainer's `train_dataset`: rows by number, or one after another.
        collator: as Trainer's `data_collator`; None: rows are stacked.
        columns: of a row that is a dict, what the collator gets; None: all but texts.
        train_size, evaluate_size: rows in a batch.

    Raises:
        InputError: there is no row, or the collator does not take them.
    """
    rows: list[Any] = []
    try:
        rows.extend(_first_rows(dataset))
    except Exception as error:
        raise InputError(f"train_dataset: reading its row {len(rows)} failed: {_first_line(error)}") from error
    if not rows:
        raise InputError("train_dataset: has no row")
    lengths = [_row_length(row) for row in rows]
    order = sorted(range(len(rows)), key=lambda number: lengths[number], reverse=True)
    longest = [_columns(rows[number], columns) for number in order]
    batches = [
        _collated(collator, list(itertools.islice(itertools.cycle(longest[:size]), size)))
        for size in (train_size, evaluate_size)
    ]
    note = f"a batch of the longest of {len(rows)} rows of train_dataset"
    if lengths[order[0]]:
        note += f", which have {min(lengths)} to {max(lengths)} tokens"
    return UserBatches(_thin(batches[0]), _thin(batches[1]), _length(batches[0]), note)


def signature_columns(forward: Callable[..., Any]) -> list[str]:
    """The columns that Trainer keeps of a row (transformers 5.23.0: `Trainer._set_signature_columns_if_needed`)."""
    return [*inspect.signature(forward).parameters, "label", "label_ids"]


def _first_rows(dataset: Any) -> Iterator[Any]:
    """The first rows of a data set, by number or one after another, as far as time allows."""
    until = time.monotonic() + _MOST_SECONDS
    by_number = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    rows = (dataset[number] for number in range(len(dataset))) if by_number else iter(dataset)
    for row in itertools.islice(rows, _MOST_ROWS):
        yield row
        if time.monotonic() > until:
            return


def _columns(row: Any, columns: Sequence[str] | None) -> Any:
    if not isinstance(row, Mapping):
        return row
    if columns is None:
        return {name: value for name, value in row.items() if not isinstance(value, str)}
    return {name: value for name, value in row.items() if name in columns}


def _collated(collator: Collator | None, rows: list[Any]) -> Any:
    from transformers import default_data_collator

    try:
        batch = (collator or default_data_collator)(rows)
    except Exception as error:
        named = type(collator).__name__ if collator is not None else "default_data_collator"
        hint = "" if collator is not None else "; give data_collator, as you give it to Trainer"
        raise InputError(f"data_collator: {named} does not take these rows: {_first_line(error)}{hint}") from error
    return dict(batch) if isinstance(batch, Mapping) else batch


def _value(name: str, given: Any) -> Any:
    """A tensor or plain value of one row."""
    import torch

    if isinstance(given, tuple) and len(given) == 2 and isinstance(given[0], list | tuple):
        shape, dtype = given
        kind = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
        if isinstance(kind, torch.dtype):
            sizes = [size for size in shape if not isinstance(size, int) or isinstance(size, bool) or size < 1]
            if sizes:
                raise InputError(f"example[{name!r}]: {tuple(shape)} is no shape; write whole numbers above 0")
            # A mask of ones masks nothing; 0 is a label, and a token, of every model.
            return (torch.ones if "mask" in name else torch.zeros)(tuple(shape), dtype=kind)
        if isinstance(dtype, str):
            raise InputError(f"example[{name!r}]: torch has no dtype {dtype!r}; write float32 or int64, say")
    if isinstance(given, str) or given is None:
        raise InputError(
            f"example[{name!r}]={given!r}: must be a tensor, numbers, or (shape, dtype) such as ((128,), 'int64')"
        )
    return given


def _row_length(row: Any) -> int:
    """Tokens of a row; 0 where it is no sequence."""
    value: Any = row.get("input_ids") if isinstance(row, Mapping) else None
    return len(value) if hasattr(value, "__len__") else 0


def _length(batch: Any) -> int:
    import torch

    tokens = batch.get("input_ids") if isinstance(batch, Mapping) else None
    return int(tokens.shape[-1]) if isinstance(tokens, torch.Tensor) and tokens.dim() > 1 else 1


def _thin(batch: Any) -> Any:
    """The batch with the values of small tensors of whole numbers, and without all others."""
    import torch
    from torch.utils._pytree import tree_map

    def thin(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        whole = not value.is_floating_point() and not value.is_complex() and value.numel() <= KEPT_ELEMENTS
        return value.detach().cpu() if whole else torch.empty_like(value, device="meta")

    return tree_map(thin, batch)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[0][:200] or type(error).__name__
