"""Read and write the user's files: parsing limits nesting and size; writing replaces a file as a whole."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable, Iterable
from itertools import islice
from pathlib import Path
from typing import Final, TypeVar

from hf_memkit.common.errors import InputError

T = TypeVar("T")

_MOST: Final = 100_000
"""Maximum of values on one level. Few lines of YAML aliases can expand to 10^9 values, or refer to themselves."""

_DEEPEST: Final = 100
"""Maximum nesting, so that code may recurse over a content. A DeepSpeed config has five levels."""


def parsed(place: str, parse: Callable[[str], T], text: str) -> T:
    """`parse(text)` for JSON or YAML, with limits on nesting and size. Raises InputError if `text` is nested too
    deeply or contains itself; names `place`. Other errors of `parse` are not caught."""
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
            raise InputError(f"{place}: more than {_MOST} values, with YAML aliases expanded. Give a shorter file")
    raise _too_deep(place)


def _items(value: object) -> Iterable[object]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list | tuple) else ()


def _too_deep(place: str) -> InputError:
    return InputError(f"{place}: nested more than {_DEEPEST} levels deep. Give a config with fewer nested brackets")


def content_problem(content: object) -> str:
    """Why the content of a JSON or YAML file cannot be used; empty for a mapping.

    >>> content_problem([1])
    'is a list, not keys and values. Write lines such as KEY: VALUE'
    """
    if isinstance(content, dict):
        return ""
    if content is None:
        return "is empty. Write keys and values in it, such as KEY: VALUE"
    kind = "a list" if isinstance(content, list) else "a single value"
    return f"is {kind}, not keys and values. Write lines such as KEY: VALUE"


def text_of(path: Path) -> str:
    """The text of a file in UTF-8. Raises InputError if it cannot be read; names the file and the fix."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        reason = "is not text (UTF-8)"
    except OSError as error:
        reason = f"cannot be read: {error.strerror}"
    raise InputError(f"{path}: {reason}. Give a JSON or YAML file")


def user_path(path: str | Path) -> Path:
    """`path` with `~` and `~user` expanded; an unknown user is left as in a shell."""
    return Path(os.path.expanduser(path))  # noqa: PTH111  # Path.expanduser raises RuntimeError for an unknown user


def cache_folder() -> Path:
    """memkit's cache. Follows the XDG Base Directory Specification, which ignores relative paths."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    home = os.path.expanduser("~")  # noqa: PTH111  # Path.home raises RuntimeError for a user without one
    folder = Path(given) if given.startswith("/") else Path(home if home != "~" else "/nonexistent", ".cache")
    return folder / "memkit"


def is_there(path: str | Path) -> bool:
    """Whether the file or folder exists. Raises InputError if a folder on its path may not be entered."""
    try:
        return Path(path).exists()
    except PermissionError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}). Give a file that you may read") from None


def refuse_existing(path: Path, *, overwrite: bool, instead: str = "give another name, or --overwrite") -> None:
    """Check that `write_text` may write `path`. Raises InputError if `path` exists and `overwrite` is false (the
    message ends with `instead`), or it is a broken link."""
    if path.is_symlink() and not path.exists():
        raise InputError(f"{path}: a broken link, to {path.readlink()}. Remove it, or give another name")
    if path.exists() and not overwrite:
        raise InputError(f"{path} exists; {instead}")


def write_text(path: Path, text: str, *, overwrite: bool = False, make_folder: bool = True) -> None:
    """Write a file and, with `make_folder`, its folder, as `replace_text` does. Never writes through a broken link.
    Raises InputError if the file cannot be written, or exists and `overwrite` is false; then an earlier file is
    unchanged, and a new one removed."""
    is_new = not os.path.lexists(path)
    try:
        if make_folder:
            path.parent.mkdir(parents=True, exist_ok=True)
        if not (overwrite and path.exists()):
            path.open("x").close()  # x follows no link
        replace_text(path, text)
    except BaseException as error:
        if is_new and not isinstance(error, FileExistsError):
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise InputError(f"{path}: cannot be written ({error.strerror}). Choose another path") from None
        raise


def replace_text(path: Path, text: str) -> None:
    """Write a file as a whole: a full disk, an error or a kill leaves the earlier file, which is replaced when the new
    one is complete. A link's target is replaced; the mode stays. Raises OSError."""
    before = path.stat() if path.exists() else None
    if before is not None and (not stat.S_ISREG(before.st_mode) or path.is_relative_to("/dev")):  # /dev/stdout
        path.write_text(text, encoding="utf-8")
        return
    target = path.resolve()
    temporary = target.with_name(f".memkit-{os.urandom(6).hex()}.tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        with open(descriptor, "w", encoding="utf-8") as file:  # noqa: PTH123  # of a descriptor
            file.write(text)
            file.flush()
            os.fsync(descriptor)  # some file systems report a full disk only here
        if before is not None:
            temporary.chmod(stat.S_IMODE(before.st_mode))
        temporary.replace(target)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
