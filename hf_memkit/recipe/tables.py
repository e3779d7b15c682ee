"""A `--data` value in, a table of checked rows out: for tasks whose examples are rows of columns.

Tables are JSON lines, JSON arrays, CSV, TSV and parquet. A row is a dictionary; its place (`FILE:LINE`, or
`FILE: row N`) is what every message about it begins with. The task says what a row must hold (`RowTask.reader`) and
gets everything else from here: local files, the hub, and the rows that stand in where neither is there. Rows that were
read and found good are kept by `datasets` in its own cache, which knows local files by path, size and time of change;
nothing is written beside the user's files, and nothing is kept of a table with a mistake in it.
"""

from __future__ import annotations

import csv
import io
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Final, Protocol

from hf_memkit.errors import DataError
from hf_memkit.models import hub_reachable
from hf_memkit.recipe.sources import HubData, kept_files, load_hub, quiet_datasets, source_of
from hf_memkit.recipe.text_readers import LocalFiles, json_values, name_of, not_utf8, parquet_rows, whole_characters
from hf_memkit.recipe.tokenizer import Framing
from hf_memkit.setup import Setup

_ROWS_VERSION = 1
"""Raise it when a task makes other rows of the same files: what the cache holds is then read anew."""


Reader = Callable[[Mapping[str, str], str, Mapping[str, Any]], dict[str, Any]]
"""(role → the name of its column, the row's place, the row as it was read) → the columns that the task goes on with,
checked: a DataError begins with the place."""


class RowTask(Protocol):
    """What a task must have whose examples are rows."""

    name: ClassVar[str]
    columns: ClassVar[Mapping[str, str]]
    local_form: ClassVar[str]
    example: ClassVar[str]

    def reader(self) -> Reader:
        """What reads one table: a new one where a row must agree with those before."""

    def features(self) -> Any:
        """`datasets.Features` of what the reader gives."""

    def made_up(self) -> list[dict[str, Any]]:
        """Rows, as the reader gives them, for where there is no data: enough to rehearse on, made of what is here."""


@dataclass(frozen=True)
class Table:
    """`rows`: a `datasets.Dataset` with the task's features; `source`: what a person reads."""

    rows: Any
    source: str


def load_table(task: RowTask, setup: Setup) -> Table:
    """The rows that the setup's `data.source` names, or its default data set, or made-up ones where the hub cannot be
    reached.

    Raises:
        DataError: nothing there, nothing that can be read, a row that is not as the task wants it, or no row at all.
    """
    source, columns = source_of(setup), setup["data.columns"]
    if source is None:
        return _made_up(task)
    if isinstance(source, HubData):
        return _from_hub(task, source, columns)
    return _from_files(task, source, columns)


def hold_out(rows: Any, share: float) -> tuple[Any, Any]:
    """(to train on, held out): the last `share` of the rows, at least one, and at least one is left.

    Raises:
        DataError: there are fewer than two rows.
    """
    if len(rows) < 2:
        raise DataError(f"{len(rows)} example; the minimum is 2, one to train on and one to hold out. Give more data")
    count = min(max(1, round(share * len(rows))), len(rows) - 1)
    return rows.select(range(len(rows) - count)), rows.select(range(len(rows) - count, len(rows)))


def cell(task: RowTask, columns: Mapping[str, str], role: str, where: str, row: Mapping[str, Any]) -> Any:
    """The value of the column that has the role: the one that the recipe names, or the task's usual one.

    Raises:
        DataError: the row has no such column.
    """
    names = dict.fromkeys((columns[role], task.columns.get(role, columns[role])))
    column = next((name for name in names if name in row), None)
    if column is None:
        there = ", ".join(map(repr, row)) or "none"
        wanted = " or ".join(map(repr, names))
        raise DataError(f"{where}: no column {wanted}; columns here: {there}; expected {task.example}")
    return row[column]


def _named(row: Mapping[str, Any], classes: Mapping[str, list[str]]) -> dict[str, Any]:
    """`row` with the names of its classes in the place of their numbers; -1, no class, stays."""
    named = {key: names[row[key]] for key, names in classes.items() if row[key] is not None and row[key] >= 0}
    return {**row, **named}


def _made_up(task: RowTask) -> Table:
    import datasets

    rows = datasets.Dataset.from_list(task.made_up(), features=task.features())
    return Table(rows, "made-up examples, used because the hub is not reachable (--data trains on your own)")


def _from_files(task: RowTask, path: Path, columns: Mapping[str, str]) -> Table:
    files = find_tables(path, f"{task.local_form}, such as {task.example}")
    rows = kept_files(_rows, task.features(), files, task=task.name, columns=dict(columns), version=_ROWS_VERSION)
    return Table(rows, files.source)


def _rows(
    paths: tuple[str, ...], names: tuple[str, ...], kind: str, task: str, columns: Mapping[str, str], **stamps: object
) -> Iterator[dict[str, Any]]:
    """What `datasets` keeps. `stamps` only make its cache tell files apart."""
    from hf_memkit.recipe.tasks import find_task

    of_task: Any = find_task(task)
    reader, found = of_task.reader(), False
    for name in names:
        for where, row in read_rows(Path(name), kind):
            found = True
            yield reader(columns, where, row)
    if not found:
        raise DataError(f"{names[0]}: it has no rows; expected {of_task.local_form}, such as {of_task.example}")


def _from_hub(task: RowTask, wanted: HubData, columns: Mapping[str, str]) -> Table:
    import datasets

    found, name = load_hub(wanted, task.local_form), wanted.name
    classes = {key: one.names for key, one in found.features.items() if isinstance(one, datasets.ClassLabel)}

    reader = task.reader()

    def checked(row: Mapping[str, Any], number: int) -> Any:
        return reader(columns, f"{name}: row {number + 1}", _named(row, classes))

    with quiet_datasets():
        rows = found.map(checked, with_indices=True, remove_columns=found.column_names, features=task.features())
    return Table(rows, name if hub_reachable() else f"{name}, from this machine's cache")


_KINDS: Final = {
    ".json": "JSON", ".jsonl": "JSON", ".ndjson": "JSON", ".csv": "CSV", ".tsv": "TSV", ".parquet": "parquet",
}  # fmt: skip
TABLE_SUFFIXES: Final = frozenset(_KINDS)
_LONGEST_FIELD: Final = 2**24
"""Characters of one CSV field; Python's own limit of 131072 is below long documents."""


def find_tables(path: Path, expected: str) -> LocalFiles:
    """The tables of `path`: itself, or those in it if it is a folder.

    Args:
        path: an existing file or folder.
        expected: one line that says what data of this task looks like, for messages.

    Raises:
        DataError: no table, tables of several kinds, or one that cannot be read.
    """
    if not path.is_dir():
        kind = _KINDS.get(path.suffix.lower())
        if kind is None:
            raise DataError(f"{path}: not a table (it ends in {path.suffix!r}); expected {expected}")
        return LocalFiles(kind, (_readable(path),), str(path))
    files = sorted(file for file in path.iterdir() if file.is_file() and not file.name.startswith("."))
    tables = [file for file in files if file.suffix.lower() in _KINDS]
    if not tables:
        raise DataError(f"{path}: no table in this folder; expected {expected}")
    kinds = Counter(_KINDS[file.suffix.lower()] for file in tables)
    if len(kinds) > 1:
        listing = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
        raise DataError(f"{path}: mixed file types: {listing}. Give a folder with one type, or a single file")
    return LocalFiles(next(iter(kinds)), tuple(map(_readable, tables)), f"{path} ({len(tables)} files)")


def read_rows(path: Path, kind: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """(place, row) of every row; blank lines are passed over.

    Raises:
        DataError: the file is not what its kind says.
    """
    try:
        if kind == "JSON":
            yield from _json(path)
        elif kind == "parquet":
            yield from parquet_rows(path)
        else:
            yield from _csv(path, "\t" if kind == "TSV" else ",")
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error


def _readable(path: Path) -> Path:
    if not os.access(path, os.R_OK):
        raise DataError(f"{path}: cannot be read: Permission denied")
    return path


def _json(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    for where, row in json_values(path):
        if not isinstance(row, dict):
            raise DataError(f'{where}: expected an object such as {{"column": …}}, found {name_of(row)}')
        yield where, row


def _csv(path: Path, delimiter: str) -> Iterator[tuple[str, dict[str, Any]]]:
    content = path.read_bytes()
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise not_utf8(path, 1, error) from error
    csv.field_size_limit(_LONGEST_FIELD)
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    try:
        names = next(reader, None)
        if not names:
            raise DataError(f"{path}: empty; expected a first line with the names of the columns")
        if doubled := [name for name, count in Counter(names).items() if count > 1]:
            raise DataError(f"{path}:1: column {doubled[0]!r} appears twice. Keep one")
        line = reader.line_num + 1
        for values in reader:
            here, line = f"{path}:{line}", reader.line_num + 1
            if not values:
                continue
            if len(values) != len(names):
                raise DataError(
                    f"{here}: expected {len(names)} values ({', '.join(names)}), found {len(values)}; put one that "
                    f"has a {'tab' if delimiter != ',' else 'comma'} or a line end in it between double quotes"
                )
            yield here, dict(zip(names, values, strict=True))
    except csv.Error as error:
        raise DataError(f"{path}:{reader.line_num}: not {'TSV' if delimiter != ',' else 'CSV'}: {error}") from error


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
    return whole_characters(f"{where}: column {column!r}", value)


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
        Documents(texts, table.source),
        vocabulary_size=data["vocabulary_size"],
        allow_download=hub_reachable(),
        framing=framing,
    )
    say(f"Tokenizer: {chosen.reason}")
    return chosen.tokenizer


def as_tokens(
    rows: Any,
    encode: Callable[[Mapping[str, list[Any]]], Mapping[str, list[Any]]],
    limits: Mapping[str, tuple[str, int]],
    say: Callable[[str], None],
) -> Any:
    """The `datasets.Dataset` that `encode` makes of batches of rows; nothing of the old columns stays.

    `limits`: column → what its rows are, and the most tokens of one; rows that fill all of it are told.
    """
    import pyarrow.compute as compute  # type: ignore[import-untyped, unused-ignore]

    with quiet_datasets():
        encode(rows[:1])  # a tokenizer's hash, by which `datasets` knows the result, changes at its first call
        made = rows.map(encode, batched=True, batch_size=_BATCH, remove_columns=rows.column_names)
    for name, (what, limit) in limits.items():
        full = compute.sum(compute.equal(compute.list_value_length(made.data.column(name)), limit)).as_py()
        if full:
            say(f"Cut: {full} of {len(made)} {what} reach the maximum of {limit} tokens; what follows is cut")
    return made
