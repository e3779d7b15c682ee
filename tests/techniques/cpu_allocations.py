"""What torch's CPU allocator hands out: it sees inside custom operators too, which no dispatch mode does."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.profiler import ProfilerActivity, profile


def peak_bytes(action: Callable[[], Any]) -> int:
    """The most bytes that live at once while `action` runs, beyond what lived before; after one run to warm up."""
    action()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        action()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        recorded.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    changes = sorted((event["ts"], event["args"]["Bytes"]) for event in events if event.get("name") == "[memory]")
    assert changes
    live = peak = 0
    for _, change in changes:
        live += change
        peak = max(peak, live)
    return peak


def saved_bytes(action: Callable[[], Any], counts: Callable[[torch.Tensor], bool] = lambda _: True) -> int:
    """Bytes of the storages that autograd keeps for backward while `action` runs, of tensors that `counts` takes."""
    seen: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if counts(tensor):
            seen[tensor.untyped_storage().data_ptr()] = tensor  # kept alive, so that no address is used twice
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        kept = action()
    total = sum(tensor.untyped_storage().nbytes() for tensor in seen.values())
    del kept
    return total
