"""What a reader of memory counters is, and all readers as one. In: readers. Out: flat numbers by name.

No reader synchronises the device, collects garbage or empties a cache. A number that a device cannot give is absent,
never zero.
"""

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
    """One source of memory counters; a subclass inherits the answer that there is nothing.

    A reader may have two more methods: `mark() -> Mark`, what `read` and `peak` say of the allocator in one cheap
    call; and `refresh()`, after which the next `read` looks again even if it looked a moment ago.
    """

    device: torch.device | None = None
    """The device that the counters `*allocated_gib` are about, or None."""

    def read(self) -> dict[str, float]:
        """Counters as they are now."""
        return {}

    def peak(self) -> dict[str, float]:
        """The highest values since the last `reset_peak`, names beginning with `peak_`."""
        return {}

    def reset_peak(self) -> None:
        """Lets the peaks start again from what is in use now."""
        return None

    def capacity(self) -> dict[str, float]:
        """What does not change while the process lives."""
        return {}


class Mark(NamedTuple):
    """The allocator at one moment, in bytes; None for what the device cannot tell."""

    allocated: int | None = None
    peak_allocated: int | None = None
    peak_reserved: int | None = None


class Every:
    """Says when an expensive counter may be read again: not more often than every `seconds`."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._next_s = -math.inf

    def is_due(self) -> bool:
        now_s = time.monotonic()
        if now_s < self._next_s:
            return False
        self._next_s = now_s + self._seconds
        return True

    def now(self) -> None:
        """The next question is answered with yes."""
        self._next_s = -math.inf


class Occasional(MemoryReader):
    """A reader of numbers beside the device's allocator, that looks every `seconds` at most."""

    def __init__(self, seconds: float) -> None:
        self._every = Every(seconds)

    def refresh(self) -> None:
        self._every.now()


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
        """The device whose allocator is being read."""
        return None if self._allocator is None else self._allocator.device

    def read(self, *, fresh: bool = False) -> dict[str, float]:
        """Every reader's counters; with `fresh` also those that are not read each time."""
        if fresh:
            for reader in self.readers:
                if hasattr(reader, "refresh"):
                    reader.refresh()
        return self._asked("read", self.readers)

    def peak(self) -> dict[str, float]:
        return self._asked("peak", self.readers)

    def capacity(self) -> dict[str, float]:
        return self._asked("capacity", self.readers)

    def reset_peak(self) -> None:
        if self._allocator is None:
            return
        try:
            self._allocator.reset_peak()
        except Exception as error:
            self._note(self._allocator, "reset_peak", error)

    def mark(self) -> Mark:
        """The allocator now; asked at every boundary."""
        if self._allocator is None:
            return Mark()
        if self._mark is None:
            return self._mark_of_two(self._allocator)
        try:
            return self._mark()
        except Exception as error:
            self._note(self._allocator, "mark", error)
            return Mark()

    def _mark_of_two(self, reader: MemoryReader) -> Mark:
        """From a reader that has no `mark`."""
        sizes = {**self._asked("read", [reader]), **self._asked("peak", [reader])}
        names = ("allocated_gib", "peak_allocated_gib", "peak_reserved_gib")
        return Mark(*(round(sizes[name] * GIB) if name in sizes else None for name in names))

    def _asked(self, method: str, readers: Iterable[MemoryReader]) -> dict[str, float]:
        found: dict[str, float] = {}
        for reader in readers:
            try:
                for name, value in getattr(reader, method)().items():
                    if value is not None and math.isfinite(value):
                        found[name] = value
            except Exception as error:
                self._note(reader, method, error)
        return found

    def _note(self, reader: MemoryReader, method: str, error: Exception) -> None:
        self.errors.setdefault(f"{type(reader).__name__}.{method}", describe(error))
