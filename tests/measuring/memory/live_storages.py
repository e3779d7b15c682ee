"""An allocator's counters where there is no allocator to ask: the bytes of all tensors' storages, on the CPU.

Every storage that an operator of torch returns is counted until it is freed. Memory inside one operator is not seen,
so the counts are exact and the same each time. Each storage carries the label that was set when it was made: it says
what the peak is made of without any subtraction.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

GIB = 2**30


class LiveStorages(TorchDispatchMode):
    """A reader with `allocated_gib` and its peak, as a GPU's allocator has them. Active inside `with`."""

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
        """What lived at the highest point since the last call, by label."""
        highest, self.step_high = self.at_step_high, self.allocated
        self.at_step_high = dict(self.live)
        return highest

    def read(self) -> dict[str, float]:
        return {"allocated_gib": self.allocated / GIB, "reserved_gib": self.allocated / GIB}

    def peak(self) -> dict[str, float]:
        return {"peak_allocated_gib": self.high / GIB, "peak_reserved_gib": self.high / GIB}

    def reset_peak(self) -> None:
        self.high = self.allocated

    def capacity(self) -> dict[str, float]:
        return {"capacity_gib": 1.0}
