"""Removes the output folder that Trainer creates in its constructor (transformers 5.23.0: trainer.py 606).

A script may write to it before it trains, and a prediction must leave no folder. The script's process records each
path that it creates there, each with a NUL behind it; the process that waits for its end removes them (`serve.py`).
Other files stay.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from transformers import Trainer

RECORD: Final = "made"  # name of the record, next to the result


class MadeFiles:
    """Record of files, folders and links that a prediction made and that go at its end."""

    def __init__(self, record: Path) -> None:
        self._record = record
        self._folders: set[str] = set()

    def watch(self, folder: Path) -> None:
        """Starts recording in this folder and its parents, as far as they do not exist."""
        folder = Path(os.path.realpath(folder))
        missing = next((path for path in (*reversed(folder.parents), folder) if not path.exists()), None)
        if missing is not None:
            self._folders.add(str(missing))

    def note(self, path: str) -> None:
        """Records an absolute path that is about to be made, if it is in a watched folder and does not exist."""
        inside = any(f"{path}/".startswith(f"{folder}/") for folder in self._folders)
        if inside and not os.path.lexists(path):
            self.add(path)

    def add(self, path: str) -> None:
        """Records a path."""
        number = os.open(self._record, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.write(number, os.fsencode(path) + b"\0")
        os.close(number)


def record_output_folder(made: MadeFiles) -> Callable[[Any], None]:
    """Records what this process creates in the output folder. Returns a function that starts recording for a Trainer's
    arguments, for use before processes are forked."""
    original = Trainer.__init__

    def begins(arguments: Any) -> None:
        made.watch(Path(getattr(arguments, "output_dir", None) or "trainer_output"))

    @functools.wraps(original)  # libraries inspect its parameters
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        begins(kwargs.get("args", args[1] if len(args) > 1 else None))
        original(self, *args, **kwargs)

    Trainer.__init__ = init
    return begins


def remove_recorded(record: Path) -> None:
    """Removes the recorded paths, files and inner folders first; folders with other files stay. A path that now leads
    through a link is another file's."""
    if not record.exists():
        return
    made = [Path(os.fsdecode(name)) for name in dict.fromkeys(record.read_bytes().split(b"\0")) if name]
    for path in sorted(made, key=lambda path: len(path.parts), reverse=True):
        with contextlib.suppress(OSError):
            if os.path.realpath(path.parent) == str(path.parent):
                path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
