"""What images and sound have in common: where they come from, and files that are checked once, in threads.

Files stay where they are: a row holds the path, and the collator opens it when its batch is made. That every file can
be read is made sure of before training: `datasets` keeps the rows of files that were found good in its own cache,
which knows them by path, size and time of change, so that a second run checks nothing again.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from hf_memkit.errors import DataError, did_you_mean
from hf_memkit.models import hub_reachable, why_no_hub
from hf_memkit.recipe.data import is_local, not_found_here, offline, path_exists, quiet_datasets
from hf_memkit.recipe.tasks.task import Settings
from hf_memkit.recipe.text_readers import in_one_line
from hf_memkit.training_setup import TrainingSetup
from hf_memkit.user_files import user_path

__all__ = [
    "HubData",
    "checked",
    "column_of",
    "files_in",
    "kept",
    "load_hub",
    "source_of",
    "stamps",
    "told_at_once",
]

_TOLD: Final = 5
"""Bad files that a message names; it counts the rest."""

_CHUNK: Final = 64


@dataclass(frozen=True)
class HubData:
    """A data set of the hub. `asked` is what the user gave, None for the default one."""

    hub_id: str
    config: str | None
    split: str
    asked: str | None = None

    @property
    def name(self) -> str:
        return f"{self.hub_id}:{self.config}" if self.config else self.hub_id


def source_of(setup: TrainingSetup) -> Path | HubData | None:
    """What `data.source` names: an existing path, a data set of the hub, or None where made-up data must do.

    Raises:
        DataError: a path that does not exist.
    """
    data = setup.section("data")
    source = data["source"]
    if source is None:
        default = HubData(data["hub_id"], data["hub_config"], data["hub_split"])
        return default if hub_reachable() or _in_cache(default) else None
    path = user_path(str(source))
    if path_exists(path):
        return path
    if path.suffix or is_local(str(source)):
        raise DataError(f"{source}: no such file or folder{not_found_here(path)}")
    name, _, config = str(source).partition(":")
    return HubData(name, config or None, "train", str(source))


def load_hub(wanted: HubData, local_form: str) -> Any:
    """The split as a `datasets.Dataset`, nothing decoded.

    Raises:
        DataError: it cannot be had.
    """
    import datasets

    reachable = hub_reachable()
    try:
        with quiet_datasets(), offline(not reachable):
            return datasets.load_dataset(wanted.hub_id, wanted.config, split=wanted.split)
    except Exception as error:  # whatever goes wrong in there is about this ID, and has no common base class
        why = f"cannot be loaded from the hub: {in_one_line(error)}"
        if not reachable:
            why = f"{why_no_hub()}, and this machine's cache has no such data set"
        nor = ""
        if wanted.asked is not None:
            nor = f" (nor is {wanted.asked!r} a file or folder here{not_found_here(Path(wanted.asked))})"
        raise DataError(f"{wanted.name}: {why}{nor}; --data trains on {local_form}") from error


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


def stamps(paths: Iterable[str | Path]) -> tuple[tuple[int, int], ...]:
    """(size, time of change) of each: they stand for the contents. (0, 0) for what is not there."""
    found = []
    for path in paths:
        try:
            state = Path(path).stat()
        except OSError:
            found.append((0, 0))
        else:
            found.append((state.st_size, state.st_mtime_ns))
    return tuple(found)


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


def kept(rows: Callable[..., Iterator[dict[str, Any]]], features: Any, arguments: dict[str, Any], source: str) -> Any:
    """The `datasets.Dataset` of what `rows(**arguments)` yields, from the cache where it was made before.

    Raises:
        DataError: as `rows` raises it, or the cache cannot be written.
    """
    import datasets

    try:
        with quiet_datasets():
            return datasets.Dataset.from_generator(rows, features=features, gen_kwargs=arguments)
    except (datasets.exceptions.DatasetGenerationError, OSError) as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, (DataError, OSError)):
            cause = cause.__cause__ or cause.__context__
        if isinstance(cause, DataError):
            raise cause from None
        if cause is None:
            raise
        raise DataError(
            f"{source}: the cache in {datasets.config.HF_DATASETS_CACHE} cannot be written: {in_one_line(cause)}; "
            f"HF_DATASETS_CACHE names another folder for it"
        ) from error


def loader_arguments(work: str) -> Settings:
    """Fields of TrainingArguments for a collator that opens files; `work` is what it does with them."""
    workers = min(4, os.cpu_count() or 1)
    return {
        "remove_unused_columns": (False, "the collator opens the files that a row names"),
        "dataloader_num_workers": (
            workers,
            f"processes that {work} while the card computes; batches come through shared memory (a container may need "
            f"a larger --shm-size)",
        ),
        "dataloader_prefetch_factor": (2, "batches that each of them has ready"),
        "dataloader_persistent_workers": (True, "they are started once, not in every epoch"),
        "dataloader_pin_memory": (True, "batches go to the card while it computes"),
    }


def whole_config(values: Mapping[str, Any]) -> Any:
    """The config of these values, with the architecture's own for all others."""
    from transformers import AutoConfig

    given = {key: value for key, value in values.items() if key != "transformers_version"}
    return AutoConfig.for_model(given.pop("model_type"), **given)


def _in_cache(wanted: HubData) -> bool:
    """Whether this machine's cache has the data set."""
    import datasets

    try:
        with quiet_datasets(), offline(True):
            datasets.load_dataset_builder(wanted.hub_id, wanted.config)
    except Exception:  # no common base class, and all mean that it is not there
        return False
    return True
