"""The allocator's own picture of itself, as plain JSON. In: torch's CUDA allocator. Out: a file; nothing is pickled.

A snapshot without history says which blocks are in use and which are free. With it, also which line of code made each
block; the allocator then looks at the stack at every allocation, which costs time, so it is for those who ask.
"""

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
    """From now on each block knows the Python lines that made it (torch 2.13: torch/cuda/memory.py)."""
    torch.cuda.memory._record_memory_history("state", context="alloc", stacks="python")


def stop_history() -> None:
    """Nothing more is recorded. Does nothing where nothing was."""
    torch.cuda.memory._record_memory_history(None)


def write_snapshot(path: str | Path) -> int:
    """Writes the allocator's segments and blocks to `path`, and returns how many segments there are.

    Sizes and addresses are in bytes, as `torch.cuda.memory_snapshot` gives them; of each block's stack the innermost
    16 lines. The result is `{"segments": [{…, "blocks": [{…, "frames": ["file:line function", …]}]}]}`.

    Raises:
        OSError: `path` cannot be written.
        RuntimeError: this torch has no CUDA.
    """
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
