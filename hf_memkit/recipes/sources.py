"""Files, or the data set of the hub, named by `--data`. The scripts read their content (`export/scripts`)."""

from __future__ import annotations

import logging
import os
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from hf_memkit.catalog.models import hub_switched_off
from hf_memkit.common.errors import DataError, did_you_mean
from hf_memkit.common.user_files import user_path

_HUB_ID: Final = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?(:[\w.+-]+)?")
"""`name`, `owner/name` or `owner/name:config`."""

_TABLES: Final = {
    ".json": "json", ".jsonl": "json", ".ndjson": "json", ".csv": "csv", ".tsv": "tsv", ".parquet": "parquet",
}  # fmt: skip
_TEXTS: Final = dict.fromkeys((".txt", ".text", ".md", ".rst"), "text")


def local_path(source: str) -> Path | None:
    """The file or folder of a `--data` value; None for a data set of the hub. Raises DataError if it can only be a
    path, by its form or its ending, and does not exist, or cannot be read."""
    path = user_path(source)
    try:
        path.stat()
        return path
    except FileNotFoundError:
        if _HUB_ID.fullmatch(source) and path.suffix.lower() not in {**_TABLES, **_TEXTS}:
            return None
        siblings = [file.name for file in path.parent.iterdir()] if path.parent.is_dir() else []
        raise DataError(f"{source}: no such file or folder{did_you_mean(path.name, siblings)}") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL character
        raise DataError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from error


def is_here(source: str) -> bool:
    """Whether the data of a `--data` value is read without a download. Raises as `local_path`."""
    return local_path(source) is not None or bool(hub_switched_off())


def local_files(path: Path, expected: str, *, texts: bool = False) -> tuple[str, list[Path]]:
    """(their kind, the files): the file itself, or the tables in a folder; with `texts` also texts, and subfolders.
    Raises DataError if there are none or several kinds, or one cannot be read."""
    known = {**_TABLES, **_TEXTS} if texts else _TABLES
    if path.is_dir():
        candidates = [file for file in (_all_files(path) if texts else sorted(path.iterdir())) if not file.is_dir()]
        files = [file for file in candidates if file.suffix.lower() in known and not file.name.startswith(".")]
        if not files:
            raise DataError(f"{path}: no such file in this folder; expected {expected}")
    else:
        files = [path]
    kinds = Counter(known.get(file.suffix.lower(), "text" if texts else file.suffix or "no ending") for file in files)
    kind = next(iter(kinds))
    if len(kinds) > 1:
        listing = ", ".join(f"{count} {kind_name}" for kind_name, count in sorted(kinds.items()))
        raise DataError(f"{path}: mixed file types: {listing}. Give a folder with one type, or a single file")
    if kind not in known.values():
        raise DataError(f"{path}: not a table (it ends in {path.suffix!r}); expected {expected}")
    for file in files:
        if not file.is_file() or not os.access(file, os.R_OK):
            raise DataError(f"{file}: cannot be read, or is not a regular file")
    return kind, files


def only_table(folder: Path) -> Path | None:
    """The table in a folder of images or sound, or None. Raises DataError if there are several."""
    tables = [file for file in sorted(folder.iterdir()) if file.suffix.lower() in _TABLES and file.name[0] != "."]
    if len(tables) > 1:
        raise DataError(f"{folder}: {len(tables)} tables ({tables[0].name}, {tables[1].name} …); name one with --data")
    return tables[0] if tables else None


def _all_files(folder: Path) -> list[Path]:
    """All files, sorted; links are followed."""
    seen: set[str] = set()  # os.walk follows circular links to folders forever
    files: list[Path] = []
    for parent, folders, names in os.walk(folder, followlinks=True):
        real = os.path.realpath(parent)
        # Sorted, so that every run reaches a folder by the same of several paths.
        folders[:] = [] if real in seen else sorted(name for name in folders if not name.startswith("."))
        files += [] if real in seen else [Path(parent, name) for name in names]
        seen.add(real)
    return sorted(files, key=lambda file: file.relative_to(folder).parts)


@contextmanager
def quiet_datasets() -> Iterator[None]:
    """Disable progress bars and log lines of `datasets` and the hub's client inside the block."""
    import datasets

    loggers = {name: logging.getLogger(name) for name in ("datasets", "huggingface_hub")}
    levels = {name: logger.level for name, logger in loggers.items()}
    had_bars = not datasets.utils.are_progress_bars_disabled()
    for logger in loggers.values():
        logger.setLevel(logging.CRITICAL)
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        for name, logger in loggers.items():
            logger.setLevel(levels[name])
        if had_bars:
            datasets.enable_progress_bars()
