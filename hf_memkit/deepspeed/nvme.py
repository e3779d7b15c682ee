"""A swap folder for ZeRO-Infinity: tested before an engine starts, then locked for one run.

DeepSpeed ignores the results of its reads and writes (deepspeed 0.19.8: ops/csrc/aio/common/deepspeed_aio_common.cpp,
`_do_io_complete`): on a full disk, or one that rejects a write, training continues with wrong states until a C++
assertion ends the process. So everything that can be tested is tested before.

DeepSpeed writes to `<nvme_path>/zero_stage_3/` (deepspeed 0.19.8: runtime/zero/stage3.py 841,
runtime/swap_tensor/partitioned_param_swapper.py 86), numbers the files by rank and parameter, and never removes them.
Two runs with one folder silently overwrite each other's files. So a run of memkit locks the folder; an unlocked lock
file belongs to a run that was killed, whose files may be removed.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final, Literal

import psutil

from hf_memkit.catalog.memlock import can_lock
from hf_memkit.common.commands import command
from hf_memkit.common.errors import DoesNotFitError, InputError, MissingPackageError
from hf_memkit.common.units import format_gib
from hf_memkit.common.user_files import user_path

DIRECT_IO_BYTES: Final = 1024
"""Minimum size of DeepSpeed's reads and writes (deepspeed 0.19.8: runtime/swap_tensor/utils.py, AIO_ALIGNED_BYTES)."""

_PAGE: Final = 4096
_IN_RAM: Final = ("tmpfs", "ramfs")
_REMOTE: Final = ("nfs", "cifs", "smb", "9p", "fuse", "ceph", "lustre", "gpfs", "beegfs", "virtiofs")


@dataclass(frozen=True)
class Preflight:
    """Problems and notes; each line names the folder and the fix."""

    unusable: tuple[str, ...] = ()  # why DeepSpeed cannot swap to this folder at all
    shortages: tuple[str, ...] = ()  # too little disk, or too little memory that may be locked
    missing: tuple[str, ...] = ()  # a library to install
    notes: tuple[str, ...] = ()  # working settings that may be slow

    def raise_problems(self) -> None:
        """Raise the most severe kind of problem, with all lines of that kind."""
        kinds = (self.unusable, InputError), (self.shortages, DoesNotFitError), (self.missing, MissingPackageError)
        for lines, error in kinds:
            if lines:
                raise error("\n".join(lines))


def preflight(folder: str | Path, *, needed_bytes: int, locked_bytes: int = 0) -> Preflight:
    """Test DeepSpeed's operations on `folder`, in milliseconds and without leaving files.

    Args:
        needed_bytes: bytes swapped by all processes of this machine.
        locked_bytes: bytes of buffers that each process locks in RAM.
    """
    path = user_path(folder).absolute()
    unusable, shortages, missing, notes = [], [], [], []
    if not _libaio_loads():
        missing.append("DeepSpeed needs libaio; run: sudo apt-get install libaio-dev")
    if not can_lock(locked_bytes):
        shortages.append(
            f"DeepSpeed locks {format_gib(locked_bytes)} of buffers in RAM, and this process may not; "
            f"run: ulimit -l unlimited (in a container: docker run --ulimit memlock=-1)"
        )
    try:
        with made_folder(path):
            unusable += _direct_io_problem(path)
            shortages += [] if unusable else _disk_shortage(path, needed_bytes)
            kind = file_system(path)
            if kind in _IN_RAM:
                notes.append(f"is in RAM ({kind}): swapping to it frees no RAM; give a folder on a disk")
            elif kind.startswith(_REMOTE):
                notes.append(
                    f"is on a network or shared file system ({kind}): every step waits for it; give a local disk"
                )
            leftover = find_leftover(path)
            if leftover is not None:
                (notes if leftover.owner == "ended" else unusable).append(leftover.line)
    except OSError as error:
        unusable.append(f"cannot be made ({error.strerror}); give another folder")
    lines = (unusable, shortages, missing, notes)
    return Preflight(*(tuple(f"--nvme-path {folder}: {line}" for line in kind) for kind in lines))


@contextlib.contextmanager
def ready(
    folder: str | Path, say: Callable[[str], None], *, needed_bytes: int, locked_bytes: int = 0
) -> Iterator[None]:
    """Check `folder` (`preflight`), print notes with `say`, and lock it for one run (`hold`)."""
    result = preflight(folder, needed_bytes=needed_bytes, locked_bytes=locked_bytes)
    result.raise_problems()
    for note in result.notes:
        say(f"Note: {note}")
    with hold(user_path(folder)):
        yield


def file_system(path: Path) -> str:
    """Type of the file system of `path` (`ext4`, `tmpfs`, `overlay` …); empty if unknown."""
    mounts = {partition.mountpoint: partition.fstype for partition in psutil.disk_partitions(all=True)}
    for parent in (path, *path.parents):
        if str(parent) in mounts:
            return mounts[str(parent)]
    return ""


def _direct_io_problem(path: Path) -> list[str]:
    """Why DeepSpeed's I/O (O_DIRECT, pieces of 1024 bytes) does not work here; empty if it does."""
    page = mmap.mmap(-1, _PAGE)  # page-aligned, as O_DIRECT asks
    page.write(os.urandom(_PAGE))
    written = bytes(page)
    probe = path / f".memkit-probe-{os.getpid()}"
    try:
        descriptor = os.open(probe, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_DIRECT, 0o600)
    except OSError as error:
        if error.errno == errno.EINVAL:
            kind = file_system(path) or "unknown"
            return [f"its file system ({kind}) refuses O_DIRECT, which DeepSpeed needs; give one on a local disk"]
        return [f"cannot be written to ({error.strerror}); give another folder"]
    finally:
        with contextlib.suppress(OSError):  # some file systems make the file and then refuse the flag
            probe.unlink()
    try:
        os.pwrite(descriptor, page, 0)
        page.seek(0)
        page.write(bytes(_PAGE))
        os.preadv(descriptor, [page], 0)
        if bytes(page) != written:
            return ["does not read back what O_DIRECT wrote; give another disk"]
        try:
            os.pwrite(descriptor, memoryview(page)[:DIRECT_IO_BYTES], _PAGE)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            return [
                f"this disk accepts pieces of 4096 bytes only; DeepSpeed writes {DIRECT_IO_BYTES} bytes and ignores "
                f"the error; give a disk with sectors of 512 bytes (lsblk -t shows them)"
            ]
    except OSError as error:
        return [f"cannot be written to ({error.strerror}); give another folder"]
    finally:
        os.close(descriptor)
    return []


def _disk_shortage(path: Path, needed_bytes: int) -> list[str]:
    """Missing disk space, quotas included. Swap files of a killed run count as free: the next run removes them."""
    leftover = find_leftover(path)
    reclaimed = leftover.size_bytes if leftover is not None and leftover.owner == "ended" else 0
    free = shutil.disk_usage(path).free + reclaimed
    if needed_bytes > free:
        return [
            f"{format_gib(needed_bytes)} will be swapped there, and {format_gib(free)} are free; "
            f"free space or give another disk (df -h shows it)"
        ]
    if needed_bytes > reclaimed and not _can_reserve(path, needed_bytes - reclaimed):
        return [
            f"{format_gib(needed_bytes)} will be swapped there: the disk has enough free, but a quota forbids it; "
            f"raise the quota or give another disk (quota -s shows it)"
        ]
    return []


def _can_reserve(path: Path, size_bytes: int) -> bool:
    """Whether the file system reserves `size_bytes` for one file, which is then removed; true if it cannot tell.
    Nothing is written. `os.posix_fallocate` would write every block on file systems without the call."""
    libc = ctypes.CDLL(None, use_errno=True)
    with tempfile.TemporaryFile(dir=path) as file:
        done = libc.fallocate(file.fileno(), 0, ctypes.c_int64(0), ctypes.c_int64(size_bytes))
        return done == 0 or ctypes.get_errno() not in (errno.ENOSPC, errno.EDQUOT)


def _libaio_loads() -> bool:
    """Whether the library of async_io loads, under its old name or that of Debian 13."""
    for name in ("libaio.so.1", "libaio.so.1t64"):
        with contextlib.suppress(OSError):
            ctypes.CDLL(name)
            return True
    return False


_LOCK_FILE: Final = "memkit-swap.lock"

Owner = Literal["running", "ended", "unknown"]
"""Owner of swap files: a run of memkit that locks the folder; a killed one; another program."""


@dataclass(frozen=True)
class Leftover:
    """Swap files in a folder before a run begins."""

    path: Path  # the folder with the files, or the lock file of a run that has not written any yet
    size_bytes: int  # their size on the disk
    idle_s: float  # seconds since the last write
    owner: Owner  # see `Owner`
    who: str  # process and host of the run that owns them; empty if unknown

    @property
    def line(self) -> str:
        """The files and the fix, in one line."""
        if self.owner == "running":
            return f"another run ({self.who}) uses this folder now; give each run its own: --nvme-path FOLDER"
        files = f"{format_gib(self.size_bytes)} of swap files, last written {self.idle_s / 60:.0f} minutes ago, are in"
        if self.owner == "ended":
            killed = f"left by a run that was killed ({self.who}); they are removed at the next start"
            return f"{files} {self.path}, {killed}"
        remove = command("rm", "-r", self.path)
        return f"{files} {self.path}, by a program other than memkit; if none uses them, run: {remove}"


def swap_folder(nvme_path: str | Path) -> Path:
    """Folder that DeepSpeed swaps to."""
    return Path(nvme_path) / "zero_stage_3"


def swap_bytes(nvme_path: str | Path) -> int:
    """Size of DeepSpeed's files on the disk."""
    total = 0
    for file in swap_folder(nvme_path).rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # a running job may replace its files
            total += file.stat().st_blocks * 512 if file.is_file() else 0
    return total


def find_leftover(nvme_path: str | Path) -> Leftover | None:
    """Files of an earlier or a running job in this folder, or None. Changes nothing."""
    lock_path, folder = Path(nvme_path) / _LOCK_FILE, swap_folder(nvme_path)
    owner: Owner = "unknown"
    who = ""
    try:
        with lock_path.open("r+") as lock:
            who = lock.read().strip()
            owner = "ended" if _try_lock(lock) else "running"
    except FileNotFoundError:
        if not folder.is_dir():
            return None
    except OSError:  # another user's
        owner = "running"
    written = [0.0]
    for file in (lock_path, folder, *folder.rglob("*")):
        with contextlib.suppress(FileNotFoundError):
            written.append(file.stat().st_mtime)
    shown = folder if folder.is_dir() else lock_path
    return Leftover(shown, swap_bytes(nvme_path), max(0.0, time.time() - max(written)), owner, who or "unknown")


@contextlib.contextmanager
def hold(nvme_path: str | Path) -> Iterator[None]:
    """Lock the folder for one run; remove the files of a killed run before it, and all swapped files and a new folder
    after it. One process of each machine locks it for all processes, before the first one makes its model. Raises
    InputError if a run has locked it, or it has swap files of another program."""
    path = Path(nvme_path)
    lock_path = path / _LOCK_FILE
    with made_folder(path):
        leftover = find_leftover(path)
        if leftover is not None and leftover.owner != "ended":
            raise InputError(f"{path}: {leftover.line}")
        with lock_path.open("a+") as lock:
            # The file may have been removed by its last holder between the opening and the locking.
            locked = _try_lock(lock) and lock_path.exists()
            if not locked or lock_path.stat().st_ino != os.fstat(lock.fileno()).st_ino:
                raise InputError(
                    f"{path}: another run has just taken this folder. Give each run its own: --nvme-path FOLDER"
                )
            try:
                shutil.rmtree(swap_folder(path), ignore_errors=True)
                lock.seek(0)
                lock.truncate()
                lock.write(f"process {os.getpid()} on {socket.gethostname()}\n")
                lock.flush()
                yield
            finally:
                shutil.rmtree(swap_folder(path), ignore_errors=True)
                lock_path.unlink(missing_ok=True)


@contextlib.contextmanager
def made_folder(path: Path) -> Iterator[None]:
    """Make a folder and its parents; afterwards remove the new ones that are empty."""
    missing = [folder for folder in (path, *path.absolute().parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # not empty, or gone
            for folder in missing:
                folder.rmdir()


def _try_lock(lock: IO[str]) -> bool:
    """Lock the file until it is closed. Returns whether that succeeded."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
