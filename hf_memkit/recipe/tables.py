"""A `--data` value in, a table of checked rows out: for tasks whose examples are rows of columns.

The task says what a row must hold (`Rows.row`) and gets everything else from here: local files, the hub, and the rows
that stand in where neither is there. Rows that were read and found good are kept by `datasets` in its own cache, which
knows local files by path, size and time of change; nothing is written beside the user's files, and nothing is kept of
a table with a mistake in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

from hf_memkit.errors import DataError
from hf_memkit.models import hub_reachable
from hf_memkit.recipe.sources import (
    HubData,
    in_cache,
    is_local,
    kept,
    load_hub,
    not_found_here,
    path_exists,
    quiet_datasets,
    stamps,
)
from hf_memkit.recipe.table_rows import find_tables, read_rows
from hf_memkit.setup import Setup
from hf_memkit.user_files import user_path

__all__ = ["RowTask", "Table", "cell", "hold_out", "load_table"]

_ROWS_VERSION = 1
"""Raise it when a task makes other rows of the same files: what the cache holds is then read anew."""

_HEAD_ROWS = 100


class RowTask(Protocol):
    """What a task must have whose examples are rows."""

    name: ClassVar[str]
    columns: ClassVar[Mapping[str, str]]
    local_form: ClassVar[str]
    example: ClassVar[str]

    def reader(self) -> Any:
        """What has `row` for one table: the task itself, or a new object where a row must agree with those before."""

    def row(self, columns: Mapping[str, str], where: str, row: Mapping[str, Any]) -> dict[str, Any]:
        """The columns that the task goes on with, checked.

        Args:
            columns: role → the name of its column.
            where: the row's place, with which a message begins.
            row: as it was read.

        Raises:
            DataError: it lacks a column, or holds something else there than it should.
        """

    def features(self) -> Any:
        """`datasets.Features` of what `row` gives."""

    def made_up(self) -> list[dict[str, Any]]:
        """Rows, as `row` gives them, for where there is no data: enough to rehearse on, made of what is here."""


@dataclass(frozen=True)
class Table:
    """`rows`: a `datasets.Dataset` with the task's features; `source`: what a person reads; `is_made_up`: whether the
    rows stand in for the data set that was wanted."""

    rows: Any
    source: str
    is_made_up: bool = False


def load_table(task: RowTask, setup: Setup) -> Table:
    """The rows that the setup's `data.source` names, or its default data set, or made-up ones where the hub cannot be
    reached.

    Raises:
        DataError: nothing there, nothing that can be read, a row that is not as the task wants it, or no row at all.
    """
    data = setup.section("data")
    source, columns = data["source"], data["columns"]
    if source is None:
        default = HubData(data["hub_id"], data["hub_config"], data["hub_split"])
        return _from_hub(task, default, columns) if hub_reachable() or in_cache(default) else _made_up(task)
    path = user_path(str(source))
    if path_exists(path):
        return _from_files(task, path, columns)
    if is_local(str(source)):
        raise DataError(f"{source}: no such file or folder{not_found_here(path)}")
    name, _, config = str(source).partition(":")
    try:
        return _from_hub(task, HubData(name, config or None, "train"), columns)
    except DataError as error:
        raise DataError(f"{error} (nor is {source!r} a file or folder here{not_found_here(path)})") from error


def hold_out(rows: Any, share: float) -> tuple[Any, Any]:
    """(to train on, held out): the last `share` of the rows, at least one, and at least one is left.

    Raises:
        DataError: there are fewer than two rows.
    """
    if len(rows) < 2:
        raise DataError(f"{len(rows)} example: at least 2 are needed, one to train on and one to hold out")
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
    return Table(rows, "made-up examples, used because the hub is not reachable (--data trains on your own)", True)


def _from_files(task: RowTask, path: Path, columns: Mapping[str, str]) -> Table:
    files = find_tables(path, f"{task.local_form}, such as {task.example}")
    arguments = {
        "paths": tuple(str(each.resolve()) for each in files.paths),
        "stamps": stamps(files.paths),
        "names": tuple(str(each) for each in files.paths),
        "kind": files.kind,
        "task": task.name,
        "columns": dict(columns),
        "version": _ROWS_VERSION,
    }
    return Table(kept(_rows, task.features(), arguments, files.source), files.source)


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
            yield reader.row(columns, where, row)
    if not found:
        raise DataError(f"{names[0]}: no row in it; expected {of_task.local_form}, such as {of_task.example}")


def _from_hub(task: RowTask, wanted: HubData, columns: Mapping[str, str]) -> Table:
    import datasets

    found, name = load_hub(wanted, task.local_form), wanted.name
    classes = {key: one.names for key, one in found.features.items() if isinstance(one, datasets.ClassLabel)}

    reader = task.reader()

    def checked(row: Mapping[str, Any], number: int) -> Any:
        return reader.row(columns, f"{name}: row {number + 1}", _named(row, classes))

    for number, row in enumerate(found.select(range(min(_HEAD_ROWS, len(found))))):
        checked(row, number)  # a wrong column is told at once
    with quiet_datasets():
        rows = found.map(
            checked,
            with_indices=True,
            remove_columns=found.column_names,
            features=task.features(),
        )
    return Table(rows, name if hub_reachable() else f"{name}, from this machine's cache")
