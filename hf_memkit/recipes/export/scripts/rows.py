"""The rows named by the section `data` of `args.yaml`, loaded by `datasets`. An error ends the script with one line:
the file and the row, the expected value, and an example. This file needs datasets only: rows are checked before torch
is loaded."""

from __future__ import annotations

import csv
import glob
import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import pyarrow as arrow
import pyarrow.compute as compute
from datasets import Dataset, Features, Value, load_dataset

_QUOTES = 'close its quotation mark, or double the marks of the text between two more, such as """Yes"", he said"'


@dataclass(frozen=True)
class Source:
    """Source of the rows.

    Attributes:
        data: the section `data`.
        folder: folder of `args.yaml`; relative file names start there.
        example: an example row for messages.
    """

    data: Mapping[str, Any]
    folder: Path
    example: str = ""

    @property
    def files(self) -> list[Path]:
        """The local files; none for a data set of the hub."""
        return [self.folder / name for name in self.data.get("files", ())]

    @property
    def name(self) -> str:
        """Name of the source in messages."""
        files = self.files
        more = f" and {len(files) - 1} more files" if len(files) > 1 else ""
        folders = self.data.get("folders", {"train": self.data.get("folder", "made-up examples")})
        return f"{files[0]}{more}" if files else str(self.data.get("hub_id", folders["train"]))

    def refuse(self, problem: str, row: int | None = None) -> NoReturn:
        """End the script with a message, for the whole source or one row."""
        raise SystemExit(f"{self.name if row is None else self.place(row)}: {problem}")

    def expected(self, column: str, expectation: str, value: Any, row: int) -> NoReturn:
        """End the script: a row has a wrong value in a column."""
        self.refuse(f"column {column!r}: expected {expectation}, found {describe(value)}; such as {self.example}", row)

    def place(self, row: int) -> str:
        """`"FILE: row 3"`: place of the row with this index in all rows, from 0."""
        files = self.files
        for file in files[:-1]:
            count = len(self._read([file]))
            if row < count:
                return f"{file}: row {row + 1}"
            row -= count
        return f"{files[-1] if files else self.name}: row {row + 1}"

    def load(self) -> Dataset:
        """All rows, unchanged. Ends the script if they cannot be read, or there are none."""
        if not self.files:
            try:
                return load_dataset(self.data["hub_id"], self.data["hub_config"], split=self.data["hub_split"])
            except Exception as error:  # network, access, a missing config: no common base class
                self.refuse(f"cannot be loaded from the hub: {in_one_line(error)}")
        for file in self.files if self.data["format"] == "csv" else ():
            self._check_table(file)
        try:
            return self._read(self.files)
        except Exception as error:  # each format's reader has its own
            for file in self.files:
                if mistake := self._mistake(file):
                    raise SystemExit(f"{mistake}; expected rows such as {self.example}") from None
            if "corresponds to no data" in str(error):
                self.refuse(f"it has no rows; expected {self.example}")
            cause = error.__cause__ or error
            self.refuse(f"cannot be read as {self.data['format']}: {in_one_line(cause)}; expected {self.example}")

    def texts(self, rows: Dataset, column: str, *, may_be_empty: bool = False) -> Dataset:
        """The rows, with numbers in the column as text. Ends the script unless all values are texts."""
        if column not in rows.column_names:
            columns = ", ".join(map(repr, rows.column_names))
            self.refuse(f"no column {column!r}; columns here: {columns}; expected {self.example}")
        kind = getattr(rows.features[column], "pa_type", None)
        if kind is not None and (arrow.types.is_integer(kind) or arrow.types.is_floating(kind)):
            rows = rows.cast_column(column, Value("string"))
        elif not isinstance(rows.features[column], Value) or kind not in (arrow.string(), arrow.large_string()):
            wrong = next((row for row, value in enumerate(rows[column]) if not isinstance(value, str)), 0)
            self.expected(column, "text", rows[wrong][column], wrong)
        values = rows.data.column(column)
        if values.null_count:
            self.expected(column, "text", None, compute.index(compute.is_null(values), True).as_py())
        empty = compute.index(compute.equal(compute.utf8_trim_whitespace(values), ""), True).as_py()
        if empty >= 0 and not may_be_empty:
            self.refuse(f"column {column!r}: empty; expected text, such as {self.example}", empty)
        return rows

    def by_roles(self, rows: Dataset, roles: Iterable[str]) -> Dataset:
        """The columns with these roles, renamed to the roles."""
        names = {self.data["columns"].get(role, role): role for role in roles}
        rows = rows.select_columns(list(names))
        return rows.rename_columns({name: role for name, role in names.items() if name != role})

    def _read(self, files: list[Path]) -> Dataset:
        names = [glob.escape(str(file)) for file in files]  # load_dataset reads patterns
        options = dict(self.data.get("format_options", {}))
        if self.data["format"] == "csv":  # without features the text "007" would be 7
            headers = [next(self._lines(file), []) for file in files]
            columns = (name or f"Unnamed: {n}" for header in headers for n, name in enumerate(header))  # as pandas
            options["features"] = Features(dict.fromkeys(columns, Value("string")))
        return load_dataset(self.data["format"], data_files=names, split="train", **options)

    def _lines(self, file: Path) -> Iterator[list[str]]:
        """Header and rows of a CSV or TSV file. Raises csv.Error if text follows a closing quotation mark, or the last
        one is not closed."""
        csv.field_size_limit(sys.maxsize)
        with file.open(encoding="utf-8-sig", newline="") as text:
            lines = csv.reader(text, delimiter=self._separator, strict=True)
            yield from (line for line in lines if len(line) > 1 or "".join(line).strip())  # as pandas: no empty lines

    @property
    def _separator(self) -> str:
        return str(self.data.get("format_options", {}).get("sep", ","))

    def _check_table(self, file: Path) -> None:
        """End the script if pandas would lose or change rows of a CSV or TSV file: at a column that appears twice, a
        quotation mark that is not closed, or a row with more fields than the header."""
        problem, row, header = "", 0, 0  # row 0 is the header
        try:
            for line in self._lines(file):
                header = header or len(line)
                twice = next((name for name in line if name and line.count(name) > 1), "") if not row else ""
                if twice:
                    problem = f"column {twice!r} appears twice: rename or remove one of them"
                elif self._separator == "\t" and any("\t" in each and ("\n" in each or "\r" in each) for each in line):
                    problem = f"a field has a tab and a line break, probably of several rows: {_QUOTES}"
                elif len(line) > header:
                    name = {"\t": "tab", ",": "comma"}.get(self._separator, self._separator)
                    fix = f'put text with a {name} in it between quotes ("), or remove the extra field'
                    problem = f"{len(line)} fields, the header has {header}: {fix}"
                if problem:
                    break
                row += 1
        except (OSError, UnicodeDecodeError):
            return  # reading it fails too, with the reason
        except csv.Error:
            problem = f"a field begins with a quotation mark and does not end with one: {_QUOTES}"
        if problem:
            raise SystemExit(f"{file}: {f'row {row}' if row else 'header'}: {problem}")

    def _mistake(self, file: Path) -> str:
        """The mistake in a file, with its line; empty if it cannot be located."""
        try:
            content = file.read_bytes()
            text = content.decode("utf-8-sig") if self.data["format"] != "parquet" else ""
        except OSError as error:
            return f"{file}: cannot be read: {error.strerror or error}"
        except UnicodeDecodeError as error:
            line = 1 + content.count(b"\n", 0, error.start)
            return f"{file}:{line}: expected UTF-8 text, found the byte 0x{content[error.start]:02x}"
        whole = text.lstrip().startswith("[")
        for number, part in enumerate([text] if whole else text.split("\n"), 1):
            try:
                value = json.loads(part) if self.data["format"] == "json" and part.strip() else {}
            except (json.JSONDecodeError, RecursionError) as error:
                line = number + getattr(error, "lineno", 1) - 1
                return f"{file}:{line}: not JSON ({getattr(error, 'msg', 'nested too deeply')})"
            if not whole and not isinstance(value, dict):
                return f"{file}:{number}: expected an object, found {describe(value)}"
        return ""


def stamps_of(paths: Iterable[str]) -> list[tuple[int, int]]:
    """(size, modification time) of each file, which identify its content."""
    states = [Path(path).stat() for path in paths]
    return [(state.st_size, state.st_mtime_ns) for state in states]


def describe(value: Any) -> str:
    """A value in a message."""
    if value is None:
        return "null"
    if isinstance(value, list):
        return "a list"
    return "an object" if isinstance(value, dict) else f"{value!r:.40}"


def in_one_line(error: BaseException) -> str:
    """The message of a library's error, without the advice below it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:2])[:300] if lines else type(error).__name__
