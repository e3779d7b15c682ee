"""What images and sound have in common: where they come from, and files that are checked once, in threads.

Files stay where they are: a row holds the path, and the collator opens it when its batch is made. That every file can
be read is made sure of before training: `datasets` keeps the rows of files that were found good in its own cache,
which knows them by path, size and time of change, so that a second run checks nothing again.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

from hf_memkit.errors import DataError, did_you_mean
from hf_memkit.recipe.sources import HubData, load_hub
from hf_memkit.recipe.tables import TABLE_SUFFIXES
from hf_memkit.recipe.tasks.task import Settings

_TOLD: Final = 5
"""Bad files that a message names; it counts the rest."""

_CHUNK: Final = 64


def column_of(where: str, columns: Iterable[str], names: Sequence[str], example: str) -> str:
    """The first of `names` that is among the columns.

    Raises:
        DataError: none is.
    """
    there = list(columns)
    for name in names:
        if name in there:
            return name
    listed = ", ".join(map(repr, there)) or "none"
    hint = did_you_mean(names[0], there)
    raise DataError(f"{where}: no column {names[0]!r}; columns here: {listed}{hint}; expected {example}")


def hub_rows(wanted: HubData, columns: Mapping[str, str], kind: Any, roles: Mapping[str, str], local_form: str) -> Any:
    """The data set's rows, with two columns that are named by their roles; nothing is decoded.

    Args:
        wanted: the data set.
        columns: role → the name of its column there.
        kind: `datasets.Image` or `datasets.Audio`, which the first column must be.
        roles: role → what it holds, for messages.
        local_form: what `--data` may be besides.

    Raises:
        DataError: it cannot be had, or lacks a column.
    """
    rows = load_hub(wanted, local_form)
    names = [
        column_of(wanted.name, rows.column_names, (columns[role],), f"a column of {what}")
        for role, what in roles.items()
    ]
    if not isinstance(rows.features[names[0]], kind):
        what = next(iter(roles.values()))
        raise DataError(f"{wanted.name}: column {names[0]!r}: expected {what}, found {rows.features[names[0]]}")
    rows = rows.select_columns(names).cast_column(names[0], kind(decode=False))
    return rows.rename_columns({name: role for name, role in zip(names, roles, strict=True) if name != role})


def only_table(folder: Path, files: Iterable[Path]) -> Path | None:
    """The table among the files of a folder, if there is one.

    Raises:
        DataError: there are several.
    """
    tables = [file for file in files if file.suffix.lower() in TABLE_SUFFIXES]
    if len(tables) > 1:
        raise DataError(f"{folder}: {len(tables)} tables ({tables[0].name}, {tables[1].name} …); name one with --data")
    return tables[0] if tables else None


def files_in(folder: Path) -> tuple[list[Path], list[Path]]:
    """(folders, files) in it, sorted, without hidden ones and what file managers leave.

    Raises:
        DataError: it cannot be read.
    """
    try:
        entries = sorted(folder.iterdir(), key=lambda entry: entry.name)
    except OSError as error:
        raise DataError(f"{folder}: this folder cannot be read: {error.strerror or error}") from error
    entries = [entry for entry in entries if not entry.name.startswith(".") and entry.name not in _LEFT_BY_SYSTEMS]
    return [entry for entry in entries if entry.is_dir()], [entry for entry in entries if not entry.is_dir()]


_LEFT_BY_SYSTEMS: Final = frozenset({"Thumbs.db", "desktop.ini", "__MACOSX"})


def checked(items: Sequence[Any], check: Callable[[Any], Any], what: str) -> Iterator[Any]:
    """What `check` makes of each item, in order; it runs in threads, because decoding leaves Python's lock.

    Raises:
        DataError: once all items were looked at; names the first bad ones and counts the others.
    """

    def attempt(item: Any) -> tuple[Any, str | None]:
        try:
            return check(item), None
        except DataError as error:
            return None, str(error)

    bad: list[str] = []
    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        for start in range(0, len(items), _CHUNK):  # by chunks: what was made of all of them is not held at once
            for made, why in pool.map(attempt, items[start : start + _CHUNK]):
                if why is not None:
                    bad.append(why)
                elif not bad:
                    yield made
    if bad:
        raise told_at_once(bad, len(items), what)


def told_at_once(bad: Sequence[str], of: int, what: str) -> DataError:
    """One error for all of `bad`."""
    if len(bad) == 1:
        return DataError(bad[0])
    more = f"; and {len(bad) - _TOLD} more" if len(bad) > _TOLD else ""
    return DataError(f"{len(bad)} of {of} {what}: {'; '.join(bad[:_TOLD])}{more}")


def loader_arguments(work: str) -> Settings:
    """Fields of TrainingArguments for a collator that opens files; `work` is what it does with them."""
    workers = min(4, os.cpu_count() or 1)
    return {
        "remove_unused_columns": (False, "the collator opens the files that a row names"),
        "dataloader_num_workers": (
            workers,
            f"processes that {work} while the GPU computes; batches come through shared memory (a container may need "
            f"a larger --shm-size)",
        ),
        "dataloader_prefetch_factor": (2, "batches that each of them has ready"),
        "dataloader_persistent_workers": (True, "they are started once, not in every epoch"),
        "dataloader_pin_memory": (True, "batches go to the GPU while it computes"),
    }


def whole_config(values: Mapping[str, Any]) -> Any:
    """The config of these values, with the architecture's own for all others."""
    from transformers import AutoConfig

    given = {key: value for key, value in values.items() if key != "transformers_version"}
    return AutoConfig.for_model(given.pop("model_type"), **given)
