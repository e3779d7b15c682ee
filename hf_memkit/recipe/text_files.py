"""A path in, the local files it stands for out, before any of them is read.

The file or folder that `--data` names is checked here: that it can be read, and that its files are of one kind.
`hf_memkit.recipe.text_readers` reads them.
"""

from __future__ import annotations

import os
import stat
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from hf_memkit.errors import DataError

__all__ = ["DATA_SUFFIXES", "TextFiles", "find_text_files"]

_KINDS = {
    ".txt": "text", ".text": "text", ".md": "text", ".rst": "text",
    ".json": "JSON", ".jsonl": "JSON", ".ndjson": "JSON",
    ".parquet": "parquet",
}  # fmt: skip
_TABLES = (".csv", ".tsv")
DATA_SUFFIXES = frozenset({*_KINDS, *_TABLES})
"""How the names of data files end: a `--data` value that ends so is a path, never a hub ID."""


@dataclass(frozen=True)
class TextFiles:
    """Files of one kind (`text`, `JSON` or `parquet`), in the order in which they are read."""

    kind: str
    paths: tuple[Path, ...]
    source: str
    """What a person reads: the path, and for a folder what was found in it."""


def find_text_files(path: Path) -> TextFiles:
    """The files of `path`: itself, or all below it if it is a folder, sorted by path; links are followed.

    In a folder the names' endings decide, hidden files and folders are passed over, and `source` tells how many
    others are not read. A file named by itself may be called anything: it is text if its ending says nothing else.

    Raises:
        DataError: nothing usable, files of several kinds, a CSV file, not readable, not a regular file.
    """
    if not path.is_dir():
        if path.suffix.lower() in _TABLES:
            raise DataError(f"{path}: tables in {path.suffix} files are not read; convert it to JSON lines or parquet")
        return TextFiles(_KINDS.get(path.suffix.lower(), "text"), (_regular(path),), str(path))
    found = _files_below(path)
    usable = [file for file in found if file.suffix.lower() in _KINDS]
    others = _endings(file for file in found if file.suffix.lower() not in _KINDS)
    if not usable:
        inside = f"it has {others}" if others else "it is empty"
        raise DataError(f"{path}: no text in this folder, {inside}; expected files that end in {', '.join(_KINDS)}")
    kinds = Counter(_KINDS[file.suffix.lower()] for file in usable)
    if len(kinds) > 1:
        listing = ", ".join(f"{count} {kind} ({_endings(_of_kind(usable, kind))})" for kind, count in kinds.items())
        raise DataError(f"{path}: files of several kinds: {listing}; give a folder or a file of one kind")
    kind = next(iter(kinds))
    left = f"; not read: {others}" if others else ""
    source = f"{path} ({len(usable)} {kind} {'file' if len(usable) == 1 else 'files'}{left})"
    return TextFiles(kind, tuple(_regular(file) for file in usable), source)


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
            raise DataError(f"{path}: not a regular file; write the text to one first")
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
