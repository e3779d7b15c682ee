"""Interface of readers of memory counters, and a group of readers. No reader synchronises the device, collects garbage
or empties a cache. Numbers that a device lacks are absent, never zero."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import torch

from hf_memkit.common.units import GIB
from hf_memkit.measuring.memory.error_barrier import describe


@runtime_checkable
class MemoryReader(Protocol):
    """One source of memory counters, empty by default. A reader may also have `mark() -> Mark`, the allocator's values
    of `read` and `peak` in one cheap call, and `refresh()`, after which the next `read` ignores its rate limit."""

    device: torch.device | None = None
    """The device of the counters `*allocated_gib`, or None."""

    def read(self) -> dict[str, float]:
        """Current counters."""
        return {}

    def peak(self) -> dict[str, float]:
        """The highest values since the last `reset_peak`, under names with `peak_`."""
        return {}

    def reset_peak(self) -> None:
        """Restart the peaks from the current use."""
        return None

    def capacity(self) -> dict[str, float]:
        """Values that are constant for the process."""
        return {}


class Mark(NamedTuple):
    """The allocator at one moment, in bytes; None for values that the device lacks."""

    allocated: int | None = None
    peak_allocated: int | None = None
    peak_reserved: int | None = None


class RateLimit:
    """Limits an expensive read to one in `seconds`."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._next_s = -math.inf

    def is_due(self) -> bool:
        now_s = time.monotonic()
        if now_s < self._next_s:
            return False
        self._next_s = now_s + self._seconds
        return True

    def reset(self) -> None:
        self._next_s = -math.inf


class RateLimitedReader(MemoryReader):
    """A reader of counters outside the device's allocator, at most once in `seconds`."""

    def __init__(self, seconds: float) -> None:
        self._limit = RateLimit(seconds)

    def refresh(self) -> None:
        self._limit.reset()


class ReaderGroup:
    """All readers as one. A reader that raises loses its numbers for that call; `errors` keeps its first message."""

    def __init__(self, readers: Sequence[MemoryReader]) -> None:
        self.readers = tuple(readers)
        self.errors: dict[str, str] = {}
        with_device = [r for r in self.readers if getattr(r, "device", None) is not None]
        self._allocator: MemoryReader | None = with_device[0] if with_device else None
        self._mark: Callable[[], Mark] | None = getattr(self._allocator, "mark", None)

    @property
    def device(self) -> torch.device | None:
        """The device whose allocator is measured."""
        return None if self._allocator is None else self._allocator.device

    def read(self, *, fresh: bool = False) -> dict[str, float]:
        """Every reader's counters; `fresh`: without rate limits."""
        if fresh:
            for reader in self.readers:
                if hasattr(reader, "refresh"):
                    reader.refresh()
        return self._collect("read", self.readers)

    def peak(self) -> dict[str, float]:
        return self._collect("peak", self.readers)

    def capacity(self) -> dict[str, float]:
        return self._collect("capacity", self.readers)

    def reset_peak(self) -> None:
        if self._allocator is None:
            return
        try:
            self._allocator.reset_peak()
        except Exception as error:
            self._note(self._allocator, "reset_peak", error)

    def mark(self) -> Mark:
        """The allocator's current values; called at every boundary."""
        if self._allocator is None:
            return Mark()
        if self._mark is None:
            sizes = {**self._collect("read", [self._allocator]), **self._collect("peak", [self._allocator])}
            names = ("allocated_gib", "peak_allocated_gib", "peak_reserved_gib")
            return Mark(*(round(sizes[name] * GIB) if name in sizes else None for name in names))
        try:
            return self._mark()
        except Exception as error:
            self._note(self._allocator, "mark", error)
            return Mark()

    def _collect(self, method: str, readers: Iterable[MemoryReader]) -> dict[str, float]:
        numbers: dict[str, float] = {}
        for reader in readers:
            try:
                for name, value in getattr(reader, method)().items():
                    if value is not None and math.isfinite(value):
                        numbers[name] = value
            except Exception as error:
                self._note(reader, method, error)
        return numbers

    def _note(self, reader: MemoryReader, method: str, error: Exception) -> None:
        self.errors.setdefault(f"{type(reader).__name__}.{method}", describe(error))
