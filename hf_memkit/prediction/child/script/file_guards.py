"""Protects files from a script above `train()`: old ones stay, made-up values reach none."""

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

from hf_memkit.prediction.child.user_code import MEMKIT, PYTHON, is_library


def protect_existing_files() -> None:
    """Keeps files that existed before the prediction: a run may start with an empty folder, a prediction must not.
    Creating a folder again that was kept is no error."""
    began, kept = time.time() - _CLOCK_S, set[str]()

    def keeping(function: Any) -> Any:
        @functools.wraps(function)
        def unless_older(path: Any, *args: Any, **kwargs: Any) -> Any:
            line = _users_caller()
            if line is None or kwargs.get("dir_fd") is not None or not _is_older(path, began):
                return function(path, *args, **kwargs)
            kept.add(str(Path(path).resolve()))
            message = f"memkit: {line}: {os.fsdecode(path)} kept: a prediction removes no file that existed before"
            print(message, file=sys.stderr, flush=True)

        return unless_older

    make = os.mkdir

    @functools.wraps(make)
    def mkdir(path: Any, *args: Any, **kwargs: Any) -> None:
        try:
            make(path, *args, **kwargs)
        except FileExistsError:
            if str(Path(path).resolve()) not in kept:
                raise

    replaced = {"remove": keeping(os.remove), "unlink": keeping(os.unlink), "mkdir": mkdir}
    for module in (os, posix):  # pickle looks for functions of `os` in `posix`
        vars(module).update(replaced)
    shutil.rmtree = keeping(shutil.rmtree)


_CLOCK_S: Final = 0.01  # delay of a file system's clock: a tick of the kernel


def _is_older(path: Any, began: float) -> bool:
    """Whether the file, or any file in the folder, is older."""
    file = Path(os.fsdecode(path))
    try:
        if not file.is_dir() or file.is_symlink():
            return file.lstat().st_ctime < began
        return any(inner.lstat().st_ctime < began for inner in file.rglob("*") if not inner.is_dir())
    except OSError:
        return False


def _users_caller() -> str | None:
    """`"train.py, line 12"` if the first caller outside Python's library is the user's code; None: a library."""
    for frame, line in traceback.walk_stack(sys._getframe(2)):
        file = frame.f_code.co_filename
        if not file.startswith(("<", MEMKIT, PYTHON)) or "-packages" in file:
            return None if is_library(file) else f"{Path(file).name}, line {line}"
    return None


@functools.cache
def redirect_writes() -> None:
    """From here on writes files that Python opens to a temporary folder, under their own path, because their values
    are made up (NaN); `open` finds them there."""
    folder, original = str(Path(tempfile.mkdtemp()).resolve()), builtins.open

    def redirected(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if isinstance(file, str | os.PathLike):
            path = str(Path(file).resolve())
            kept = (str(Path(tempfile.gettempdir()).resolve()), "/dev", "/proc/self", *_caches())
            if not path.startswith(tuple(f"{prefix}/" for prefix in kept)):
                if set(mode) & set("wax+"):
                    Path(folder + path).parent.mkdir(parents=True, exist_ok=True)
                    file = folder + path
                elif Path(folder + path).exists():
                    file = folder + path
        return original(file, mode, *args, **kwargs)

    builtins.open = io.open = redirected


def _caches() -> Iterator[str]:
    """Cache folders of huggingface_hub and datasets, which hold no made-up values, unless the script works in one."""
    names = ("HF_HUB_CACHE", "HF_XET_CACHE", "HF_ASSETS_CACHE", "HF_DATASETS_CACHE", "HF_MODULES_CACHE")
    modules = (constants, *map(sys.modules.get, ("datasets.config", "transformers.dynamic_module_utils")))
    for folder in {str(getattr(module, name, "")) for module in modules for name in names}:
        if folder and not Path.cwd().is_relative_to(Path(folder).resolve()):
            yield str(Path(folder).resolve())
