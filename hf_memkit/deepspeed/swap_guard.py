"""Stops a run that can no longer write or read its swapped states, before wrong ones reach a checkpoint.

DeepSpeed ignores the results of its reads and writes (`nvme.py`), so a full disk silently loses states. The guard
wraps the I/O handles of one engine: it reserves a file's blocks before the first write, checks that this write filled
them, checks a file's size before a read, and waits for pending operations before it raises, because they would abort
the process (deepspeed 0.19.8: deepspeed_py_io_handle.cpp, `_stop_threads`).
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from transformers import TrainerCallback

from hf_memkit.common.commands import command
from hf_memkit.common.errors import RunError

_NO_SUCH_CALL = (errno.EOPNOTSUPP, errno.ENOSYS)


class SwapGuard(TrainerCallback):  # type: ignore[misc]
    """Guards the engine of the training; `engine` returns it (`lambda: trainer.deepspeed`)."""

    def __init__(self, engine: Callable[[], Any]) -> None:
        self._engine = engine

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        engine = self._engine()
        if engine is not None:
            guard_swapping(engine)


def guard_swapping(engine: Any) -> None:
    """Guard every handle that this DeepSpeed engine swaps with; without swapping nothing is changed. Raises RunError
    if a file that was written while the engine was built is incomplete."""
    optimizer = engine.optimizer
    swapper = getattr(optimizer, "optimizer_swapper", None)
    parameters = [parameter for parameter in engine.module.parameters() if getattr(parameter, "nvme_swapper", None)]
    if swapper is None and not parameters:
        return
    guards: list[_Guard] = []
    if swapper is not None:
        for name in ("aio_handle", "read_aio_handle", "write_aio_handle"):  # the pipelined one has two
            _replace_handle(swapper, name, guards)
        _replace_handle(swapper.gradient_swapper, "aio_handle", guards)
        for info in swapper.swap_params_info.values():
            for path in info.get_swap_paths():
                _check_file_size(path, info.numel() * swapper.swap_element_size, guards)
    for parameter_swapper in {id(p.nvme_swapper): p.nvme_swapper for p in parameters}.values():
        for name in ("aio_read_handle", "aio_write_handle"):
            _replace_handle(parameter_swapper, name, guards)
        for number, path in parameter_swapper.id_to_path.items():
            size = parameter_swapper.param_id_to_numel[number] * parameter_swapper.swap_element_size
            _check_file_size(path, size, guards)


class _Guard:
    """Wrapper of an I/O handle that checks reads and writes."""

    def __init__(self, handle: Any, all_guards: list[_Guard]) -> None:
        self._handle = handle
        self._all_guards = all_guards
        self._pending = 0
        self._first_written: list[tuple[str, int]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handle, name)

    def async_pwrite(self, buffer: Any, path: str, offset: int = 0) -> int:
        """Write after reserving room for the whole file."""
        try:
            if _make_room(path, offset + buffer.nbytes):
                self._first_written.append((path, offset + buffer.nbytes))
        except OSError as error:
            _stop(path, f"cannot be written ({error.strerror})", self._all_guards)
        return self._submitted(self._handle.async_pwrite(buffer, path, offset), path, "cannot be written")

    def async_pread(self, buffer: Any, path: str, offset: int = 0) -> int:
        """Read after checking that the file is complete."""
        _check_file_size(path, offset + buffer.nbytes, self._all_guards)
        return self._submitted(self._handle.async_pread(buffer, path, offset), path, "cannot be read")

    def wait(self) -> int:
        """Wait for pending operations; files created since the last wait must be complete."""
        self._pending = 0
        done = int(self._handle.wait())
        created, self._first_written = self._first_written, []
        for path, size in created:
            if _written_bytes(path) < size:
                _stop(path, "was not written in full: the disk refused it (dmesg shows why)", self._all_guards)
        return done

    def drain(self) -> None:
        """Wait for pending operations: a handle that is freed with some aborts the process."""
        if self._pending:
            self._pending = 0
            self._handle.wait()

    def _submitted(self, result: int, path: str, failure: str) -> int:
        if result != 0:
            _stop(path, failure, self._all_guards)
        self._pending += 1
        return result


def _replace_handle(holder: Any, name: str, guards: list[_Guard]) -> None:
    """Replace the handle `holder.name`; a handle with several holders gets one guard."""
    handle = getattr(holder, name, None)
    if handle is None or isinstance(handle, _Guard):
        return
    guard = next((guard for guard in guards if guard._handle is handle), None)
    if guard is None:
        guard = _Guard(handle, guards)
        guards.append(guard)
    setattr(holder, name, guard)


def _make_room(path: str, size: int) -> bool:
    """Reserve the file's blocks unless it has that size. Returns whether it did. Raises OSError without room."""
    try:
        if os.stat(path).st_size >= size:  # noqa: PTH116 (asked at every swap)
            return False
    except FileNotFoundError:
        pass
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
    try:
        # Not `os.posix_fallocate`: where the file system lacks the call, the C library writes every block instead.
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.fallocate(descriptor, 0, ctypes.c_int64(0), ctypes.c_int64(size)) == 0:
            return True
        code = ctypes.get_errno()
        if code in _NO_SUCH_CALL:
            return False
        raise OSError(code, os.strerror(code))
    finally:
        os.close(descriptor)


def _written_bytes(path: str) -> int:
    """Bytes from the start of the file up to the first reserved block without data."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return 0
    try:
        return os.lseek(descriptor, 0, os.SEEK_HOLE)
    finally:
        os.close(descriptor)


def _check_file_size(path: str, size: int, guards: list[_Guard]) -> None:
    """Raise RunError unless the file has `size` bytes."""
    try:
        actual = os.stat(path).st_size  # noqa: PTH116 (asked at every swap)
    except OSError as error:
        _stop(path, f"cannot be read ({error.strerror})", guards)
    if actual < size:
        _stop(path, f"has {actual} of {size} bytes: the disk is full, or was when it was written", guards)


def _stop(path: str, problem: str, guards: list[_Guard]) -> NoReturn:
    """Wait for pending operations, then raise RunError."""
    for guard in guards:
        guard.drain()
    folder = next((parent for parent in Path(path).parents if parent.exists()), Path("/"))
    raise RunError(
        f"swap file {path} {problem}; earlier checkpoints are intact. Free space in {folder} "
        f"({command('df', '-h', folder)}) or reconnect the disk, then continue with --resume"
    )
