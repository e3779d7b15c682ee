"""The model beside a recording of the real allocator, block by block.

What the model decides is compared: the address of every block, and when the device is asked for how much. What it
cannot know is taken from the recording: the addresses that the driver gives, and when memory goes back to the device,
because that hangs on what else is on the GPU and on calls of `torch.cuda.empty_cache()`.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from typing import Final

from benchmarks.allocator_history import GIVEN, GIVEN_BACK, Entry, History
from hf_memkit.catalog.library_versions import FreeOrder
from hf_memkit.prediction.allocator.allocator import CachingAllocator
from hf_memkit.prediction.allocator.blocks import Block, DeviceMemory, address_range
from hf_memkit.prediction.allocator.replay import replay
from hf_memkit.prediction.allocator.settings import MAX_SMALL_BLOCK, AllocatorSettings

_ADDRESSES: Final = 2**48


@dataclass(frozen=True, slots=True)
class Divergence:
    """Where the model first does otherwise.

    Attributes:
        entry: index into the history's entries.
        what: what was recorded, and what the model does there.
    """

    entry: int
    what: str


@dataclass(frozen=True, slots=True)
class Comparison:
    """The model and a recording.

    Attributes:
        replayed_peak_reserved_bytes: of the model on its own, given only the blocks and the moments at which memory
            went back; and of the model that followed the recording, where it did so to the end.
        recorded_peak_reserved_bytes: of the recording.
        divergence: where the model, following the recording, would first have done otherwise; None: nowhere.
    """

    replayed_peak_reserved_bytes: int
    recorded_peak_reserved_bytes: int
    divergence: Divergence | None

    @property
    def exact(self) -> bool:
        return self.divergence is None


def compare(
    history: History, settings: AllocatorSettings | None = None, *, order: FreeOrder | None = None
) -> Comparison:
    """Lets the model follow a recording, up to the first difference.

    Args:
        history: the recording.
        settings: instead of those that it was made with.
        order: as for `CachingAllocator`, instead of that of the torch which recorded it.
    """
    # Collection is among what goes back when the recording says so.
    settings = replace(settings or history.settings, garbage_collection_threshold=0.0, memory_fraction=1.0)
    order = order or history.order
    model = _Model(settings, history.gpu_bytes, order)
    divergence = None
    for place, entry in enumerate(history.entries):
        try:
            model.follow(entry)
        except _DivergesError as error:
            divergence = Divergence(place, str(error))
            break
    if divergence is None:
        peak = model.allocator.peak_reserved
    else:
        peak = replay(
            history.trace,
            settings,
            device=DeviceMemory(total_bytes=history.gpu_bytes),
            releases=history.releases,
            order=order,
        ).peak_reserved_bytes
    return Comparison(peak, history.peak_reserved_bytes, divergence)


class _DivergesError(Exception):
    """The model does otherwise than the recording; the message says how."""


class _Recording(DeviceMemory):
    """A device that gives what the recording says, where it says so.

    Attributes:
        coming: what the real allocator got of the device for the block that it hands out next.
    """

    def __init__(self, gpu_bytes: int | None) -> None:
        super().__init__()
        self.coming: deque[Entry] = deque()
        self._range = _ADDRESSES if gpu_bytes is None else address_range(gpu_bytes)

    def segment(self, size_bytes: int) -> int | None:
        return self._next("segment_alloc", size_bytes).address

    def reserve_addresses(self, size_bytes: int) -> tuple[int, int]:
        if not self.coming:
            raise _DivergesError("the model begins an expandable segment, the real allocator asks for nothing")
        return self.coming[0].address, max(self._range, size_bytes)

    def map_pages(self, address: int, size_bytes: int) -> bool:
        entry = self._next("segment_map", size_bytes)
        if entry.address != address:
            raise _DivergesError(f"pages: recorded at {entry.address:#x}, the model puts them at {address:#x}")
        return True

    def give_back(self, size_bytes: int) -> None:
        pass

    def _next(self, action: str, size_bytes: int) -> Entry:
        if not self.coming:
            raise _DivergesError(f"the model asks the device for {size_bytes} bytes, the real allocator for nothing")
        entry = self.coming.popleft()
        if (entry.action, entry.size_bytes) != (action, size_bytes):
            raise _DivergesError(
                f"recorded: {entry.action} of {entry.size_bytes} bytes; the model: {action} of {size_bytes}"
            )
        return entry


class _Model:
    """The model on its way through a recording."""

    def __init__(self, settings: AllocatorSettings, gpu_bytes: int | None, order: FreeOrder) -> None:
        self._recording = _Recording(gpu_bytes)
        self.allocator = CachingAllocator(settings, self._recording, order=order)
        self._blocks: dict[int, Block] = {}
        self._returning: list[Entry] = []  # what the real allocator gave back since the last block

    def follow(self, entry: Entry) -> None:
        if entry.action in GIVEN:
            self._recording.coming.append(entry)
        elif entry.action in GIVEN_BACK:
            _map_what_failed(self.allocator, self._recording)
            self._returning.append(entry)
        elif entry.action == "alloc":
            self._allocate(entry)
        else:
            _map_what_failed(self.allocator, self._recording)
            self._give_back()
            if entry.action == "free_completed":
                self.allocator.free(self._blocks.pop(entry.address))

    def _allocate(self, entry: Entry) -> None:
        coming = self._recording.coming
        # A search that found nothing, then memory given back, then new memory, without another search; unless there
        # was something to find: then it went back before, by a call of empty_cache().
        new = bool(self._returning and coming) and not _has_free(self.allocator, entry)
        self._give_back()
        block = self.allocator.malloc(entry.size_bytes, entry.stream, search=not new)
        if coming:
            raise _DivergesError(
                f"recorded: {coming[0].action} of {coming[0].size_bytes} bytes; the model has a free block"
            )
        if block.address != entry.address:
            raise _DivergesError(
                f"a block of {entry.size_bytes} bytes: recorded at {entry.address:#x}, "
                f"the model puts it at {block.address:#x}"
            )
        self._blocks[entry.address] = block

    def _give_back(self) -> None:
        for entry in self._returning:
            _give_back(self.allocator, entry)
        self._returning.clear()


def _has_free(allocator: CachingAllocator, entry: Entry) -> bool:
    """Whether a free block would serve a request."""
    size = allocator.settings.rounded(entry.size_bytes)
    pool = allocator.small if size <= MAX_SMALL_BLOCK else allocator.large
    block = allocator._free_block(pool, size, entry.stream)
    if block is not None:
        pool.add(block)
    return block is not None


def _map_what_failed(allocator: CachingAllocator, recording: _Recording) -> None:
    """Pages that were mapped for a block that then did not come: the device had not enough for all of them."""
    while recording.coming:
        entry = recording.coming[0]
        for pool in (allocator.small, allocator.large):
            for *_, block in pool.unmapped:
                if entry.action == "segment_map" and block.address == entry.address:
                    allocator.map_pages(block, entry.size_bytes)
                    break
        if recording.coming and recording.coming[0] is entry:
            raise _DivergesError(f"recorded: {entry.action} of {entry.size_bytes} bytes, for no block")


def _give_back(allocator: CachingAllocator, entry: Entry) -> None:
    """The free block of the model that the recording gives back."""
    for pool in (allocator.small, allocator.large):
        for *_, block in pool.free:
            if not block.address <= entry.address < block.address + block.size:
                continue
            if block.expandable is not None and entry.action == "segment_unmap":
                pages = allocator.unmap_pages(block)
            elif block.expandable is None and not block.is_split and entry.action == "segment_free":
                pages = block.address, block.size
                allocator.release_block(block)
            else:
                continue
            if pages != (entry.address, entry.size_bytes):
                raise _DivergesError(
                    f"given back: recorded {entry.size_bytes} bytes at {entry.address:#x}, "
                    f"the model {pages[1]} at {pages[0]:#x}"
                )
            return
    raise _DivergesError(
        f"recorded: {entry.action} of {entry.size_bytes} bytes at {entry.address:#x}; the model has none such free"
    )
