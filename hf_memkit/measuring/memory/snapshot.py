"""The allocator's own picture of itself. In: torch's CUDA allocator. Out: a file of plain JSON; nothing is pickled."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

_MOST_FRAMES = 16

_SEGMENT = (
    "device",
    "address",
    "total_size",
    "allocated_size",
    "active_size",
    "stream",
    "segment_type",
    "is_expandable",
)
_BLOCK = ("address", "size", "requested_size", "state")


def record_history() -> None:
    """From now on each block knows the lines that made it, for a look at the stack each (torch/cuda/memory.py)."""
    torch.cuda.memory._record_memory_history("state", context="alloc", stacks="python")


def stop_history() -> None:
    """Nothing more is recorded. Does nothing where nothing was."""
    torch.cuda.memory._record_memory_history(None)


def write_snapshot(path: str | Path) -> int:
    """Writes the allocator's segments, and returns how many there are: `{"segments": [{…, "blocks": [{…, "frames":
    ["file:line function", …]}]}]}`, sizes in bytes as in `torch.cuda.memory_snapshot`, 16 lines a block."""
    segments = [_segment(segment) for segment in torch.cuda.memory._snapshot()["segments"]]
    with Path(path).open("w", encoding="utf-8") as file:
        json.dump({"segments": segments}, file, separators=(",", ":"))
    return len(segments)


def _segment(segment: Mapping[str, Any]) -> dict[str, Any]:
    found = {name: segment[name] for name in _SEGMENT if name in segment}
    return {**found, "blocks": [_block(block) for block in segment["blocks"]]}


def _block(block: Mapping[str, Any]) -> dict[str, Any]:
    found = {name: block[name] for name in _BLOCK if name in block}
    frames = [f"{f['filename']}:{f['line']} {f['name']}" for f in block.get("frames", ())[:_MOST_FRAMES]]
    return {**found, "frames": frames} if frames else found
