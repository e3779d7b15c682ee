"""The files that DeepSpeed swaps to, and who uses them: one run at a time, nothing left behind.

DeepSpeed writes to `<nvme_path>/zero_stage_3/` (deepspeed 0.19.8: runtime/zero/stage3.py 841,
runtime/swap_tensor/partitioned_param_swapper.py 86), numbers the files by rank and parameter, and never removes them.
Two runs with one folder write into each other's files without an error. So a run of memkit holds a lock on the folder
while it lasts; a lock file that nobody holds is the trace of a run that was killed, whose files may go.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final, Literal

from hf_memkit.errors import InputError
from hf_memkit.units import format_gib

__all__ = ["Leftover", "find_leftover", "hold", "made_folder", "swap_bytes", "swap_folder"]

_LOCK_FILE: Final = "memkit-swap.lock"

Owner = Literal["running", "ended", "unknown"]
"""Whose swap files: a run of memkit that holds the folder; one that was killed; another program's."""


@dataclass(frozen=True)
class Leftover:
    """Swap files that lie in a folder before a run begins.

    Attributes:
        path: the folder that holds them, or the lock file of a run that has not written any yet.
        size_bytes: what they take on the disk.
        idle_s: seconds since the last one was written.
        owner: see `Owner`.
        who: process and host of the run that left or holds them; empty if unknown.
    """

    path: Path
    size_bytes: int
    idle_s: float
    owner: Owner
    who: str

    @property
    def line(self) -> str:
        """What lies here, and what to do about it."""
        if self.owner == "running":
            return f"another run ({self.who}) uses this folder now; give each run a folder of its own"
        what = f"{format_gib(self.size_bytes)} of swap files, last written {self.idle_s / 60:.0f} minutes ago, are in"
        if self.owner == "ended":
            return (
                f"{what} {self.path}, left by a run that was killed ({self.who}); they are removed at the next start"
            )
        return f"{what} {self.path}, by a program other than memkit; if none uses them, run: rm -r {self.path}"


def swap_folder(nvme_path: str | Path) -> Path:
    """Where DeepSpeed puts its files."""
    return Path(nvme_path) / "zero_stage_3"


def swap_bytes(nvme_path: str | Path) -> int:
    """What DeepSpeed's files take on the disk."""
    total = 0
    for file in swap_folder(nvme_path).rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # a live run may replace its files meanwhile
            total += file.stat().st_blocks * 512 if file.is_file() else 0
    return total


def find_leftover(nvme_path: str | Path) -> Leftover | None:
    """What an earlier or a running job has in this folder, or None. Changes nothing."""
    lock_path, folder = Path(nvme_path) / _LOCK_FILE, swap_folder(nvme_path)
    owner: Owner = "unknown"
    who = ""
    try:
        with lock_path.open("r+") as lock:
            who = lock.read().strip()
            owner = "ended" if _take(lock) else "running"
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
    """Keeps the folder for one run: removes what a killed run left before it, and everything swapped after it.

    Makes the folder where there is none, and removes it again if it is empty then. One process a machine holds it for
    all of a job's processes, before the first of them makes its model.

    Raises:
        InputError: a run holds the folder, or another program's swap files are in it.
        OSError: it cannot be made.
    """
    with made_folder(Path(nvme_path)), _held(Path(nvme_path)):
        yield


@contextlib.contextmanager
def made_folder(path: Path) -> Iterator[None]:
    """Makes a folder and its parents; afterwards removes those that it made and that are empty.

    Raises:
        OSError: it cannot be made.
    """
    missing = [folder for folder in (path, *path.absolute().parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # not empty, or gone
            for folder in missing:
                folder.rmdir()


@contextlib.contextmanager
def _held(path: Path) -> Iterator[None]:
    """Holds the lock of `path`; there are no swap files at the start, and none at the end.

    Raises:
        InputError: somebody else's files or lock are here.
    """
    lock_path = path / _LOCK_FILE
    found = find_leftover(path)
    if found is not None and found.owner != "ended":
        raise InputError(f"{path}: {found.line}")
    with lock_path.open("a+") as lock:
        # The file may have been removed by its last holder between the opening and the locking.
        if not _take(lock) or not lock_path.exists() or lock_path.stat().st_ino != os.fstat(lock.fileno()).st_ino:
            raise InputError(f"{path}: another run has just taken this folder; give each run a folder of its own")
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


def _take(lock: IO[str]) -> bool:
    """Whether the lock could be had; it is let go when the file is closed."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
