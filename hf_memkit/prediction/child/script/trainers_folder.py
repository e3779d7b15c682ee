"""The folder that Trainer makes when it is made (transformers 5.23.0: trainer.py 606): a script may write there before
it trains, and a prediction leaves none behind. The script's process writes down what it makes there, a path a line;
the process that waits for its end removes that (`serve.py`). What somebody else has put there stays."""

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

from hf_memkit.prediction.child.gpu.cuda_questions import replace_everywhere

MADE: Final = "made"
"""The file in which it is written down, beside that of the result."""

_WRITES: Final = os.O_WRONLY | os.O_RDWR | os.O_CREAT
_MAKES: Final = {"os.mkdir": 0, "os.rename": 1, "os.link": 1, "os.symlink": 1}
"""Audit events of Python that make a file or a folder, and which of their arguments is its path."""


def folder_goes_away(record: Path) -> Callable[[Any], None]:
    """Writes down to `record` what this process makes there. Trainer makes no repository on the hub. What comes back
    begins with it for a Trainer of some arguments: before processes are forked that each make one."""
    original = Trainer.__init__
    made = _Made(record)

    def begins(arguments: Any) -> None:
        made.watch(Path(getattr(arguments, "output_dir", None) or "trainer_output").absolute())

    @functools.wraps(original)  # libraries look at its parameters
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        begins(kwargs.get("args", args[1] if len(args) > 1 else None))
        original(self, *args, **kwargs)

    Trainer.__init__ = init
    Trainer.init_hf_repo = lambda self, *args, **kwargs: None
    return begins


class _Made:
    """What is made in folders that were not there before."""

    def __init__(self, record: Path) -> None:
        self._record = record
        self._folders: set[str] = set()

    def watch(self, folder: Path) -> None:
        """From here on this folder, if it is not there, and those above it that are not."""
        missing = [each for each in (*reversed(folder.parents), folder) if not each.exists()]
        if not missing:
            return
        if not self._folders:
            sys.addaudithook(self._audit)
            self._see_other_code()
        self._folders.add(str(missing[0]))

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            path, _, flags = arguments
            if isinstance(path, str | bytes) and (flags or 0) & _WRITES:
                self._note(path)
        elif event in _MAKES and isinstance(path := arguments[_MAKES[event]], str | bytes | os.PathLike):
            self._note(path)

    def _note(self, path: Any, *, is_new: bool = False) -> None:
        """Unless it is there already, or lies elsewhere."""
        name = os.path.abspath(os.fsdecode(path))  # noqa: PTH100 - a link is not followed
        inside = any(name == each or name.startswith(each + os.sep) for each in self._folders)
        if inside and (is_new or not os.path.lexists(name)):
            number = os.open(self._record, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            os.write(number, os.fsencode(name) + b"\n")
            os.close(number)

    def _see_other_code(self) -> None:
        """What writes files by code that is not Python's, of which the hook sees nothing."""
        save, tokenizers = safetensors.torch.save_file, PreTrainedTokenizerBase.save_pretrained
        torch.save = self._noting(torch.save)
        replace_everywhere(save, self._noting(save))

        @functools.wraps(tokenizers)
        def save_pretrained(*args: Any, **kwargs: Any) -> Any:
            files = tokenizers(*args, **kwargs)
            for each in files or ():
                self._note(each, is_new=True)
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


def remove_made(record: Path) -> None:
    """Removes what was written down, files first and inner folders before outer ones; a folder that is not empty then
    holds what is somebody else's."""
    if not record.exists():
        return
    made = [Path(os.fsdecode(line)) for line in dict.fromkeys(record.read_bytes().splitlines())]
    for path in sorted(made, key=lambda each: len(each.parts), reverse=True):
        with contextlib.suppress(OSError):
            path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
