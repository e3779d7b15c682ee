"""What the tasks of texts share: a checked text of a row, rows as tokens, and their checksum."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from hf_memkit.errors import DataError
from hf_memkit.models import hub_reachable
from hf_memkit.recipe.tables import RowTask, Table, cell
from hf_memkit.recipe.text_readers import name_of
from hf_memkit.recipe.tokenizer import Framing
from hf_memkit.setup import Setup

__all__ = ["as_tokens", "checked_text", "checksum", "tokenizer_for"]

_TOKENIZER_ROWS: Final = 20_000
"""Rows that a tokenizer is trained on, where one has to be."""

_BATCH: Final = 1000


def checked_text(task: RowTask, columns: Mapping[str, str], role: str, where: str, row: Mapping[str, Any]) -> str:
    """The text that has the role, as it stands there.

    Raises:
        DataError: no such column, no text in it, or an empty one.
    """
    value, column = cell(task, columns, role, where, row), columns[role]
    if column not in row:
        column = task.columns[role]
    if not isinstance(value, str):
        raise DataError(f"{where}: column {column!r}: expected text, found {name_of(value)}; such as {task.example}")
    if not value or value.isspace():
        raise DataError(f"{where}: column {column!r}: empty; expected text, such as {task.example}")
    try:
        value.isascii() or value.encode()
    except UnicodeEncodeError as error:  # "\ud800" is valid JSON and no character
        raise DataError(f"{where}: column {column!r}: half of a surrogate pair, which is no character") from error
    return value


def tokenizer_for(setup: Setup, table: Table, columns: Sequence[str], framing: Framing, say: Any) -> Any:
    """The model's own tokenizer, or one that is trained on the table's texts. It has a token for padding.

    Raises:
        DataError: it has more entries than the model.
    """
    from hf_memkit.recipe.data import Documents
    from hf_memkit.recipe.tokenizer import get_tokenizer

    data = setup.section("data")
    texts = [text for column in columns for text in table.rows[:_TOKENIZER_ROWS][column] if text]
    chosen = get_tokenizer(
        data["tokenizer"],
        Documents(texts, table.source, table.is_made_up, None),
        vocabulary_size=data["vocabulary_size"],
        allow_download=hub_reachable(),
        framing=framing,
    )
    say(f"Tokenizer: {chosen.reason}")
    return chosen.tokenizer


def as_tokens(rows: Any, encode: Callable[[Mapping[str, list[Any]]], Mapping[str, list[Any]]]) -> Any:
    """The `datasets.Dataset` that `encode` makes of batches of rows; nothing of the old columns stays."""
    from hf_memkit.recipe.sources import quiet_datasets

    with quiet_datasets():
        encode(rows[:1])  # a tokenizer's hash, by which `datasets` knows the result, changes at its first call
        return rows.map(encode, batched=True, batch_size=_BATCH, remove_columns=rows.column_names)


def checksum(rows: Any) -> str:
    """SHA-256 of the rows' names, lengths and numbers, however they lie in their files."""
    import pyarrow.compute as compute  # type: ignore[import-untyped, unused-ignore]

    digest = hashlib.sha256()
    for table in rows.with_format("arrow").iter(batch_size=_BATCH):
        for name in sorted(table.column_names):
            digest.update(name.encode())
            column = table.column(name)
            if hasattr(column.type, "value_type"):
                digest.update(compute.list_value_length(column).to_numpy().tobytes())
                column = compute.list_flatten(column)
            digest.update(column.to_numpy().tobytes())
    return digest.hexdigest()
