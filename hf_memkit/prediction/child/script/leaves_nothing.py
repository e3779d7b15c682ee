"""What a prediction leaves of a script above `train()`: old files stay, nothing made up becomes a file, nothing is
pushed."""

from __future__ import annotations

import builtins
import functools
import io
import os
import posix
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from huggingface_hub import constants
from transformers import Trainer
from transformers.utils import hub

from hf_memkit.prediction.child.users_code import MEMKIT, PYTHON, is_library


def keep_what_was_there() -> None:
    """What a script removes stays, if it was there before: a run would begin with an empty folder, and a prediction is
    no run. Making a folder again that stays is no error."""
    began, stays = time.time() - _CLOCK_S, set[str]()

    def keeping(function: Any) -> Any:
        @functools.wraps(function)
        def unless_older(path: Any, *args: Any, **kwargs: Any) -> Any:
            line = _asked_by_user()
            if line is None or kwargs.get("dir_fd") is not None or not _is_older(path, began):
                return function(path, *args, **kwargs)
            stays.add(str(Path(path).resolve()))
            said = f"memkit: {line}: {os.fsdecode(path)} kept: a prediction removes no file that was there before"
            print(said, file=sys.stderr, flush=True)

        return unless_older

    make = os.mkdir

    @functools.wraps(make)
    def mkdir(path: Any, *args: Any, **kwargs: Any) -> None:
        try:
            make(path, *args, **kwargs)
        except FileExistsError:
            if str(Path(path).resolve()) not in stays:
                raise

    for name in ("remove", "unlink"):
        _replace(name, keeping(getattr(os, name)))
    _replace("mkdir", mkdir)
    shutil.rmtree = keeping(shutil.rmtree)


_CLOCK_S: Final = 0.01
"""By so much a file system's clock may be late: a tick of the kernel."""


def _replace(name: str, function: Any) -> None:
    """A function of the system, also where pickle looks for it."""
    setattr(os, name, function)
    setattr(posix, name, function)


def _is_older(path: Any, began: float) -> bool:
    """Whether a file was there, or one in a folder."""
    found = Path(os.fsdecode(path))
    try:
        if not found.is_dir() or found.is_symlink():
            return found.lstat().st_ctime < began
        return any(each.lstat().st_ctime < began for each in found.rglob("*") if not each.is_dir())
    except OSError:
        return False


def _asked_by_user() -> str | None:
    """`"train.py, line 12"`, if the first caller outside Python's own library is the user's; None: a library asks."""
    for frame, line in traceback.walk_stack(sys._getframe(2)):
        file = frame.f_code.co_filename
        if not file.startswith(("<", MEMKIT, PYTHON)) or "-packages" in file:
            return None if is_library(file) else f"{Path(file).name}, line {line}"
    return None


def nothing_is_pushed() -> None:
    """Models, tokenizers and Trainers of a prediction are not what a run would push."""
    for kind in (Trainer, hub.PushToHubMixin):  # libraries read its docstring and signature (Unsloth: save.py)
        kind.push_to_hub = functools.wraps(kind.push_to_hub)(lambda *args, **kwargs: "")


@functools.cache
def made_up_files_go_away() -> None:
    """From here on a file that Python opens to write comes to lie in a temporary folder, at its own path below it, and
    `open` finds it there: numbers are made up (NaN)."""
    folder, opens = str(Path(tempfile.mkdtemp()).resolve()), builtins.open

    def opened(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if isinstance(file, str | os.PathLike):
            path = str(Path(file).resolve())
            kept = (str(Path(tempfile.gettempdir()).resolve()), "/dev", "/proc/self", *_caches())
            if not path.startswith(tuple(f"{each}/" for each in kept)):
                if set(mode) & set("wax+"):
                    Path(folder + path).parent.mkdir(parents=True, exist_ok=True)
                    file = folder + path
                elif Path(folder + path).exists():
                    file = folder + path
        return opens(file, mode, *args, **kwargs)

    builtins.open = io.open = opened


def _caches() -> Iterator[str]:
    """Folders of the hub's and of datasets' own files, which hold nothing made up; none that the script works in."""
    names = ("HF_HUB_CACHE", "HF_XET_CACHE", "HF_ASSETS_CACHE", "HF_DATASETS_CACHE", "HF_MODULES_CACHE")
    modules = (constants, *map(sys.modules.get, ("datasets.config", "transformers.dynamic_module_utils")))
    for found in {str(getattr(module, name, "")) for module in modules for name in names}:
        if found and not Path.cwd().is_relative_to(Path(found).resolve()):
            yield str(Path(found).resolve())
