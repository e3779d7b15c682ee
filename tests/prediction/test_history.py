"""Recorded histories: read, and the model follows them block by block."""

from __future__ import annotations

import copy
import gzip
import inspect
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import allocator_history
from benchmarks.allocator_compare import compare
from benchmarks.allocator_history import read_history, record_history
from benchmarks.gpu_measure import HISTORIES
from hf_memkit.catalog.library_versions import FreeOrder
from hf_memkit.common.errors import InputError, RunError
from hf_memkit.common.terms import CATEGORIES
from hf_memkit.common.units import MIB
from hf_memkit.prediction.allocator.blocks import DeviceMemory
from hf_memkit.prediction.allocator.replay import replay
from hf_memkit.prediction.allocator.settings import AllocatorSettings
from tests.conftest import ROOT

RECORDED = sorted((Path(__file__).parent / "histories").glob("*.json.gz"))
BASE = 0x7F0000000000


def entry(action: str, address: int, size: int) -> dict[str, Any]:
    """As torch writes one: with frames and a time."""
    key = "device_free" if action == "oom" else "addr"
    return {"action": action, key: address, "size": size, "stream": 0, "time_us": 1, "frames": []}


def snapshot(*entries: dict[str, Any], settings: str = "") -> dict[str, Any]:
    """A snapshot as torch makes one, of a machine with one GPU."""
    return {
        "segments": [],
        "device_traces": [list(entries)],
        "allocator_settings": {
            "PYTORCH_CUDA_ALLOC_CONF": settings,
            "max_split_size": -1,
            "garbage_collection_threshold": 0.0,
            "expandable_segments": "expandable_segments:True" in settings,
            "roundup_power2_divisions": {"1": 0, "2": 0},
        },
        "external_annotations": [],
    }


# Worked out by hand: 3 MiB and 5 MiB come from one segment of 20. After the first is freed, 12 MiB stand behind the
# 5 (20 - 8 = 12 free there), and 2 MiB at the front, in the smaller of the two free blocks. 1000 bytes are small.
BY_HAND = (
    entry("segment_alloc", BASE, 20 * MIB),
    entry("alloc", BASE, 3 * MIB),
    entry("alloc", BASE + 3 * MIB, 5 * MIB),
    entry("free_requested", BASE, 3 * MIB),
    entry("free_completed", BASE, 3 * MIB),
    entry("alloc", BASE + 8 * MIB, 12 * MIB),
    entry("alloc", BASE, 2 * MIB),
    entry("segment_alloc", BASE + 32 * MIB, 2 * MIB),
    entry("alloc", BASE + 32 * MIB, 1000),
    entry("snapshot", 0, 0),
)


def test_a_history_becomes_a_trace() -> None:
    history = read_history(snapshot(*BY_HAND))
    assert history.trace.events == [1, 2, -1, 3, 4, 5]
    assert history.trace.sizes_bytes == [3 * MIB, 5 * MIB, 12 * MIB, 2 * MIB, 1000]
    assert history.peak_reserved_bytes == 22 * MIB
    assert (history.settings, history.releases, history.out_of_memory) == (AllocatorSettings(), frozenset(), 0)
    assert history.trace.peak().size_bytes == 22 * MIB - 3 * MIB + 2 * MIB - 2 * MIB + 1024
    assert replay(history.trace).peak_reserved_bytes == 22 * MIB


def test_the_first_difference_is_named() -> None:
    elsewhere = [dict(row) for row in BY_HAND]
    elsewhere[6]["addr"] = BASE + 2 * MIB  # the real one would have put it at the front
    found = compare(read_history(snapshot(*elsewhere)))
    assert found.divergence is not None and found.divergence.entry == 6
    assert f"{BASE + 2 * MIB:#x}" in found.divergence.what and f"{BASE:#x}" in found.divergence.what
    assert found.replayed_peak_reserved_bytes == 22 * MIB  # of the model on its own

    missing = [*BY_HAND[:7], *BY_HAND[8:]]
    found = compare(read_history(snapshot(*missing)))
    assert found.divergence is not None and found.divergence.entry == 7
    assert "asks the device" in found.divergence.what

    gone = [*BY_HAND[:5], entry("segment_free", BASE, 20 * MIB), *BY_HAND[5:]]
    found = compare(read_history(snapshot(*gone)))
    assert found.divergence is not None and "none such free" in found.divergence.what


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.name.removesuffix(".json.gz"))
def test_the_model_is_exact_on_recorded_histories(path: Path) -> None:
    """Every block at its place, and, on its own, the same counters as the real allocator's."""
    content = json.loads(gzip.decompress(path.read_bytes()))
    recorded, history = content["recorded"], read_history(path)
    comparison = compare(history)
    assert comparison.divergence is None
    assert comparison.recorded_peak_reserved_bytes == recorded["peak_reserved_bytes"]
    assert comparison.replayed_peak_reserved_bytes == recorded["peak_reserved_bytes"]

    total, fraction = recorded["total_bytes"], recorded.get("memory_fraction", 1.0)
    trace = copy.deepcopy(history.trace)
    if history.out_of_memory:  # the failed request is no block: it stands in the entry
        failed = next(row.size_bytes for row in history.entries if row.action == "oom")
        trace.events.append(trace.add(failed, CATEGORIES.index("other")))
    alone = replay(
        trace,
        history.settings,
        allowed_bytes=int(fraction * total) if fraction < 1 else None,
        device=DeviceMemory(
            recorded.get("capacity_bytes"), total_bytes=total, order=recorded.get("addresses", "ascending")
        ),
        releases=history.releases if "emptied" in path.name else (),
        order=history.order,
    )
    assert alone.peak_allocated_bytes == recorded["peak_allocated_bytes"]
    assert alone.peak_requested_bytes == recorded["peak_requested_bytes"]
    assert alone.peak_reserved_bytes == recorded["peak_reserved_bytes"]
    assert alone.retries == recorded["retries"]
    assert (alone.failed_at is not None) == bool(recorded["ooms"]) == bool(history.out_of_memory)


@pytest.mark.parametrize("path", sorted(HISTORIES.glob("*.json.gz")), ids=lambda path: path.name)
def test_the_model_follows_trainings_on_a_gpu(path: Path) -> None:
    """Recorded on an H100 and an H200 (benchmarks/gpu.py). Counters are the last phase's: the report resets them."""
    comparison = compare(read_history(path))
    assert comparison.divergence is None
    assert comparison.recorded_peak_reserved_bytes == comparison.replayed_peak_reserved_bytes > 7 * 2**30


def test_versions_of_torch_differ_in_what_decides_between_equal_blocks() -> None:
    orders: tuple[FreeOrder, ...] = ("address", "block", "segment")
    found = {read_history(path).order: path for path in RECORDED if "torch" in path.name}
    assert set(found) == {"address", "block"}  # the other files are of 2.13
    for own, path in found.items():
        assert [order for order in orders if compare(read_history(path), order=order).exact] == [own]


def refused(content: Any, **options: Any) -> str:
    with pytest.raises(InputError) as refusal:
        read_history(content, **options)
    assert "\n" not in str(refusal.value)
    return str(refusal.value)


def test_what_is_no_such_history_is_refused(tmp_path: Path) -> None:
    assert "device_traces" in refused({"segments": []})
    assert "none" in refused({"device_traces": [[], []]})
    two = {"device_traces": [list(BY_HAND), list(BY_HAND)]}
    assert "device=N" in refused(two) and read_history(two, device=1).peak_reserved_bytes == 22 * MIB
    assert "device 2" in refused(two, device=2)
    assert "before the recording began" in refused(snapshot(entry("free_completed", BASE, 5)))
    assert "too late" in refused(snapshot(entry("segment_free", BASE, 5)))
    assert "'moved'" in refused(snapshot(entry("moved", BASE, 5)))
    assert "entry 0" in refused(snapshot({"action": "alloc", "size": 5}))
    assert "entry 0" in refused(snapshot({"action": "alloc", "addr": "here", "size": 5}))
    assert "pool" in refused(snapshot({**entry("alloc", BASE, 5), "pool_id": [0, 1]}))
    assert read_history(snapshot({**entry("alloc", BASE, 5), "pool_id": [0, 0]})).trace.events == [1]
    assert "backend" in refused(snapshot(*BY_HAND, settings="backend:cudaMallocAsync"))
    assert "cannot be read" in refused(tmp_path / "none.json")
    (tmp_path / "text.json").write_text("no")
    assert "is not JSON" in refused(tmp_path / "text.json")
    (tmp_path / "torn.json.gz").write_bytes(gzip.compress(b"{}")[:-5])
    assert "is not JSON" in refused(tmp_path / "torn.json.gz")
    (tmp_path / "list.json").write_text("[]")
    assert "snapshot" in refused(tmp_path / "list.json")


def test_recording_without_a_gpu_is_refused(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has one")
    with pytest.raises(RunError, match="no CUDA device"), record_history(tmp_path / "history.json"):
        pass
    assert not list(tmp_path.iterdir())


def test_what_the_recorder_keeps_of_a_snapshot_is_a_history() -> None:
    whole = snapshot(*BY_HAND, entry("oom", 5 * MIB, 30 * MIB), settings="max_split_size_mb:64")
    kept = {
        "device_traces": [allocator_history._plain(entries) for entries in whole["device_traces"]],
        "allocator_settings": allocator_history._texts(whole["allocator_settings"]),
    }
    assert json.loads(json.dumps(kept)) == kept
    assert read_history(kept) == read_history(whole)
    assert kept["device_traces"][0][-1] == {
        "action": "oom", "device_free": 5 * MIB, "size": 30 * MIB, "stream": 0,
    }  # fmt: skip
    assert kept["allocator_settings"] == {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}
    assert allocator_history._texts(None) == {}


def test_torch_takes_what_the_recorder_passes() -> None:
    """The functions that it calls, with these names: they are not torch's public ones."""
    record = inspect.signature(torch.cuda.memory._record_memory_history).parameters
    assert {"enabled", "context", "stacks"} <= set(record)
    assert record["max_entries"].default == sys.maxsize  # nothing of a long run is overwritten
    assert not [
        name
        for name, parameter in inspect.signature(torch.cuda.memory._snapshot).parameters.items()
        if parameter.default is parameter.empty
    ]


SCRIPT = """
import random, sys
import torch
from benchmarks.allocator_history import record_history

source = random.Random(0)
with record_history(sys.argv[1]):
    live = []
    for _ in range(1500):
        if live and source.random() < 0.48:
            live.pop(source.randrange(len(live)))
        else:
            size = source.choice((1, 700, 70_000, 2**20, 3 * 2**20, 11 * 2**20, source.randrange(1, 40 * 2**20)))
            live.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
        if len(live) > 60:
            del live[: len(live) // 2]
            torch.cuda.empty_cache()
"""


@pytest.mark.gpu
@pytest.mark.parametrize(
    "settings", ["", "expandable_segments:True", "max_split_size_mb:24", "roundup_power2_divisions:4"]
)
def test_a_real_gpu_is_followed_block_by_block(settings: str, tmp_path: Path) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA GPU")
    path = tmp_path / "history.json.gz"
    environment = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": settings}
    subprocess.run([sys.executable, "-c", SCRIPT, str(path)], check=True, cwd=ROOT, env=environment, timeout=300)
    history = read_history(path)
    recorded = json.loads(gzip.decompress(path.read_bytes()))["recorded"]
    comparison = compare(history)
    assert comparison.divergence is None, comparison.divergence
    assert comparison.replayed_peak_reserved_bytes == recorded["peak_reserved_bytes"] == history.peak_reserved_bytes
    assert len(history.trace.events) > 1000


def test_pages_of_expandable_segments() -> None:
    # Pages of 20 MiB: 25 MiB take two; 30 more need one, and begin where the 25 end. The 25 freed, the page 0-20 goes
    # back, and 5 MiB of it stay.
    rows = [
        entry("segment_map", BASE, 40 * MIB),
        entry("alloc", BASE, 25 * MIB),
        entry("segment_map", BASE + 40 * MIB, 20 * MIB),
        entry("alloc", BASE + 25 * MIB, 30 * MIB),
        entry("free_requested", BASE, 25 * MIB),
        entry("free_completed", BASE, 25 * MIB),
        entry("segment_unmap", BASE, 20 * MIB),
        entry("alloc", BASE + 20 * MIB, 5 * MIB),
    ]
    history = read_history(snapshot(*rows, settings="expandable_segments:True"))
    assert history.settings.expandable_segments and history.releases == {3}
    assert compare(history).exact and history.peak_reserved_bytes == 60 * MIB
    assert not compare(history, AllocatorSettings()).exact  # with other settings it would have gone otherwise
    rows[6]["size"] = 40 * MIB
    found = compare(read_history(snapshot(*rows, settings="expandable_segments:True")))
    assert found.divergence is not None and "given back" in found.divergence.what
