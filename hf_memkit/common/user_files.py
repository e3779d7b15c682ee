"""Files of the user's. In: a text that may be nested without end, or a path that may be a link. Out: the content, or
the file written; one line where that is refused.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from itertools import islice
from pathlib import Path
from typing import Final, TypeVar

from hf_memkit.common.errors import InputError

T = TypeVar("T")

_MOST: Final = 100_000
"""Values on one level. An alias of YAML may stand for itself, or a few lines of them for a thousand millions."""

_DEEPEST: Final = 100
"""Levels; a DeepSpeed config has five. What walks over a content may recurse so far."""


def parsed(place: str, parse: Callable[[str], T], text: str) -> T:
    """`parse(text)`, JSON or YAML.

    Raises:
        InputError: it is nested too deeply, or holds itself; names `place`. What else `parse` raises goes on.
    """
    try:
        content = parse(text)
    except RecursionError:
        raise _too_deep(place) from None
    level: list[object] = [content]
    for _ in range(_DEEPEST):
        level = list(islice((item for value in level for item in _items(value)), _MOST + 1))
        if not level:
            return content
        if len(level) > _MOST:
            raise InputError(f"{place}: holds more than {_MOST} values, counting its aliases. Give a shorter file")
    raise _too_deep(place)


def _items(value: object) -> Iterable[object]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list | tuple) else ()


def _too_deep(place: str) -> InputError:
    return InputError(f"{place}: nested more than {_DEEPEST} levels deep. Give a config with fewer nested brackets")


def user_path(path: str | Path) -> Path:
    """`path` with `~` and `~user` replaced; that of an unknown user stays as it is, as in a shell."""
    return Path(os.path.expanduser(path))  # noqa: PTH111  # Path.expanduser raises RuntimeError for an unknown user


def refuse_existing(path: Path, *, overwrite: bool, instead: str = "give another name, or --overwrite") -> None:
    """Makes sure that `write_text` may write `path`.

    Raises:
        InputError: it exists and is not to be overwritten (ends with `instead`), or is a link to what does not exist.
    """
    if path.is_symlink() and not path.exists():
        raise InputError(
            f"{path}: a link to {path.readlink()}, which does not exist. Remove it, or choose another name"
        )
    if path.exists() and not overwrite:
        raise InputError(f"{path} exists; {instead}")


def write_text(path: Path, text: str, *, overwrite: bool = False, make_folder: bool = True) -> None:
    """Writes a file and, unless that is not to be, its folder. A link that leads nowhere is never written through.

    Raises:
        InputError: it cannot be written, or came to exist.
    """
    try:
        if make_folder:
            path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w" if overwrite and path.exists() else "x", encoding="utf-8") as file:  # x follows no link
            file.write(text)
    except OSError as error:
        raise InputError(f"{path}: cannot be written ({error.strerror}). Choose another path") from None
