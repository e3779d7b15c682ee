"""A folder for ZeRO-Infinity: whether DeepSpeed can swap to it, tried before an engine starts.

DeepSpeed does not look at the results of its reads and writes (deepspeed 0.19.8: ops/csrc/aio/common/
deepspeed_aio_common.cpp, `_do_io_complete`): on a full disk, or one that refuses a write, training goes on with what
is not there, until a C++ assertion ends the process. Everything that can be known before is found out here.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil

from hf_memkit.errors import DoesNotFitError, InputError, MissingPackageError
from hf_memkit.memlock import can_lock
from hf_memkit.units import format_gib
from hf_memkit.user_files import user_path
from hf_memkit.zero import nvme_files

__all__ = ["Preflight", "file_system", "preflight", "ready"]

DIRECT_IO_BYTES: Final = 1024
"""The smallest piece that DeepSpeed reads or writes (deepspeed 0.19.8: runtime/swap_tensor/utils.py,
AIO_ALIGNED_BYTES)."""

_PAGE: Final = 4096
_IN_RAM: Final = ("tmpfs", "ramfs")
_REMOTE: Final = ("nfs", "cifs", "smb", "9p", "fuse", "ceph", "lustre", "gpfs", "beegfs", "virtiofs")


@dataclass(frozen=True)
class Preflight:
    """What stands in the way, and what is worth knowing; each line names the folder and what mends it.

    Attributes:
        unusable: why DeepSpeed cannot swap to this folder at all.
        shortages: what is not enough: disk, or memory that may be locked.
        missing: a library that must be installed first.
        notes: what works, and may disappoint.
    """

    unusable: tuple[str, ...] = ()
    shortages: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def raise_problems(self) -> None:
        """Raises the gravest kind of what stands in the way, all lines of that kind at once.

        Raises:
            InputError: the folder cannot be used.
            DoesNotFitError: disk or lockable memory is not enough.
            MissingPackageError: a library is missing.
        """
        if self.unusable:
            raise InputError("\n".join(self.unusable))
        if self.shortages:
            raise DoesNotFitError("\n".join(self.shortages))
        if self.missing:
            raise MissingPackageError("\n".join(self.missing))


def preflight(folder: str | Path, *, needed_bytes: int, locked_bytes: int = 0) -> Preflight:
    """Tries everything that DeepSpeed will do with `folder`. Takes milliseconds and leaves nothing behind.

    Args:
        folder: the `nvme_path`.
        needed_bytes: what will be swapped there, by all processes of this machine.
        locked_bytes: the buffers that one process locks in RAM.
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
        with nvme_files.made_folder(path):
            unusable += _direct_io_problem(path)
            shortages += [] if unusable else _disk_shortage(path, needed_bytes)
            notes += _notes(path)
            leftover = nvme_files.find_leftover(path)
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
    """The folder, found good and held for one run: see `preflight` and `nvme_files.hold`.

    Raises:
        InputError, DoesNotFitError, MissingPackageError: see `Preflight.raise_problems`.
    """
    found = preflight(folder, needed_bytes=needed_bytes, locked_bytes=locked_bytes)
    found.raise_problems()
    for note in found.notes:
        say(f"Note: {note}")
    with nvme_files.hold(user_path(folder)):
        yield


def file_system(path: Path) -> str:
    """The type of the file system that `path` lies on (`ext4`, `tmpfs`, `overlay` …); empty if it is not known."""
    mounts = {partition.mountpoint: partition.fstype for partition in psutil.disk_partitions(all=True)}
    for parent in (path, *path.parents):
        if str(parent) in mounts:
            return mounts[str(parent)]
    return ""


def _notes(path: Path) -> list[str]:
    kind = file_system(path)
    if kind in _IN_RAM:
        return [f"is in RAM ({kind}): what is swapped there does not leave RAM; give a folder on a disk"]
    if kind.startswith(_REMOTE):
        return [f"is on a network or shared file system ({kind}): every step waits for it; give a local disk"]
    return []


def _direct_io_problem(path: Path) -> list[str]:
    """Why DeepSpeed's kind of I/O (O_DIRECT, pieces of 1024 bytes) does not work here; nothing if it does."""
    page = mmap.mmap(-1, _PAGE)  # page-aligned, as O_DIRECT asks
    page.write(os.urandom(_PAGE))
    written = bytes(page)
    probe = path / f".memkit-probe-{os.getpid()}"
    try:
        descriptor = os.open(probe, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_DIRECT, 0o600)
    except OSError as error:
        if error.errno == errno.EINVAL:
            kind = file_system(path) or "unknown"
            return [f"its file system ({kind}) refuses O_DIRECT, by which DeepSpeed swaps; give one on a local disk"]
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
            return ["does not give back what is written to it with O_DIRECT; give another disk"]
        try:
            os.pwrite(descriptor, memoryview(page)[:DIRECT_IO_BYTES], _PAGE)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            return [
                f"this disk takes pieces of 4096 bytes only, and DeepSpeed, whose pieces are {DIRECT_IO_BYTES} bytes, "
                f"does not notice what is refused; give a disk with sectors of 512 bytes (lsblk -t shows them)"
            ]
    except OSError as error:
        return [f"cannot be written to ({error.strerror}); give another folder"]
    finally:
        os.close(descriptor)
    return []


def _disk_shortage(path: Path, needed_bytes: int) -> list[str]:
    """What lacks of the disk, quotas included. The swap files of a killed run count as free: they will be removed."""
    leftover = nvme_files.find_leftover(path)
    reclaimed = leftover.size_bytes if leftover is not None and leftover.owner == "ended" else 0
    free = shutil.disk_usage(path).free + reclaimed
    if needed_bytes > free:
        return [
            f"{format_gib(needed_bytes)} will be swapped there, and {format_gib(free)} are free; "
            f"free some or give another disk (df -h shows them)"
        ]
    if needed_bytes > reclaimed and not _can_reserve(path, needed_bytes - reclaimed):
        return [
            f"{format_gib(needed_bytes)} will be swapped there: they are free, and a quota does not grant them; "
            f"ask for more or give another disk (quota -s shows it)"
        ]
    return []


def _can_reserve(path: Path, size_bytes: int) -> bool:
    """Whether the file system grants `size_bytes` to one file, which is removed again; nothing is written.

    True where it cannot be asked. Not by `os.posix_fallocate`: where the file system lacks the call, the C library
    writes every block instead.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    with tempfile.TemporaryFile(dir=path) as file:
        done = libc.fallocate(file.fileno(), 0, ctypes.c_int64(0), ctypes.c_int64(size_bytes))
        return done == 0 or ctypes.get_errno() not in (errno.ENOSPC, errno.EDQUOT)


def _libaio_loads() -> bool:
    """Whether the library that async_io is linked with is here, under its old name or that of Debian 13."""
    for name in ("libaio.so.1", "libaio.so.1t64"):
        with contextlib.suppress(OSError):
            ctypes.CDLL(name)
            return True
    return False
