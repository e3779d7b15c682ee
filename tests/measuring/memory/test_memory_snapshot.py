from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_memkit.measuring.memory.snapshot import write_snapshot

FRAME = {"filename": "train.py", "line": 7, "name": "forward", "fx_node_op": "unused"}
# The shape that torch 2.13 documents in torch/cuda/memory.py, `_snapshot`.
SNAPSHOT: dict[str, Any] = {
    "segments": [
        {
            "device": 0, "address": 0x7F0000000000, "total_size": 2097152, "allocated_size": 512, "active_size": 512,
            "stream": 0, "segment_type": "small", "segment_pool_id": (0, 0), "is_expandable": False, "frames": [],
            "blocks": [
                {
                    "address": 0x7F0000000000, "size": 512, "requested_size": 100, "state": "active_allocated",
                    "frames": [FRAME] * 40,
                },
                {"address": 0x7F0000000200, "size": 2096640, "requested_size": 0, "state": "inactive", "frames": []},
            ],
        }
    ],
    "device_traces": [[object()]],
    "allocator_settings": object(),
}  # fmt: skip


def test_a_snapshot_is_plain_json(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: SNAPSHOT)
    path = tmp_path / "snapshot.json"
    (tmp_path / "notes.txt").write_text("mine")
    path.symlink_to(tmp_path / "notes.txt")
    assert write_snapshot(path) == 1 and (tmp_path / "notes.txt").read_text() == "mine"
    (segment,) = json.loads(path.read_text())["segments"]
    used, free = segment["blocks"]
    assert used["requested_size"] == 100 and used["frames"] == ["train.py:7 forward"] * 16
    assert free["state"] == "inactive" and "frames" not in free
    assert segment["total_size"] == used["size"] + free["size"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_a_real_one(tmp_path: Path) -> None:
    block = torch.empty(2**24, dtype=torch.uint8, device="cuda")
    assert write_snapshot(tmp_path / "s.json") >= 1
    segments = json.loads((tmp_path / "s.json").read_text())["segments"]
    assert any(b["size"] == block.nbytes for segment in segments for b in segment["blocks"])
