"""Local files in, their texts out, one document at a time; the first mistake ends it with a line that names its place.

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
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from hf_memkit.errors import DataError

__all__ = ["DOCUMENT_CHARACTERS", "check_schema", "in_one_line", "name_of", "not_utf8", "parse_json", "read_texts"]

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
                texts = _read_json(path, text_column)
            else:
                texts = _read_parquet(path, text_column)
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
    advice = f"; {best!r} looks like the text: set data.text_column to it in the recipe's file" if best else ""
    return DataError(f"{where}: no column {column!r}; columns here: {there}{advice}")


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
                raise DataError(f"{path}:{at}: expected text, found a NUL byte: this is a binary file")
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
        return DataError(f"{path}: expected UTF-8 text, found UTF-16; convert it: iconv -f UTF-16 -t UTF-8")
    at = line + found.count(b"\n", 0, error.start)
    return DataError(
        f"{path}:{at}: expected UTF-8 text, found the byte 0x{found[error.start]:02x}; "
        "unpack it if it is compressed, convert it if it is in another encoding"
    )


def _read_json(path: Path, column: str) -> Iterator[str]:
    with path.open("rb") as file:
        start = file.read(_CHUNK_BYTES).removeprefix(codecs.BOM_UTF8).lstrip()[:1]
        file.seek(0)
        if start == b"[":
            for number, row in enumerate(parse_json(path, 1, file.read()), 1):
                yield _text_of(row, column, f"{path}: item {number}")
            return
        for number, line in enumerate(file, 1):
            if line.strip():
                yield _text_of(parse_json(path, number, line), column, f"{path}:{number}")


def parse_json(path: Path, line: int, content: bytes) -> Any:
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
        raise DataError(f"{path}:{line}: JSON nested too deeply") from error


def _text_of(row: Any, column: str, where: str) -> str:
    if not isinstance(row, dict):
        raise DataError(f'{where}: expected an object such as {{"{column}": "…"}}, found {name_of(row)}')
    if column not in row:
        lengths = {name: len(value) if isinstance(value, str) else -1 for name, value in row.items()}
        raise _missing_column(where, column, lengths)
    text = row[column]
    if not isinstance(text, str):
        raise DataError(f"{where}: column {column!r}: expected text, found {name_of(text)}")
    try:
        text.isascii() or text.encode()
    except UnicodeEncodeError as error:  # "\ud800" is valid JSON and no character
        raise DataError(f"{where}: column {column!r}: half of a surrogate pair, which is no character") from error
    return text


def name_of(value: Any) -> str:
    """What a value of JSON is called in a message."""
    if value is None:
        return "null"
    return "an array" if isinstance(value, list) else "an object" if isinstance(value, dict) else f"{value!r:.40}"


def _read_parquet(path: Path, column: str) -> Iterator[str]:
    import pyarrow  # type: ignore[import-untyped, unused-ignore]
    import pyarrow.parquet  # type: ignore[import-untyped, unused-ignore]

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            check_schema(str(path), file.schema_arrow, column)
            batches = file.iter_batches(batch_size=_ROWS, columns=[column])
            rows = (text for batch in batches for text in batch.column(0).to_pylist())
            for number, text in enumerate(rows, 1):
                if text is None:
                    raise DataError(f"{path}: row {number}: column {column!r}: expected text, found null")
                yield text
    except pyarrow.ArrowException as error:
        raise DataError(f"{path}: not a parquet file that can be read: {in_one_line(error)}") from error
