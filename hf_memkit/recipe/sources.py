"""Where data is: a local path, a data set of the hub, or `datasets`' own cache of what was read before.

Rows that were read and found good are kept by `datasets` in its cache, which knows local files by path, size and time
of change (`stamps`). Nothing is written beside the user's files.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from hf_memkit.errors import DataError, did_you_mean
from hf_memkit.models import hub_reachable, hub_switched_off, why_no_hub
from hf_memkit.recipe.text_readers import DATA_SUFFIXES, LocalFiles, in_one_line
from hf_memkit.setup import Setup
from hf_memkit.user_files import user_path

_HUB_ID: Final = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?(:[\w.+-]+)?")
"""`name`, `owner/name` or `owner/name:config`."""


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


def is_local(source: str) -> bool:
    """Whether a `--data` value can only mean a path: there is one, or no ID of the hub looks like that.

    Raises:
        DataError: whether there is one cannot be told.
    """
    path = user_path(source)
    return path_exists(path) or not _HUB_ID.fullmatch(source) or path.suffix.lower() in DATA_SUFFIXES


def is_here(source: str) -> bool:
    """Whether what a `--data` value names is read without a download.

    Raises:
        DataError: as `is_local`.
    """
    return bool(hub_switched_off()) or is_local(source)


def source_of(setup: Setup, *, any_ending: bool = False) -> Path | HubData | None:
    """What `data.source` names: an existing path, a data set of the hub, or None where made-up data must do.

    `any_ending`: a name with any ending is that of a file, not only one with the ending of a table or text.

    Raises:
        DataError: a path that does not exist.
    """
    data = setup.section("data")
    if data["source"] is not None:
        return named_source(str(data["source"]), any_ending=any_ending)
    default = HubData(data["hub_id"], data["hub_config"], data["hub_split"])
    return default if hub_reachable() or _in_cache(default) else None


def named_source(source: str, *, any_ending: bool = False) -> Path | HubData:
    """As `source_of`, of a `--data` value. A path that exists comes first."""
    path = user_path(source)
    if path_exists(path):
        return path
    if (any_ending and path.suffix) or is_local(source):
        raise DataError(f"{source}: no such file or folder{_not_found_here(path)}")
    name, _, config = source.partition(":")
    return HubData(name, config or None, "train", source)


class NotOnHub(DataError):
    """A hub ID that gives no data set."""


def load_split(wanted: HubData, *, reachable: bool, absent: str = "no such data set") -> Any:
    """The split as a `datasets.Dataset`, nothing decoded; only from the cache if the hub is not `reachable`.

    Raises:
        NotOnHub: it cannot be had; where the hub was not asked because the cache has `absent`.
    """
    import datasets

    try:
        with quiet_datasets(), _offline(not reachable):
            return datasets.load_dataset(wanted.hub_id, wanted.config, split=wanted.split)
    except Exception as error:
        # Whatever goes wrong in there (network, access, a config that is not there, a broken file on the hub) is
        # about this ID, and has no common base class.
        why = f"cannot be loaded from the hub: {in_one_line(error)}"
        if not reachable:
            why = f"{why_no_hub()}, and this machine's cache has {absent}"
        raise NotOnHub(f"{wanted.name}: {why}") from error


def nor_here(wanted: HubData) -> str:
    """A relative path looks like a hub ID: whoever meant one must learn that it was not found."""
    if wanted.asked is None:
        return ""
    return f" (nor is {wanted.asked!r} a file or folder here{_not_found_here(Path(wanted.asked))})"


def load_hub(wanted: HubData, local_form: str) -> Any:
    """The split as a `datasets.Dataset`, nothing decoded.

    Raises:
        DataError: it cannot be had.
    """
    try:
        return load_split(wanted, reachable=hub_reachable())
    except NotOnHub as error:
        raise DataError(f"{error}{nor_here(wanted)}; --data trains on {local_form}") from error


def _in_cache(wanted: HubData) -> bool:
    """Whether this machine's cache has the data set."""
    import datasets

    try:
        with quiet_datasets(), _offline(True):
            datasets.load_dataset_builder(wanted.hub_id, wanted.config)
    except Exception:  # no common base class, and all mean that it is not there
        return False
    return True


def kept_files(rows: Callable[..., Iterator[dict[str, Any]]], features: Any, files: LocalFiles, **more: Any) -> Any:
    """As `kept`, of what `rows` yields of local files: it is given their `names` and `kind`, and what is in `more`."""
    arguments = {
        "paths": tuple(str(path.resolve()) for path in files.paths),
        "stamps": stamps(files.paths),
        "names": tuple(str(path) for path in files.paths),
        "kind": files.kind,
    }
    return kept(rows, features, {**arguments, **more}, files.source)


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
            f"{source}: cannot write to the cache in {datasets.config.HF_DATASETS_CACHE}: "
            f"{getattr(cause, 'strerror', None) or in_one_line(cause)}; set HF_DATASETS_CACHE to another folder"
        ) from error


def path_exists(path: Path) -> bool:
    """Whether there is anything at `path`.

    Raises:
        DataError: that cannot be told.
    """
    try:
        path.stat()
    except FileNotFoundError:
        return False
    except (OSError, ValueError) as error:  # ValueError: a NUL character
        raise DataError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from error
    return True


def _not_found_here(path: Path) -> str:
    """A hint for a name with a typing error."""
    try:
        names = [entry.name for entry in path.parent.iterdir()]
    except OSError:
        return ""
    return did_you_mean(path.name, names)


@contextmanager
def quiet_datasets() -> Iterator[None]:
    """No progress bars and no log lines of `datasets` and the hub's client; both as before afterwards."""
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


@contextmanager
def _offline(wanted: bool) -> Iterator[None]:
    """While `wanted`, `datasets` looks only into its cache, without waiting for a hub that does not answer."""
    import datasets

    before = datasets.config.HF_HUB_OFFLINE
    datasets.config.HF_HUB_OFFLINE = before or wanted
    try:
        yield
    finally:
        datasets.config.HF_HUB_OFFLINE = before
