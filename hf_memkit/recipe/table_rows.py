"""Local tables in, their rows out with the place of each: JSON lines, JSON arrays, CSV, TSV and parquet.

A row is a dictionary; its place (`FILE:LINE`, or `FILE: row N`) is what every message about it begins with.
"""

from __future__ import annotations

import codecs
import csv
import io
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from hf_memkit.errors import DataError
from hf_memkit.recipe.text_readers import in_one_line, name_of, not_utf8, parse_json

__all__ = ["TABLE_SUFFIXES", "TableFiles", "find_tables", "read_rows"]

_KINDS: Final = {
    ".json": "JSON", ".jsonl": "JSON", ".ndjson": "JSON", ".csv": "CSV", ".tsv": "TSV", ".parquet": "parquet",
}  # fmt: skip
TABLE_SUFFIXES: Final = frozenset(_KINDS)
_ROWS: Final = 256
_LONGEST_FIELD: Final = 2**24
"""Characters of one CSV field; Python's own limit of 131072 is below long documents."""


@dataclass(frozen=True)
class TableFiles:
    """Files of one kind (`JSON`, `CSV`, `TSV` or `parquet`), in the order in which they are read; `source` is what a
    person reads."""

    kind: str
    paths: tuple[Path, ...]
    source: str


def find_tables(path: Path, expected: str) -> TableFiles:
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
            raise DataError(f"{path}: is no table (it ends in {path.suffix!r}); expected {expected}")
        return TableFiles(kind, (_readable(path),), str(path))
    files = sorted(file for file in path.iterdir() if file.is_file() and not file.name.startswith("."))
    tables = [file for file in files if file.suffix.lower() in _KINDS]
    if not tables:
        raise DataError(f"{path}: no table in this folder; expected {expected}")
    kinds = Counter(_KINDS[file.suffix.lower()] for file in tables)
    if len(kinds) > 1:
        listing = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
        raise DataError(f"{path}: files of several kinds: {listing}; give a folder or a file of one kind")
    return TableFiles(next(iter(kinds)), tuple(map(_readable, tables)), f"{path} ({len(tables)} files)")


def read_rows(path: Path, kind: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """(place, row) of every row; blank lines are passed over.

    Raises:
        DataError: the file is not what its kind says.
    """
    try:
        if kind == "JSON":
            yield from _json(path)
        elif kind == "parquet":
            yield from _parquet(path)
        else:
            yield from _csv(path, "\t" if kind == "TSV" else ",")
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error


def _readable(path: Path) -> Path:
    if not os.access(path, os.R_OK):
        raise DataError(f"{path}: cannot be read: Permission denied")
    return path


def _json(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    with path.open("rb") as file:
        start = file.read(2**16).removeprefix(codecs.BOM_UTF8).lstrip()[:1]
        file.seek(0)
        if start == b"[":
            for number, row in enumerate(parse_json(path, 1, file.read()), 1):
                yield f"{path}: item {number}", _object(row, f"{path}: item {number}")
            return
        for number, line in enumerate(file, 1):
            if line.strip():
                yield f"{path}:{number}", _object(parse_json(path, number, line), f"{path}:{number}")


def _object(row: Any, where: str) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise DataError(f'{where}: expected an object such as {{"column": …}}, found {name_of(row)}')
    return row


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
            raise DataError(f"{path}:1: column {doubled[0]!r} stands there twice")
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
        raise DataError(f"{path}:{reader.line_num}: not CSV: {error}") from error


def _parquet(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    import pyarrow  # type: ignore[import-untyped, unused-ignore]
    import pyarrow.parquet  # type: ignore[import-untyped, unused-ignore]

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            rows = (row for batch in file.iter_batches(batch_size=_ROWS) for row in batch.to_pylist())
            for number, row in enumerate(rows, 1):
                yield f"{path}: row {number}", row
    except pyarrow.ArrowException as error:
        raise DataError(f"{path}: not a parquet file that can be read: {in_one_line(error)}") from error
