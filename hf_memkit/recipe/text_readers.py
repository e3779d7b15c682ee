"""Local files in, their texts out, one document at a time; the first mistake ends it with a line that names its place.

Before any is read, the file or folder that `--data` names is checked: that it can be, and that its files are of one
kind.

What one document is:

* text: a file. Its lines and paragraphs belong together, and the token that packing puts between documents would
  tear them apart. A file above `DOCUMENT_CHARACTERS` is cut there, at a blank line if there is one, so that memory
  stays bounded whatever the file's size.
* JSON: one object of a `.json`, `.jsonl` or `.ndjson` file, written a line each or as one array. Only the array
  is read as a whole.
* parquet: a row.
"""

from __future__ import annotations

import codecs
import io
import json
import os
import shlex
import stat
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_memkit.errors import DataError

DOCUMENT_CHARACTERS = 2**20
"""The longest document that a text file gives."""

_CHUNK_BYTES = 2**20
_ROWS = 256
_USUAL_COLUMNS = ("text", "content", "body", "document", "article", "story", "sentence")


def read_texts(paths: Iterable[Path], kind: str, text_column: str) -> Iterator[str]:
    """The documents of `paths`, one after the other; those that are only white space are left out.

    Raises:
        DataError: a file is not what its kind says, lacks `text_column`, or holds something else than text in it.
    """
    for path in paths:
        try:
            if kind == "text":
                texts = _read_text(path)
            elif kind == "JSON":
                texts = (_text_of(row, text_column, where) for where, row in json_values(path))
            else:
                texts = (_text_of(row, text_column, where) for where, row in parquet_rows(path, text_column))
            yield from (text for text in texts if text and not text.isspace())
        except OSError as error:
            raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error


def check_schema(where: str, schema: Any, column: str) -> None:
    """Raises DataError unless `schema` (a `pyarrow.Schema`) has a `column` of text."""
    if column not in schema.names:
        raise _missing_column(where, column, {field.name: 0 if _is_text(field.type) else -1 for field in schema})
    if not _is_text(schema.field(column).type):
        raise DataError(f"{where}: column {column!r}: expected text, found {schema.field(column).type}")


def in_one_line(error: BaseException) -> str:
    """What a library's error says, without the advice that libraries put below it on further lines."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:2])[:300] if lines else type(error).__name__


def _is_text(arrow_type: Any) -> bool:
    import pyarrow.types as types  # type: ignore[import-untyped, unused-ignore]

    if types.is_dictionary(arrow_type):
        arrow_type = arrow_type.value_type
    return bool(types.is_string(arrow_type) or types.is_large_string(arrow_type) or types.is_string_view(arrow_type))


def _missing_column(where: str, column: str, columns: Mapping[str, int]) -> DataError:
    """The error for a text column that is not there.

    `columns` holds every column that is there and the length of its text in characters: 0 if only its type is known to
    be text, -1 if it holds something else. The one that looks most like text is suggested.
    """
    texts = [name for name in columns if columns[name] >= 0]
    usual = [name for name in _USUAL_COLUMNS if name in texts]
    best = usual[0] if usual else max(texts, key=columns.__getitem__, default=None)
    there = ", ".join(map(repr, columns)) or "none"
    looks = f"; {best!r} looks like the text" if best else ""
    return DataError(
        f"{where}: no column {column!r}; columns here: {there}{looks}. Rename it to {column!r}, or set "
        f"data.text_column in a recipe's file of your own (memkit recipe NAME --copy mine.yaml)"
    )


def _read_text(path: Path) -> Iterator[str]:
    # utf-8-sig drops a byte order mark; \r\n and \r become \n, as Python's own text files do it.
    decoder = io.IncrementalNewlineDecoder(codecs.getincrementaldecoder("utf-8-sig")(), translate=True)
    line = 1
    rest = ""
    with path.open("rb") as file:
        while True:
            chunk = file.read(_CHUNK_BYTES)
            try:
                rest += decoder.decode(chunk, final=not chunk)
            except UnicodeDecodeError as error:
                raise not_utf8(path, line, error) from error
            if b"\0" in chunk:
                at = line + chunk.count(b"\n", 0, chunk.index(b"\0"))
                raise DataError(f"{path}:{at}: expected text, found a NUL byte: a binary file. Give a text file")
            line += chunk.count(b"\n")
            while len(rest) > DOCUMENT_CHARACTERS:
                cut = _end_of_document(rest)
                yield rest[:cut]
                rest = rest[cut:]
            if not chunk:
                yield rest
                return


def _end_of_document(text: str) -> int:
    for mark in ("\n\n", "\n", " "):
        at = text.rfind(mark, DOCUMENT_CHARACTERS // 2, DOCUMENT_CHARACTERS)
        if at >= 0:
            return at + len(mark)
    return DOCUMENT_CHARACTERS


def not_utf8(path: Path, line: int, error: UnicodeDecodeError) -> DataError:
    """The error for bytes that are no UTF-8. `line` is that of the first byte of `error.object`."""
    found = error.object
    if line == 1 and found.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        convert = f"iconv -f UTF-16 -t UTF-8 {shlex.quote(str(path))} > NEW_FILE"
        return DataError(f"{path}: expected UTF-8 text, found UTF-16; convert it: {convert}")
    at = line + found.count(b"\n", 0, error.start)
    return DataError(
        f"{path}:{at}: expected UTF-8 text, found the byte 0x{found[error.start]:02x}. "
        "Unpack the file if it is compressed, or convert it to UTF-8"
    )


def json_values(path: Path) -> Iterator[tuple[str, Any]]:
    """(place, value) of each line that is not blank, or of each item where the file is one array.

    Raises:
        DataError: it is no JSON.
    """
    with path.open("rb") as file:
        start = file.read(_CHUNK_BYTES).removeprefix(codecs.BOM_UTF8).lstrip()[:1]
        file.seek(0)
        if start == b"[":
            for number, value in enumerate(_parse_json(path, 1, file.read()), 1):
                yield f"{path}: item {number}", value
            return
        for number, line in enumerate(file, 1):
            if line.strip():
                yield f"{path}:{number}", _parse_json(path, number, line)


def _parse_json(path: Path, line: int, content: bytes) -> Any:
    """The value in `content`, which begins at `line` of the file.

    Raises:
        DataError: it is no JSON, or no UTF-8.
    """
    try:
        # Without the line end: a mistake at the end of a line is told of that line, not of the next.
        return json.loads(content.removeprefix(codecs.BOM_UTF8).decode("utf-8").rstrip())
    except UnicodeDecodeError as error:
        raise not_utf8(path, line, error) from error
    except json.JSONDecodeError as error:
        at = line + error.lineno - 1
        raise DataError(
            f"{path}:{at}: not JSON ({error.msg}, column {error.colno}); "
            "expected one object a line, or one array of objects"
        ) from error
    except RecursionError as error:
        raise DataError(f"{path}:{line}: JSON nested too deeply; write flat rows") from error


def _text_of(row: Any, column: str, where: str) -> str:
    if not isinstance(row, dict):
        raise DataError(f'{where}: expected an object such as {{"{column}": "…"}}, found {name_of(row)}')
    if column not in row:
        lengths = {name: len(value) if isinstance(value, str) else -1 for name, value in row.items()}
        raise _missing_column(where, column, lengths)
    text = row[column]
    if not isinstance(text, str):
        raise DataError(f"{where}: column {column!r}: expected text, found {name_of(text)}")
    return whole_characters(f"{where}: column {column!r}", text)


def whole_characters(where: str, text: str) -> str:
    """The text.

    Raises:
        DataError: there is half of a surrogate pair in it: `"\\ud800"` is valid JSON.
    """
    try:
        text.isascii() or text.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{where}: half of a surrogate pair, which is not a character. Remove it") from error
    return text


def name_of(value: Any) -> str:
    """What a value of JSON is called in a message."""
    if value is None:
        return "null"
    return "an array" if isinstance(value, list) else "an object" if isinstance(value, dict) else f"{value!r:.40}"


def parquet_rows(path: Path, column: str | None = None) -> Iterator[tuple[str, dict[str, Any]]]:
    """(place, row) of each row; of `column` only, which must then be one of text, if that is given.

    Raises:
        DataError: it is no parquet file, or its column is none of text.
    """
    import pyarrow  # type: ignore[import-untyped, unused-ignore]
    import pyarrow.parquet  # type: ignore[import-untyped, unused-ignore]

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            if column is not None:
                check_schema(str(path), file.schema_arrow, column)
            batches = file.iter_batches(batch_size=_ROWS, columns=None if column is None else [column])
            rows = (row for batch in batches for row in batch.to_pylist())
            for number, row in enumerate(rows, 1):
                yield f"{path}: row {number}", row
    except pyarrow.ArrowException as error:
        raise DataError(f"{path}: not a readable parquet file: {in_one_line(error)}") from error


_KINDS = {
    ".txt": "text", ".text": "text", ".md": "text", ".rst": "text",
    ".json": "JSON", ".jsonl": "JSON", ".ndjson": "JSON",
    ".parquet": "parquet",
}  # fmt: skip
_TABLES = (".csv", ".tsv")
DATA_SUFFIXES = frozenset({*_KINDS, *_TABLES})
"""How the names of data files end: a `--data` value that ends so is a path, never a hub ID."""


@dataclass(frozen=True)
class LocalFiles:
    """Files of one kind (`text`, `JSON`, `CSV`, `TSV` or `parquet`), in the order in which they are read."""

    kind: str
    paths: tuple[Path, ...]
    source: str
    """What a person reads: the path, and for a folder what was found in it."""


def find_text_files(path: Path) -> LocalFiles:
    """The files of `path`: itself, or all below it if it is a folder, sorted by path; links are followed.

    In a folder the names' endings decide, hidden files and folders are passed over, and `source` tells how many
    others are not read. A file named by itself may be called anything: it is text if its ending says nothing else.

    Raises:
        DataError: nothing usable, files of several kinds, a CSV file, not readable, not a regular file.
    """
    if not path.is_dir():
        if path.suffix.lower() in _TABLES:
            raise DataError(f"{path}: {path.suffix} files are not supported. Convert it to JSON lines or parquet")
        return LocalFiles(_KINDS.get(path.suffix.lower(), "text"), (_regular(path),), str(path))
    found = _files_below(path)
    usable = [file for file in found if file.suffix.lower() in _KINDS]
    others = _endings(file for file in found if file.suffix.lower() not in _KINDS)
    if not usable:
        inside = f"it has {others}" if others else "it is empty"
        raise DataError(f"{path}: no text in this folder ({inside}); expected files that end in {', '.join(_KINDS)}")
    kinds = Counter(_KINDS[file.suffix.lower()] for file in usable)
    if len(kinds) > 1:
        listing = ", ".join(f"{count} {kind} ({_endings(_of_kind(usable, kind))})" for kind, count in kinds.items())
        raise DataError(f"{path}: mixed file types: {listing}. Give a folder with one type, or a single file")
    kind = next(iter(kinds))
    left = f"; not read: {others}" if others else ""
    source = f"{path} ({len(usable)} {kind} {'file' if len(usable) == 1 else 'files'}{left})"
    return LocalFiles(kind, tuple(_regular(file) for file in usable), source)


def _files_below(folder: Path) -> list[Path]:
    def refuse(error: OSError) -> None:
        raise DataError(f"{error.filename}: this folder cannot be read: {error.strerror}") from error

    seen: set[str] = set()  # os.walk follows links to folders for ever where they form a circle
    files: list[Path] = []
    for parent, folders, names in os.walk(folder, onerror=refuse, followlinks=True):
        real = os.path.realpath(parent)
        # In one order, so that of two ways to the same folder every run takes the same.
        folders[:] = [] if real in seen else sorted(name for name in folders if not name.startswith("."))
        if real not in seen:
            files += [Path(parent, name) for name in names if not name.startswith(".")]
        seen.add(real)
    return sorted(files, key=lambda file: file.relative_to(folder).parts)


def _regular(path: Path) -> Path:
    # A pipe would be empty the second time that it is read.
    try:
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode):
            raise DataError(f"{path}: not a regular file. Write the text to a file first")
        with path.open("rb"):
            return path
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error


def _of_kind(files: Iterable[Path], kind: str) -> list[Path]:
    return [file for file in files if _KINDS[file.suffix.lower()] == kind]


def _endings(files: Iterable[Path]) -> str:
    """`"2 .csv, 1 without ending"`."""
    counts = Counter(file.suffix.lower() or "without ending" for file in files)
    return ", ".join(f"{count} {ending}" for ending, count in sorted(counts.items()))
