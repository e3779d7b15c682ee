"""The CPU as if it were a GPU with an allocator. In: what a real training allocates. Out: a `MemoryReader`.

Every storage that an operator makes while `counting()` is entered is a real one of the training; it goes through the
caching allocator of `simulated_allocator.py` and is released there when it dies. What an operator uses inside itself
is not seen.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.diagnosis.simulated_allocator import SimulatedAllocator
from hf_memkit.prediction.allocator import OutOfDeviceMemory
from hf_memkit.prediction.allocator_blocks import Block
from hf_memkit.units import GIB


class CountedMemory:
    """A reader of real allocations.

    A tiny model's bytes count `scale` times, so that its megabytes fill a GPU of gigabytes: allocator and detector
    then work with sizes as they meet them. `capacity` in bytes, after that.
    """

    def __init__(self, capacity: int, *, scale: int) -> None:
        self.device: torch.device | None = torch.device("cpu")
        self.highest = 0
        self.full = False
        self._capacity = capacity
        self._scale = scale
        self._allocator = SimulatedAllocator(self._limit)
        self._known: dict[int, weakref.ref[Any]] = {}

    @contextmanager
    def counting(self, model: nn.Module) -> Iterator[None]:
        """Counts the model's parameters, and whatever is made until the end."""
        for parameter in (*model.parameters(), *model.buffers()):
            self._add(parameter)
        with _EachOperator(self._add):
            yield

    def bytes_of(self, tensors: Iterable[torch.Tensor]) -> int:
        """As they count here, each storage once."""
        storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}
        return self._scale * sum(storages.values())

    def read(self) -> dict[str, float]:
        allocator = self._allocator
        self._see_peak()
        return {
            "allocated_gib": allocator.allocated / GIB,
            "reserved_gib": allocator.reserved / GIB,
            "fragmentation_gib": (allocator.reserved - allocator.allocated) / GIB,
            "alloc_retries": allocator.retries,
            "allocator_ooms": 0,
        }

    def peak(self) -> dict[str, float]:
        self._see_peak()
        return {
            "peak_allocated_gib": self._allocator.peak_allocated / GIB,
            "peak_reserved_gib": self._allocator.peak_reserved / GIB,
        }

    def reset_peak(self) -> None:
        self._see_peak()
        self._allocator.reset_peak()

    def capacity(self) -> dict[str, float]:
        return {"capacity_gib": self._capacity / GIB}

    def _limit(self) -> int:
        return self._capacity

    def highest_so_far(self) -> int:
        """The highest allocated since the process began, in bytes."""
        self._see_peak()
        return self.highest

    def _see_peak(self) -> None:
        self.highest = max(self.highest, self._allocator.peak_allocated)

    def _add(self, tensor: torch.Tensor) -> None:
        if self.full or tensor.device.type != "cpu":
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known or not storage.nbytes():
            return
        try:
            block = self._allocator.allocate(storage.nbytes() * self._scale, "")
        except OutOfDeviceMemory:  # the real memory is not full: a run that comes here is one for a larger GPU
            self.full = True
            return
        self._known[key] = weakref.ref(storage, self._released(key, block))

    def _released(self, key: int, block: Block) -> Callable[[object], None]:
        def gone(_: object) -> None:
            del self._known[key]
            self._allocator.release(block)

        return gone


class _EachOperator(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's class has no types
    """Tells of each tensor that an operator returns."""

    def __init__(self, tell: Callable[[torch.Tensor], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tell = tell

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in (result,) if isinstance(result, torch.Tensor) else tree_leaves(result):
            if isinstance(value, torch.Tensor):
                self._tell(value)
        return result
