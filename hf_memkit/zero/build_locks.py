"""Lock files of torch's extension builds, and whether a build still holds them.

torch makes `<folder>/<operator>/lock` while it builds and keeps it open (torch: utils/cpp_extension.py, FileBaton); a
build that was killed leaves it behind, and the next one waits on it for ever, without a word.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

__all__ = ["extension_roots", "is_held", "stale_locks"]


def extension_roots() -> tuple[Path, ...]:
    """Where torch builds extensions for this user: TORCH_EXTENSIONS_DIR if it is set, and the default."""
    asked = os.environ.get("TORCH_EXTENSIONS_DIR")
    default = Path.home() / ".cache" / "torch_extensions"
    return (Path(asked), default) if asked and Path(asked) != default else (default,)


def stale_locks(roots: Iterable[Path]) -> list[Path]:
    """Every build lock under `roots`, at most two folders deep as torch and memkit lay them out, that no process of
    this machine holds any more."""
    found = {lock for root in roots for pattern in ("*/lock", "*/*/lock") for lock in root.glob(pattern)}
    return sorted(lock for lock in found if not is_held(lock))


def is_held(lock: Path) -> bool:
    """Whether a process has the lock file open. Those of other users cannot be seen, and count as not holding it."""
    try:
        wanted = lock.stat()
    except FileNotFoundError:
        return False
    for descriptor in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            opened = descriptor.stat()
        except OSError:  # the process has ended, or is another user's
            continue
        if (opened.st_dev, opened.st_ino) == (wanted.st_dev, wanted.st_ino):
            return True
    return False
