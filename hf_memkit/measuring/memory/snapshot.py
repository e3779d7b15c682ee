"""Snapshot of torch's CUDA allocator as plain JSON, without pickles."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

_MOST_FRAMES = 16

_SEGMENT = (
    "device", "address", "total_size", "allocated_size", "active_size", "stream", "segment_type", "is_expandable",
)  # fmt: skip
_BLOCK = ("address", "size", "requested_size", "state")


def record_history() -> None:
    """Record the source lines of each allocation from now on, with one stack walk each (torch/cuda/memory.py)."""
    torch.cuda.memory._record_memory_history("state", context="alloc", stacks="python")


def stop_history() -> None:
    """Stop recording, if recording."""
    torch.cuda.memory._record_memory_history(None)


def write_snapshot(path: str | Path) -> int:
    """Write the allocator's segments; returns their number. `{"segments": [{…, "blocks": [{…, "frames": ["file:line
    function", …]}]}]}`, sizes in bytes as in `torch.cuda.memory_snapshot`, 16 lines a block."""
    segments: list[dict[str, Any]] = []
    for segment in torch.cuda.memory._snapshot()["segments"]:
        blocks = []
        for block in segment["blocks"]:
            fields = {name: block[name] for name in _BLOCK if name in block}
            frames = [f"{f['filename']}:{f['line']} {f['name']}" for f in block.get("frames", ())[:_MOST_FRAMES]]
            blocks.append({**fields, "frames": frames} if frames else fields)
        segments.append({**{name: segment[name] for name in _SEGMENT if name in segment}, "blocks": blocks})
    Path(path).unlink(missing_ok=True)  # a symbolic link too: "w" would write into the file that it names
    with Path(path).open("x", encoding="utf-8") as file:
        json.dump({"segments": segments}, file, separators=(",", ":"))
    return len(segments)
