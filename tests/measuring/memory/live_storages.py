"""Counts the bytes of all tensors' storages on the CPU, in place of an allocator's counters.

Every storage that an operator of torch returns counts until it is freed. Memory inside one operator does not count, so
the counts are exact and reproducible. Each storage has the label that was set when it was made; the labels show what
the peak consists of.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

GIB = 2**30


class LiveStorages(TorchDispatchMode):
    """A memory reader with the counters of a GPU's allocator. Active inside `with`."""

    def __init__(self) -> None:
        super().__init__()
        self.device: torch.device | None = torch.device("cpu")
        self.label = "before"
        self.live: dict[str, int] = {}
        self.allocated = 0
        self.high = 0
        self.step_high = 0
        self.at_step_high: dict[str, int] = {}
        self._known: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in tree_iter((result, args)):
            if isinstance(value, torch.Tensor):
                self.track(value)
        return result

    def track(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size, label = storage._cdata, storage.nbytes(), self.label
        if tensor.device.type != "cpu" or key in self._known:
            return

        def freed(_: Any) -> None:
            self.allocated -= size
            self.live[label] -= size
            del self._known[key]

        self._known[key] = weakref.ref(storage, freed)
        self.allocated += size
        self.live[label] = self.live.get(label, 0) + size
        self.high = max(self.high, self.allocated)
        if self.allocated > self.step_high:
            self.step_high, self.at_step_high = self.allocated, dict(self.live)

    def end_step(self) -> dict[str, int]:
        """Bytes by label at the peak since the last call."""
        peak, self.step_high = self.at_step_high, self.allocated
        self.at_step_high = dict(self.live)
        return peak

    def read(self) -> dict[str, float]:
        return {"allocated_gib": self.allocated / GIB, "reserved_gib": self.allocated / GIB}

    def peak(self) -> dict[str, float]:
        return {"peak_allocated_gib": self.high / GIB, "peak_reserved_gib": self.high / GIB}

    def reset_peak(self) -> None:
        self.high = self.allocated

    def capacity(self) -> dict[str, float]:
        return {"capacity_gib": 1.0}
