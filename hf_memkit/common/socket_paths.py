"""Paths of sockets, which Linux limits to 107 bytes: a folder for temporary files can be longer by itself."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def short_address(path: Path) -> Iterator[str]:
    """Another name of `path`, to bind or connect a socket to, that does not contain its folder's."""
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)
