"""Short paths for sockets: Linux allows 107 bytes (unix(7)), and the path of a temporary folder can be longer."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def short_address(path: Path) -> Iterator[str]:
    """A path shorter than 107 bytes at which a socket can be bound or connected, for a `path` of any length."""
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)
