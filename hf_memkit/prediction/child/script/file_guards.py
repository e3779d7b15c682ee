"""Keeps the user's files from a script above `train()`.

| the script, or a library | a file or folder that existed when the prediction began |
|---|---|
| opens it for writing, truncates it, replaces it | first it is copied to memkit's cache, once a prediction |
| removes it | it stays |
| moves it away | it stays; under the new name there is a copy or a link until the prediction ends |
| changes a file that is larger than `MAX_BYTES`, or cannot be copied | the script stops |

Python's audit hook sees files that Python opens; native writers are wrapped (`_watch_native_writers`). Caches of
libraries are exempt. Files that a program changes, which the script starts, are not kept: `notice_program`.

From the first evaluation on, values are made up (NaN): `redirect_writes`.
"""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import errno
import functools
import io
import os
import posix
import shlex
import shutil
import stat
import struct
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, NoReturn

import safetensors
import tokenizers
import torch
from huggingface_hub import constants

from hf_memkit.common.secrets import masked
from hf_memkit.common.units import format_size
from hf_memkit.common.user_files import cache_folder
from hf_memkit.common.when_imported import when_imported
from hf_memkit.prediction.child.gpu.cuda_queries import replace_everywhere
from hf_memkit.prediction.child.script.notices import notice
from hf_memkit.prediction.child.script.output_folder import MadeFiles
from hf_memkit.prediction.child.user_code import MEMKIT, PYTHON, is_library, users_line
from hf_memkit.prediction.traced_training import Failed, Outcome

MAX_BYTES: Final = 2 * 2**30
"""Largest file that is copied."""

_ALL_COPIES_BYTES: Final = 10 * 2**30
"""Size of all copies; beyond it those of the oldest predictions are deleted."""

_NOTICES: Final = 10
"""Files that are named for one line of the script; the others have one notice."""

_WRITES: Final = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


class OlderFiles:
    """Files and folders that existed at `began`. `end` ends the script with its result."""

    def __init__(self, began: float, end: Callable[[Outcome], NoReturn], made: MadeFiles) -> None:
        self._began, self._end, self._made = began, end, made
        name = time.strftime("%Y-%m-%dT%H.%M.%S", time.localtime(began)) + f"{began % 1:.6f}"[1:]
        self._copies = cache_folder() / "overwritten" / name
        self._kept: set[str] = set()  # folders and files that the script has removed
        self._absent: set[str] = set()  # of these, those that it takes for absent: it has made none anew
        self._stand_ins: set[str] = set()  # for those that it has moved
        self._counts: Counter[str] = Counter()  # line of the script → its notices

    def install(self) -> None:
        """Installs the audit hook, and replaces functions that remove or move."""
        handlers: dict[str, Callable[..., None]] = {
            "open": self._on_open,
            "os.mkdir": lambda path, mode, folder: self._made.note(_place(path, folder)),
            "os.link": lambda old, new, _, folder: self._made.note(_place(new, folder)),
            "os.symlink": lambda old, new, folder: self._made.note(_place(new, folder)),
            "os.remove": lambda path, folder: self._before(_place(path, folder), is_entry=True),
            "os.rename": lambda old, new, _, folder: self._before(_place(new, folder), is_entry=True),
            "os.truncate": lambda path, size: None if isinstance(path, int) else self._before(_place(path)),
        }

        def audit(event: str, arguments: tuple[Any, ...]) -> None:
            handler = handlers.get(event)
            if handler is not None:
                handler(*arguments)

        sys.addaudithook(audit)
        remove, move = self._removing, self._moving
        replaced = {"remove": remove(os.remove), "unlink": remove(os.unlink), "rmdir": remove(os.rmdir, is_rmdir=True)}
        replaced |= {"rename": move(os.rename), "replace": move(os.replace), "mkdir": self._making(os.mkdir)}
        replaced |= {name: self._making(vars(os)[name], 1, "dst") for name in ("symlink", "link")}
        replaced |= {"open": _opening(os.open)}
        os.supports_dir_fd.update(replaced.values())
        for module in (os, posix):  # pickle looks for functions of `os` in `posix`
            vars(module).update(replaced)
        shutil.rmtree = remove(shutil.rmtree)
        _watch_native_writers(lambda path: self._before(_place(path)))

    def _on_open(self, path: Any, mode: str | None, flags: int) -> None:
        if (flags or 0) & _WRITES and isinstance(path, str | bytes | os.PathLike):
            change = self._made.note if flags & os.O_EXCL else self._before  # the first fails if the file exists
            change(_place(path))

    def _before(self, path: str, *, is_entry: bool = False) -> None:
        """Called before a file is made or changed; `is_entry`: the name goes, so a link is not followed. Copies the
        file if it existed and has content."""
        try:
            status = Path(path).stat(follow_symlinks=not is_entry)
        except (OSError, ValueError):
            self._made.note(path)
            return
        if not status.st_size or not (stat.S_ISREG(status.st_mode) or stat.S_ISLNK(status.st_mode)):
            return
        file = path if is_entry else os.path.realpath(path)
        may_change = is_entry or os.access(file, os.W_OK)
        if not may_change or not self._is_older(file) or _is_cache(file) or self._is_copied(file):
            return
        line, copy = users_line() or "a library", self._copy_of(file)
        try:
            self._copy(file, copy, status.st_size)
        except OSError as error:
            if error.errno == errno.EFBIG:
                most = f"memkit copies at most {format_size(MAX_BYTES)}"
                why = f"{most}. Open it for reading only, or write to another file"
            else:
                where = "set XDG_CACHE_HOME to a folder on a disk with more space"
                why = f"it cannot be copied to {copy} ({error.strerror}): {where}"
            message = f"would change {_shown(file)} ({format_size(status.st_size)}), which existed before; {why}"
            self._end(Outcome(failed=Failed(False, "WouldLoseFile", message, line, "")))
        what = f"changes {_shown(file)}; a copy from before is {_shown(str(copy))}"
        self._notice(line, what, f"changes more files; copies from before are in {self._copies}")

    def _copy_of(self, file: str) -> Path:
        return self._copies / file.lstrip("/")

    def _is_copied(self, file: str) -> bool:
        return os.path.lexists(self._copy_of(file))

    def _copy(self, file: str, copy: Path, size: int) -> None:
        """Copies a file. Of threads and processes that copy it at the same time the first counts, because the others
        may copy what it has begun to change."""
        if size > MAX_BYTES:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
        if not self._copies.exists():
            _make_room(self._copies.parent)
            self._copies.mkdir(mode=0o700, parents=True, exist_ok=True)
        if size > shutil.disk_usage(self._copies).free:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        copy.parent.mkdir(parents=True, exist_ok=True)
        part = f"{copy}.{os.getpid()}.{threading.get_ident()}"
        try:
            _copy_entry(file, part)
            try:
                os.link(part, copy, follow_symlinks=False)
            except FileExistsError:
                pass
            except OSError:  # a file system without hard links
                Path(part).rename(copy)
        finally:
            with contextlib.suppress(OSError):
                _unlink(part)

    def _is_older(self, path: str) -> bool:
        try:
            return _born(path) < self._began
        except OSError:
            return False

    def _why_kept(self, path: str) -> str:
        """Why this stays if the script removes it; empty: it goes. What a library removes from its cache goes."""
        if f"{os.path.realpath(tempfile.gettempdir())}/".startswith(f"{os.path.realpath(path)}/"):
            return "the prediction needs it for temporary files"
        inner = Path(path).rglob("*") if Path(path).is_dir() and not Path(path).is_symlink() else ()
        if not self._is_older(path) and not any(self._is_older(str(each)) for each in inner):
            return ""
        is_users = users_call(PYTHON) is not None or not _is_cache(path)
        return "it existed before the prediction" if is_users else ""

    def _removing(self, function: Any, *, is_rmdir: bool = False) -> Any:
        @functools.wraps(function)
        def unless_older(path: Any, *args: Any, **kwargs: Any) -> Any:
            place = _place(path, kwargs.get("dir_fd"))
            if (redirected := _redirected(place)) is not None:
                return function(redirected, *args, **kwargs)
            if place in self._stand_ins and Path(place).is_symlink():  # for the script it is a folder
                return _unlink(place)
            why = self._why_kept(place)
            is_full = bool(why) and is_rmdir and any(str(inner) not in self._kept for inner in Path(place).iterdir())
            if not why or is_full:  # a full folder is an error of `rmdir`, at which `removedirs` ends
                return function(path, *args, **kwargs)
            self._absent.add(place)
            self._keep(place, f"removes {_shown(place)}: it stays, because {why}")

        return unless_older

    def _moving(self, function: Any) -> Any:
        @functools.wraps(function)
        def unless_older(src: Any, dst: Any, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None) -> None:
            old, new = _place(src, src_dir_fd), _place(dst, dst_dir_fd)
            if (redirected := _redirected(old)) is not None:
                function(redirected, _redirect(new))
                return
            if self._absent & {new, str(Path(new).parent)} and Path(old).is_dir():
                what = f"moves {_shown(old)} to {_shown(new)}, after it has removed what was there"
                self._stop(f"{what}; a prediction keeps that")
            why = "" if self._is_copied(old) and not Path(old).is_dir() else self._why_kept(old)
            if not why:
                is_stand_in = old in self._stand_ins and not os.path.lexists(new)
                function(src, dst, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)
                if is_stand_in:
                    self._add_stand_in(new)
                return
            what = f"moves {_shown(old)}: it stays, because {why}"
            if not os.path.lexists(new):
                self._add_stand_in(new)
                _make_stand_in(old, new)
                what += f"; {_shown(new)} has the same content until the prediction ends"
            elif Path(old).is_file() and Path(new).is_file():
                self._before(new)
                _copy_content(old, new)
            if Path(old).is_dir():
                self._absent.add(old)
            self._keep(old, what)

        return unless_older

    def _add_stand_in(self, path: str) -> None:
        self._stand_ins.add(path)
        self._made.add(path)

    def _making(self, function: Any, position: int = 0, name: str = "path") -> Any:
        """To make a folder or link again that was kept, or in a folder that was kept, is no error."""

        @functools.wraps(function)
        def make(*args: Any, **kwargs: Any) -> None:
            try:
                function(*args, **kwargs)
            except FileExistsError:
                folder = kwargs.get("dir_fd", kwargs.get("dst_dir_fd"))
                place = _place(args[position] if len(args) > position else kwargs[name], folder)
                self._absent.discard(place)
                if not any(f"{place}/".startswith(f"{kept}/") for kept in self._kept):
                    raise

        return make

    def _stop(self, message: str) -> NoReturn:
        fix = "Move the old one away before you predict, or write to another name"
        self._end(Outcome(failed=Failed(False, "WouldLoseFile", f"{message}. {fix}", users_line() or "a library", "")))

    def _keep(self, path: str, what: str) -> None:
        self._kept.add(path)
        self._notice(users_line() or "a library", what, "more files stay, because they existed before the prediction")

    def _notice(self, line: str, what: str, more: str) -> None:
        self._counts[line] += 1
        if self._counts[line] <= _NOTICES:
            notice(f"{line}: {what}")
        else:
            notice(f"{line}: {more}")


def _copy_entry(path: str, new: str) -> None:
    """Copies a file or a link."""
    if Path(path).is_symlink():
        Path(new).symlink_to(Path(path).readlink())
        return
    _copy_content(path, new, "x")
    shutil.copystat(path, new)


def _copy_content(path: str, new: str, mode: str = "w") -> None:
    with io.FileIO(path) as source, io.FileIO(new, mode) as target:  # `open` may be redirected
        shutil.copyfileobj(source, target, 2**20)


def _make_stand_in(path: str, new: str) -> None:
    """Makes a link to a folder or large file. Another file is copied, because the script may write to the old name
    while it reads the new one."""
    if Path(path).is_file() and Path(path).stat().st_size <= MAX_BYTES:
        _copy_entry(path, new)
    else:
        Path(new).symlink_to(path)


def _opening(function: Any) -> Any:
    @functools.wraps(function)
    def open_in_folder(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> Any:
        """Gives the audit hook the whole path: its event lacks `dir_fd`."""
        if dir_fd is not None and flags & _WRITES:
            path, dir_fd = _place(path, dir_fd), None
        return function(path, flags, mode, dir_fd=dir_fd)

    return open_in_folder


_unlink, _rmdir = os.unlink, os.rmdir  # before they are replaced


def _make_room(folder: Path) -> None:
    """Deletes the copies of the oldest predictions, while all take more than `_ALL_COPIES_BYTES`; never the newest."""
    files = {prediction: list(prediction.rglob("*")) for prediction in sorted(folder.glob("*"))}
    sizes = {each: sum(file.lstat().st_size for file in inner) for each, inner in files.items()}
    for prediction in list(files)[:-1]:
        if sum(sizes.values()) <= _ALL_COPIES_BYTES:
            return
        for file in (*sorted(files[prediction], reverse=True), prediction):
            with contextlib.suppress(OSError):
                (_rmdir if file.is_dir() and not file.is_symlink() else _unlink)(file)
        freed = format_size(sizes.pop(prediction))
        notice(f"deleted the copies of an earlier prediction, {prediction} ({freed}), to make room for new ones")


def _place(path: Any, folder: int | None = None) -> str:
    """The absolute path of a directory entry: links on the way are followed, the last one is not. `folder`: the
    descriptor of the folder that the path starts from."""
    name = os.fsdecode(path)
    if folder is not None and folder >= 0 and not name.startswith("/"):
        name = f"/proc/self/fd/{folder}/{name}"
    parent, last = os.path.split(name.rstrip("/"))
    return os.path.realpath(name) if last in ("", ".", "..") else str(Path(os.path.realpath(parent), last))


def _shown(path: str) -> str:
    """The path as a sentence has it: relative in the working folder, in one line."""
    name = path.removeprefix(_here())
    return name if name.isprintable() else repr(name)


def _here() -> str:
    """The working folder, with a slash behind it; empty if the script has removed it."""
    with contextlib.suppress(FileNotFoundError):
        return f"{Path.cwd()}/"
    return ""


_STATX_BIRTH: Final = 0x800  # linux/stat.h, STATX_BTIME
_CURRENT_FOLDER: Final = -100  # linux/fcntl.h, AT_FDCWD
_NO_FOLLOW: Final = 0x100  # AT_SYMLINK_NOFOLLOW


def _born(path: str) -> float:
    """The time when a file, folder or link was made. Where the file system does not know: of its last change."""
    answer = ctypes.create_string_buffer(256)
    statx = getattr(_LIBC, "statx", None)
    if statx is not None and statx(_CURRENT_FOLDER, os.fsencode(path), _NO_FOLLOW, _STATX_BIRTH, answer) == 0:
        (known,) = struct.unpack_from("I", answer)
        seconds, nanoseconds = struct.unpack_from("qI", answer, 80)
        if known & _STATX_BIRTH and seconds:
            return float(seconds + nanoseconds / 1e9)
    return os.lstat(path).st_ctime


_LIBC: Final = ctypes.CDLL(None)


def users_call(*through: str) -> str | None:
    """`"train.py, line 12"` if the user's code makes this call, directly or through files that begin so; None if a
    library does."""
    for frame, line in traceback.walk_stack(sys._getframe(1)):
        file = frame.f_code.co_filename
        if not file.startswith(("<", MEMKIT, *through)) or "-packages" in file:
            return None if is_library(file) else f"{Path(file).name}, line {line}"
    return None


_STARTERS: Final = tuple(f"{PYTHON}/{name}" for name in ("subprocess", "os.py", "pty", "asyncio", "threading"))


def notice_program(words: list[str]) -> None:
    """Prints a program that the user's code is about to start: what it does to files is unknown."""
    line = users_call(*_STARTERS)
    if line is not None:
        is_shell = len(words) == 3 and words[1] == "-c"
        command = masked(words[2] if is_shell else shlex.join(words))
        command = command if len(command) <= _LONGEST else f"{command[:_LONGEST]} …"
        notice(f"{line}: starts {command!r}; memkit keeps no file that it changes or removes")


_LONGEST: Final = 200


def _watch_native_writers(before: Callable[[Any], None]) -> None:
    """Calls `before` with each file that these functions write in native code, which the audit hook does not see."""

    def writing(function: Any, position: int, name: str) -> Any:
        @functools.wraps(function)
        def write(*args: Any, **kwargs: Any) -> Any:
            file = args[position] if len(args) > position else kwargs.get(name)
            if isinstance(file, str | os.PathLike):
                before(file)
            return function(*args, **kwargs)

        return write

    torch.save = writing(torch.save, 1, "f")
    save = safetensors.serialize_file
    replace_everywhere(save, writing(save, 1, "filename"))
    tokenizer: Any = tokenizers.Tokenizer
    tokenizer.save = writing(tokenizer.save, 1, "path")
    vocabulary: Any = tokenizers.models.Model
    save_model = vocabulary.save

    @functools.wraps(save_model)
    def save_vocabulary(model: Any, folder: Any, prefix: str | None = None, name: str | None = None) -> Any:
        start = f"{prefix or name}-" if prefix or name else ""
        for file in ("vocab.json", "merges.txt", "vocab.txt", "unigram.json"):
            before(Path(folder, start + file))
        return save_model(model, folder, prefix, name)

    vocabulary.save = save_vocabulary

    def watch_databases(module: Any) -> None:
        connect = module.connect

        @functools.wraps(connect)
        def connect_watched(*args: Any, **kwargs: Any) -> Any:
            connection = connect(*args, **kwargs)
            files = [row[2] for row in connection.execute("PRAGMA database_list") if row[2]]

            def authorize(action: int, name: Any, *others: Any) -> int:
                if action == _SQLITE_ATTACH and name:
                    files.append(name)
                elif action not in _SQLITE_READS:
                    for file in files:
                        before(file)
                        before(f"{file}-wal")
                return 0

            connection.set_authorizer(authorize)
            return connection

        module.connect = module.dbapi2.connect = connect_watched

    when_imported("sqlite3", watch_databases)

    def watch_parquet(module: Any) -> None:
        module.ParquetWriter.__init__ = writing(module.ParquetWriter.__init__, 1, "where")

    when_imported("pyarrow.parquet.core", watch_parquet)

    def watch_arrow(module: Any) -> None:
        class OSFile(module.OSFile):  # type: ignore[misc]  # pandas opens Parquet and Feather files with it
            def __new__(cls, path: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
                if "w" in mode or "a" in mode:
                    before(path)
                return super().__new__(cls, path, mode, *args, **kwargs)

        module.OSFile = OSFile

    when_imported("pyarrow", watch_arrow)


_SQLITE_ATTACH: Final = 24
_SQLITE_READS: Final = (19, 20, 21, 22, 25, 31, 32, 33)
"""Codes of sqlite3_set_authorizer: PRAGMA, READ, SELECT, TRANSACTION, DETACH, FUNCTION, SAVEPOINT, RECURSIVE."""


_redirects_to: str | None = None
"""Folder of redirected files."""


def _redirect(path: str) -> str:
    return f"{_redirects_to}{path}"


def _redirected(path: str) -> str | None:
    """Where the file is that the script has written after an evaluation; None: it has not."""
    return _redirect(path) if _redirects_to is not None and os.path.lexists(_redirect(path)) else None


@functools.cache
def redirect_writes() -> None:
    """From here on writes files that Python's `open` opens to a temporary folder, under their own path, because their
    values are made up (NaN); `open` finds them there, with what the file had."""
    global _redirects_to
    _redirects_to, original = str(Path(tempfile.mkdtemp()).resolve()), builtins.open

    def redirected(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if isinstance(file, str | os.PathLike):
            path = str(Path(file).resolve())
            kept = (str(Path(tempfile.gettempdir()).resolve()), "/dev", "/proc/self", *_caches())
            if not path.startswith(tuple(f"{prefix}/" for prefix in kept)):
                other = Path(_redirect(path))
                if other.exists():
                    file = str(other)
                elif set(mode) & set("wax+") and not ("x" in mode and os.path.lexists(path)):
                    other.parent.mkdir(parents=True, exist_ok=True)
                    if "w" not in mode and Path(path).is_file():
                        with original(path, "rb") as source, original(other, "wb") as target:
                            shutil.copyfileobj(source, target)
                    if "r" not in mode or other.exists():
                        file = str(other)
        return original(file, mode, *args, **kwargs)

    builtins.open = io.open = redirected


def _is_cache(path: str) -> bool:
    """Whether a file or folder is in a library's cache."""
    here = _here()
    names = path.removeprefix(here).split("/")
    if not _CACHE_NAMES.isdisjoint(names) or (names[-1].startswith("cache-") and names[-1].endswith(".arrow")):
        return True  # `datasets` writes its cache beside data that were saved on disk
    variables = map(os.environ.get, ("XDG_CACHE_HOME", "TORCH_HOME", "TRITON_CACHE_DIR"))
    folders = (*_caches(), *(os.path.realpath(folder) for folder in variables if folder))
    return any(path.startswith(f"{folder}/") and not here.startswith(f"{folder}/") for folder in folders)


_CACHE_NAMES: Final = frozenset({".cache", ".triton", "__pycache__", "unsloth_compiled_cache"})


def _caches() -> Iterator[str]:
    """Cache folders of huggingface_hub and datasets, which hold no made-up values, unless the script works in one."""
    names = ("HF_HUB_CACHE", "HF_XET_CACHE", "HF_ASSETS_CACHE", "HF_DATASETS_CACHE", "HF_MODULES_CACHE")
    modules = (constants, *map(sys.modules.get, ("datasets.config", "transformers.dynamic_module_utils")))
    for folder in {str(getattr(module, name, "")) for module in modules for name in names}:
        if folder and not _here().startswith(f"{Path(folder).resolve()}/"):
            yield str(Path(folder).resolve())
