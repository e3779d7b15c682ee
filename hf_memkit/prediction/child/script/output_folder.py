"""Removes the output folder that Trainer creates in its constructor (transformers 5.23.0: trainer.py 606).

A script may write to it before it trains, and a prediction must leave no folder. The script's process records each
path that it creates there, one per line; the process that waits for its end removes them (`serve.py`). Other files
stay.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import safetensors.torch
import torch
from transformers import PreTrainedTokenizerBase, Trainer

from hf_memkit.prediction.child.gpu.cuda_queries import replace_everywhere

RECORD: Final = "made"  # name of the record, next to the result

_WRITE_FLAGS: Final = os.O_WRONLY | os.O_RDWR | os.O_CREAT
_PATH_ARGUMENTS: Final = {"os.mkdir": 0, "os.rename": 1, "os.link": 1, "os.symlink": 1}
"""Python's audit events that create a file or folder → index of the path in their arguments."""


def record_output_folder(record: Path) -> Callable[[Any], None]:
    """Records what this process creates in the output folder. Returns a function that starts
    recording for a Trainer's arguments, for use before processes are forked."""
    original = Trainer.__init__
    recorder = _Recorder(record)

    def begins(arguments: Any) -> None:
        recorder.watch(Path(getattr(arguments, "output_dir", None) or "trainer_output").absolute())

    @functools.wraps(original)  # libraries inspect its parameters
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        begins(kwargs.get("args", args[1] if len(args) > 1 else None))
        original(self, *args, **kwargs)

    Trainer.__init__ = init
    return begins


class _Recorder:
    """Records paths created in folders that did not exist before."""

    def __init__(self, record: Path) -> None:
        self._record = record
        self._folders: set[str] = set()

    def watch(self, folder: Path) -> None:
        """Starts recording in this folder and its parents, as far as they do not exist."""
        missing = [path for path in (*reversed(folder.parents), folder) if not path.exists()]
        if not missing:
            return
        if not self._folders:
            sys.addaudithook(self._audit)
            self._patch_savers()
        self._folders.add(str(missing[0]))

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            path, _, flags = arguments
            if isinstance(path, str | bytes) and (flags or 0) & _WRITE_FLAGS:
                self._note(path)
        elif event in _PATH_ARGUMENTS and isinstance(
            path := arguments[_PATH_ARGUMENTS[event]], str | bytes | os.PathLike
        ):
            self._note(path)

    def _note(self, path: Any, *, is_new: bool = False) -> None:
        """Records a path in the folders, unless it exists already."""
        name = os.path.abspath(os.fsdecode(path))  # noqa: PTH100 - links are not followed
        inside = any(name == folder or name.startswith(folder + os.sep) for folder in self._folders)
        if inside and (is_new or not os.path.lexists(name)):
            number = os.open(self._record, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            os.write(number, os.fsencode(name) + b"\n")
            os.close(number)

    def _patch_savers(self) -> None:
        """Patches functions that write files in native code, which the audit hook does not see."""
        save, tokenizers = safetensors.torch.save_file, PreTrainedTokenizerBase.save_pretrained
        torch.save = self._noting(torch.save)
        replace_everywhere(save, self._noting(save))

        @functools.wraps(tokenizers)
        def save_pretrained(*args: Any, **kwargs: Any) -> Any:
            files = tokenizers(*args, **kwargs)
            for file in files or ():
                self._note(file, is_new=True)
            return files

        PreTrainedTokenizerBase.save_pretrained = save_pretrained

    def _noting(self, save: Any) -> Any:
        @functools.wraps(save)
        def noted(*args: Any, **kwargs: Any) -> Any:
            file = next(iter(args[1:2]), kwargs.get("f", kwargs.get("filename")))
            if isinstance(file, str | os.PathLike):
                self._note(file)
            return save(*args, **kwargs)

        return noted


def remove_recorded(record: Path) -> None:
    """Removes the recorded paths, files and inner folders first; folders with other files stay."""
    if not record.exists():
        return
    made = [Path(os.fsdecode(line)) for line in dict.fromkeys(record.read_bytes().splitlines())]
    for path in sorted(made, key=lambda path: len(path.parts), reverse=True):
        with contextlib.suppress(OSError):
            path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
