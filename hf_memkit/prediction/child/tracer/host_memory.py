"""Measures the RAM of a script's tensors: weights before they are on the GPU, adapters merged on the host, states."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from hf_memkit.common.terms import Phase
from hf_memkit.prediction.traced_training import HostMemory

_KIB: Final = 1024


def anonymous_bytes() -> int:
    """RAM of this process that no file backs (proc_pid_status(5): RssAnon)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * _KIB
    return 0


@dataclass(slots=True)
class _File:
    """A file mapped into memory: its living tensors, and bytes of those that were written to, freed with the last."""

    tensors: int = 0
    written_bytes: int = 0


class HostWatch:
    """Counts storages of fake tensors on the CPU.

    Weights that are loaded in their stored dtype stay in their file (safetensors maps it), and the system can reclaim
    their RAM. Writing to one makes a copy (mmap(2): MAP_PRIVATE).
    """

    def __init__(self) -> None:
        self.peaks: dict[Phase, int] = {}  # most living bytes
        self._began, self._own = anonymous_bytes(), 0
        self._live: dict[int, tuple[weakref.ref[Any], _File | None]] = {}  # with the file that it is mapped from
        self._now = self._highest = 0
        self._pinned: set[int] = set()  # addresses of storages in page-locked memory
        self._loading: tuple[_File, torch.dtype | None] | None = None

    def training_begins(self) -> None:
        """Counts the process's memory so far as the script's own; later memory is the prediction's."""
        self._own = anonymous_bytes() - self._began

    def used(self) -> HostMemory:
        """The memory of the script itself, and the peaks of its tensors."""
        return HostMemory(self._own, dict(self.peaks))

    @contextlib.contextmanager
    def loading(self, stored: torch.dtype | None) -> Iterator[None]:
        """Within it tensors with the stored dtype are counted as mapped from a file."""
        self._loading = _File(), stored
        try:
            yield
        finally:
            self._loading = None

    def watch(self, tensor: torch.Tensor, operation: Any) -> None:
        """Counts the result of an operation."""
        storage = tensor.untyped_storage()
        address, size = storage._cdata, storage.nbytes()
        held = self._live.get(address)
        if held is None:
            file = self._loading[0] if self._loading is not None and self._loading[1] is tensor.dtype else None
            if file is None:
                self._add(size)
            else:
                file.tensors += 1
            freed = functools.partial(self._freed, address, size, file)
            self._live[address] = weakref.ref(storage, freed), file
        elif held[1] is not None and self._loading is None and _writes(operation):
            self._add(size)
            held[1].written_bytes += size
            self._live[address] = held[0], None

    def pin(self, tensor: torch.Tensor) -> None:
        """Counts what a tensor needs on top of its bytes in page-locked memory: torch rounds each of its allocations
        there up to a power of two (pytorch:aten/src/ATen/core/CachingHostAllocator.h, `allocate`)."""
        storage = tensor.untyped_storage()
        address, size = storage._cdata, storage.nbytes()
        if size == 0 or address in self._pinned:
            return
        rounding = (1 << (size - 1).bit_length()) - size
        self._pinned.add(address)
        self._add(rounding)
        weakref.finalize(storage, self._unpin, address, rounding)

    def _unpin(self, address: int, rounding: int) -> None:
        self._pinned.discard(address)
        self._now -= rounding

    def _add(self, size: int) -> None:
        self._now += size
        self._highest = max(self._highest, self._now)

    def _freed(self, address: int, size: int, file: _File | None, _: Any) -> None:
        del self._live[address]
        if file is None:
            self._now -= size
            return
        file.tensors -= 1
        if file.tensors == 0:
            self._now -= file.written_bytes

    def end_phase(self, phase: Phase) -> None:
        """Assigns everything since the last call to `phase`."""
        self.peaks[phase] = max(self.peaks.get(phase, 0), self._highest)
        self._highest = self._now


def _writes(operation: Any) -> bool:
    return bool(getattr(getattr(operation, "_schema", None), "is_mutable", False))
