"""Recorded histories of the real allocator: recorded on a GPU, and read.

A history is what `torch.cuda.memory._snapshot()` returns, as JSON: `device_traces` holds a list a device of entries
`{"action", "addr", "size", "stream"}` (`device_free` instead of `addr` where it ran out of memory), in order. It has
to begin before the process's first allocation; `record_history` records one so.

```
history.json ──> History ──> Trace ──> replay            (the model on its own)
                    └──────> compare: the model follows the recording, and stops where it would have done otherwise
```
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from hf_memkit.catalog.library_versions import FreeOrder, free_order
from hf_memkit.common.errors import InputError, RunError
from hf_memkit.common.terms import CATEGORIES
from hf_memkit.prediction.allocator.settings import AllocatorSettings, parse_settings
from hf_memkit.prediction.trace.trace import Trace

GIVEN: Final = ("segment_alloc", "segment_map")
GIVEN_BACK: Final = ("segment_free", "segment_unmap")
_OTHERS: Final = ("alloc", "free_requested", "free_completed", "snapshot", "annotate", "oom")
"""All actions of torch 2.14 (c10/core/CachingDeviceAllocator.h, `parseTraceEntryAction`)."""
_COUNTERS: Final = {
    "peak_allocated_bytes": "allocated_bytes.all.peak",
    "peak_requested_bytes": "requested_bytes.all.peak",
    "peak_reserved_bytes": "reserved_bytes.all.peak",
    "retries": "num_alloc_retries",
    "ooms": "num_ooms",
}


@dataclass(frozen=True, slots=True)
class Entry:
    """One thing that the allocator did.

    Attributes:
        action: as torch names it.
        address: of the block, segment or pages; 0 where it ran out of memory.
        size_bytes: of a block: as asked for; of a segment or pages: what the device gave or got back.
        stream: the stream that the memory belongs to.
    """

    action: str
    address: int
    size_bytes: int
    stream: int


@dataclass(slots=True)
class History:
    """A recording of one device, from the process's first allocation on.

    Attributes:
        entries: everything recorded.
        settings: the options it ran with.
        trace: the blocks as storages, made at `alloc` and freed at `free_completed`, which is when another can have
            their memory. What they are is not known: all are `other`.
        releases: indexes of the trace's events before which memory went back to the device: it ran short, or somebody
            called `torch.cuda.empty_cache()`.
        peak_reserved_bytes: the most that the device had given.
        out_of_memory: how many allocations failed.
        gpu_bytes: what the GPU has; None where the recording does not say (`recorded.total_bytes`).
        order: what decided between free blocks of equal size, by `recorded.torch`; as in torch 2.13 if that is absent.
    """

    entries: tuple[Entry, ...]
    settings: AllocatorSettings
    trace: Trace
    releases: frozenset[int] = frozenset()
    peak_reserved_bytes: int = 0
    out_of_memory: int = 0
    gpu_bytes: int | None = None
    order: FreeOrder = "segment"


def read_history(source: Path | str | Mapping[str, Any], device: int | None = None) -> History:
    """A history from a file (`.json` or `.json.gz`) or from its content.

    Args:
        source: the file, or what stands in it.
        device: which device's; None: the only one that has entries.

    Raises:
        InputError: it is no such history, began too late, or has what is not modelled (memory pools of CUDA graphs).
    """
    name, content = ("the history", source) if isinstance(source, Mapping) else (str(source), _load(Path(source)))
    traces = content.get("device_traces")
    if not isinstance(traces, list):
        raise InputError(f"{name}: has no device_traces, which torch.cuda.memory._snapshot() writes")
    used = [index for index, entries in enumerate(traces) if entries]
    if device is None:
        if len(used) != 1:
            raise InputError(f"{name}: devices with entries: {used or 'none'}; name one with device=N")
        device = used[0]
    elif device not in used:
        raise InputError(f"{name}: device {device} has no entries; those that have: {used or 'none'}")
    entries = tuple(_entries(name, traces[device]))
    history = History(entries, _settings(content), Trace(operations=[""], modules=[""]))
    _fill(name, history)
    recorded = content.get("recorded")
    if isinstance(recorded, Mapping):
        total, version = recorded.get("total_bytes"), recorded.get("torch")
        history.gpu_bytes = total if isinstance(total, int) else None
        history.order = free_order(version) if isinstance(version, str) else "segment"
    return history


def _load(path: Path) -> Mapping[str, Any]:
    try:
        data = path.read_bytes()
        content = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror or error})") from error
    except (ValueError, EOFError, RecursionError) as error:
        raise InputError(f"{path}: is not JSON ({error})") from error
    if not isinstance(content, dict):
        raise InputError(f"{path}: is not the JSON of a snapshot")
    return content


def _entries(name: str, rows: Iterable[Any]) -> Iterable[Entry]:
    for place, row in enumerate(rows):
        try:
            action, size, stream = str(row["action"]), int(row["size"]), int(row.get("stream", 0))
            address = 0 if action == "oom" else int(row["addr"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise InputError(f"{name}: entry {place} is none of torch's: {row!r}") from error
        if action not in (*GIVEN, *GIVEN_BACK, *_OTHERS):
            raise InputError(f"{name}: entry {place} has the action {action!r}, which this torch does not know")
        if any(row.get("pool_id") or ()):
            raise InputError(f"{name}: entry {place} belongs to a memory pool of its own, which is not modelled")
        yield Entry(action, address, size, stream)


def _settings(content: Mapping[str, Any]) -> AllocatorSettings:
    """What `allocator_settings` of a snapshot says: the text that torch read, under the variable's name."""
    found = content.get("allocator_settings")
    for key, value in found.items() if isinstance(found, Mapping) else ():
        if key.endswith("ALLOC_CONF") and isinstance(value, str):
            return parse_settings(value)[0]
    return AllocatorSettings()


def _fill(name: str, history: History) -> None:
    """The trace, the releases and the peak, from the entries."""
    trace, live, releases, reserved = history.trace, dict[int, int](), set[int](), 0
    other = CATEGORIES.index("other")
    for place, entry in enumerate(history.entries):
        if entry.action == "alloc":
            live[entry.address] = trace.add(entry.size_bytes, other, stream=entry.stream)
            trace.events.append(live[entry.address])
        elif entry.action == "free_completed":
            number = live.pop(entry.address, None)
            if number is None:
                raise InputError(
                    f"{name}: entry {place} frees a block that was made before the recording began; "
                    "record from the start of the process"
                )
            trace.events.append(-number)
        elif entry.action in GIVEN:
            reserved += entry.size_bytes
            history.peak_reserved_bytes = max(history.peak_reserved_bytes, reserved)
        elif entry.action in GIVEN_BACK:
            reserved -= entry.size_bytes
            releases.add(len(trace.events))
        elif entry.action == "oom":
            history.out_of_memory += 1
    if reserved < 0:
        raise InputError(f"{name}: more memory went back than was given: the recording began too late")
    history.releases = frozenset(releases)


@contextmanager
def record_history(path: Path | str, device: int = 0) -> Iterator[None]:
    """Records everything that the allocator does inside, and writes it to `path` when that ends, also with an error.

    Stack frames are left out: they would take most of the time and of the file. The file holds `device_traces` and
    `allocator_settings` as in torch's snapshot, and `recorded`: versions, the GPU, its bytes, what this process may
    take of it, and torch's own counters.

    Args:
        path: `.json`, or `.json.gz`, which is much smaller.
        device: which GPU.

    Raises:
        RunError: there is no CUDA device, or the allocator has memory of it already: record in a fresh process, from
            before anything is put on the GPU.
    """
    import torch

    path = Path(path)
    if not torch.cuda.is_available():
        raise RunError("no CUDA device: an allocator's history can be recorded only on one")
    torch.cuda.init()  # type: ignore[no-untyped-call]
    held = torch.cuda.memory_reserved(device)
    if held:
        raise RunError(
            f"the allocator holds {held} bytes of device {device} already: record from the start of a process"
        )
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    torch.cuda.reset_peak_memory_stats(device)
    torch.cuda.memory._record_memory_history(enabled="all", context=None, stacks="python")
    try:
        yield
    finally:
        try:
            snapshot: dict[str, Any] = torch.cuda.memory._snapshot()
            counters = torch.cuda.memory_stats(device)
        finally:
            torch.cuda.memory._record_memory_history(enabled=None)
        content = {
            "device_traces": [_plain(entries) for entries in snapshot["device_traces"]],
            "allocator_settings": _texts(snapshot.get("allocator_settings")),
            "recorded": {
                "torch": torch.__version__,
                "cuda": torch.version.cuda,
                "device": device,
                "device_name": torch.cuda.get_device_name(device),
                "total_bytes": total_bytes,
                "free_bytes": free_bytes,
                "memory_fraction": torch.cuda.get_per_process_memory_fraction(device),
                **{name: int(counters.get(key, 0)) for name, key in _COUNTERS.items()},
            },
        }
        data = json.dumps(content, separators=(",", ":")).encode()
        path.write_bytes(gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)


def _plain(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The entries with what the replay needs, in types that JSON has."""
    return [
        {
            "action": entry["action"],
            **{key: int(entry[key]) for key in ("addr", "device_free", "size", "stream") if key in entry},
            **({"pool_id": [int(part) for part in entry["pool_id"]]} if any(entry.get("pool_id") or ()) else {}),
        }
        for entry in entries
    ]


def _texts(settings: Any) -> dict[str, str]:
    """The variable's text, under its name; the other values of a snapshot's settings follow from it."""
    found = settings.items() if isinstance(settings, dict) else ()
    return {str(key): value for key, value in found if isinstance(value, str) and str(key).endswith("ALLOC_CONF")}
