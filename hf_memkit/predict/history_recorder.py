"""Records what the allocator of a CUDA device does, as a history that `read_history` reads."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from hf_memkit.errors import RunError

__all__ = ["record_history"]

_COUNTERS: Final = {
    "peak_allocated_bytes": "allocated_bytes.all.peak",
    "peak_requested_bytes": "requested_bytes.all.peak",
    "peak_reserved_bytes": "reserved_bytes.all.peak",
    "retries": "num_alloc_retries",
    "ooms": "num_ooms",
}


@contextmanager
def record_history(path: Path | str, device: int = 0) -> Iterator[None]:
    """Records everything that the allocator does inside, and writes it to `path` when that ends, also with an error.

    Stack frames are left out: they would take most of the time and of the file. The file holds `device_traces` and
    `allocator_settings` as in torch's snapshot, and `recorded`: versions, the card, its bytes, what this process may
    take of it, and torch's own counters.

    Args:
        path: `.json`, or `.json.gz`, which is much smaller.
        device: which card.

    Raises:
        RunError: there is no CUDA device, or the allocator has memory of it already: record in a fresh process, from
            before anything is put on the card.
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
