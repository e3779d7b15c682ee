"""Readers of devices that are not here, on what their libraries return, and of files laid out as the kernel's."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hf_memkit.common.units import GIB
from hf_memkit.measuring.memory import cgroup
from hf_memkit.measuring.memory.readers import base
from hf_memkit.measuring.memory.readers.allocators import CachingAllocatorReader, MpsReader
from hf_memkit.measuring.memory.readers.base import ReaderGroup
from hf_memkit.measuring.memory.readers.host import HostReader, PinnedReader, SwapReader
from hf_memkit.measuring.memory.readers.nvml import NvmlReader

MIB = 2**20


def stats(allocated: int, reserved: int, peak_allocated: int, peak_reserved: int) -> dict[str, Any]:
    """In the shape of torch 2.13's `_cuda_memoryStats`."""
    return {
        f"{name}_bytes": {"all": {"current": current, "peak": peak, "allocated": 0, "freed": 0}}
        for name, current, peak in (("allocated", allocated, peak_allocated), ("reserved", reserved, peak_reserved))
    }


def test_a_caching_allocator() -> None:
    answers: list[dict[str, Any]] = [{}, {}]
    module: Any = SimpleNamespace(
        is_initialized=lambda: True,
        memory_stats_as_nested_dict=lambda device: answers.pop(0),
        get_device_properties=lambda device: SimpleNamespace(total_memory=16 * GIB),
        reset_peak_memory_stats=lambda device: answers.append(stats(512, 22 * MIB, 512, 22 * MIB)),
    )
    reader = CachingAllocatorReader(module, torch.device("cuda", 0))
    assert reader.read() == {} and reader.peak() == {}  # nothing has used the device
    used = stats(512, 22 * MIB, 5 * MIB + 512, 22 * MIB)
    answers.extend([{**used, "num_alloc_retries": 3, "num_ooms": 1}, used, used])
    assert reader.read() == {
        "allocated_gib": 512 / GIB, "reserved_gib": 22 * MIB / GIB, "fragmentation_gib": (22 * MIB - 512) / GIB,
        "alloc_retries": 3, "allocator_ooms": 1,
    }  # fmt: skip
    assert reader.peak() == {"peak_allocated_gib": (5 * MIB + 512) / GIB, "peak_reserved_gib": 22 * MIB / GIB}
    assert reader.mark() == (512, 5 * MIB + 512, 22 * MIB) and not answers  # one question for all
    reader.reset_peak()
    assert ReaderGroup([reader]).mark() == (512, 512, 22 * MIB)
    assert reader.capacity() == {"capacity_gib": 16.0}


def test_xpu_counts_no_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    reported = stats(MIB, 2 * MIB, MIB, 2 * MIB)  # torch 2.13: torch/xpu/memory.py lists no retries
    monkeypatch.setattr(torch.xpu, "memory_stats_as_nested_dict", lambda device: reported)
    reader = CachingAllocatorReader(torch.xpu, torch.device("xpu", 0))
    assert set(reader.read()) == {"allocated_gib", "reserved_gib", "fragmentation_gib"}


def test_mps_has_no_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"current_allocated_memory": 2, "driver_allocated_memory": 3, "recommended_max_memory": 10}
    for name, gib in sizes.items():
        monkeypatch.setattr(torch.mps, name, lambda gib=gib: gib * GIB)
    group = ReaderGroup([MpsReader()])
    assert group.read() == {"allocated_gib": 2.0, "reserved_gib": 3.0, "fragmentation_gib": 1.0}
    assert group.peak() == {} and group.capacity() == {"capacity_gib": 10.0}
    assert group.mark() == (2 * GIB, None, None) and group.errors == {}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    now = [1000.0]
    monkeypatch.setattr(base.time, "monotonic", lambda: now[0])
    yield now


def test_pinned_memory(monkeypatch: pytest.MonkeyPatch, clock: list[float]) -> None:
    stats: dict[str, Any] = {}
    monkeypatch.setattr(torch.cuda, "host_memory_stats_as_nested_dict", lambda: stats)
    assert PinnedReader().read() == {}  # CUDA has not been used
    stats["allocated_bytes"] = {"current": GIB, "peak": 2 * GIB}
    assert PinnedReader().read() == {"pinned_gib": 1.0}


def test_nvml_twice_a_second(monkeypatch: pytest.MonkeyPatch, clock: list[float]) -> None:
    listed: list[Any] = []

    class FakeNvml:
        NVMLError = KeyError

        def nvmlInit(self) -> None: ...

        def nvmlDeviceGetHandleByUUID(self, name: str) -> str:
            return {"GPU-0b6b": "the GPU"}[name]

        nvmlMemory_v2 = 2

        def nvmlDeviceGetMemoryInfo(self, handle: str, version: int = 1) -> Any:
            assert handle == "the GPU"  # version 1 counts the driver's own reserve as used
            return SimpleNamespace(used=9 * GIB if version == 2 else 9.5 * GIB, total=16 * GIB)

        def nvmlDeviceGetComputeRunningProcesses(self, handle: str) -> Any:
            return listed

    import os
    import sys

    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml())
    card = SimpleNamespace(uuid="0b6b", total_memory=int(15.8 * GIB))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: card)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda index: 4 * GIB)
    monkeypatch.setattr("hf_memkit.measuring.memory.readers.nvml._in_first_pid_namespace", lambda: True)
    reader = NvmlReader(0)
    mine = SimpleNamespace(pid=os.getpid(), usedGpuMemory=5 * GIB)
    listed[:] = [mine, SimpleNamespace(pid=1, usedGpuMemory=3 * GIB)]
    assert reader.read() == {"device_used_gib": 9.0, "outside_allocator_gib": 1.0, "other_processes_gib": 3.0}
    clock[0] += 0.4
    assert reader.read() == {}
    assert ReaderGroup([reader]).read(fresh=True)["device_used_gib"] == 9.0
    clock[0] += 0.6
    listed[1].usedGpuMemory = None  # NVML may not tell
    assert reader.read() == {"device_used_gib": 9.0, "outside_allocator_gib": 1.0}
    clock[0] += 0.6
    card.total_memory = 4 * GIB  # one slice of the GPU (MIG), where NVML knows only the whole
    assert reader.read() == {}


def test_host_numbers_are_looked_up_seldom(clock: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    reader = HostReader()
    first = reader.read()
    assert 0.01 < first["host_rss_gib"] < 1000 and 0 < first["host_available_gib"] < 100_000
    ballast = mmap.mmap(-1, 64 * MIB)  # new pages: the heap may have some that were freed and are resident
    for page in range(0, 64 * MIB, 4096):
        ballast[page] = 1
    assert reader.read() == first
    clock[0] += 0.11
    assert reader.read()["host_rss_gib"] >= first["host_rss_gib"] + 0.06
    import psutil

    assert reader.read()["host_rss_gib"] == pytest.approx(psutil.Process().memory_info().rss / GIB, rel=0.05)
    monkeypatch.setattr("hf_memkit.measuring.memory.readers.host._STATM", "/nowhere")  # no Linux
    reader.refresh()
    assert reader.read()["host_rss_gib"] >= first["host_rss_gib"] + 0.06


def write(folder: Path, **files: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(f"{text}\n")


def test_limits_of_a_container(tmp_path: Path) -> None:
    membership = tmp_path / "cgroup"
    membership.write_text("0::/job/step\n")
    root = tmp_path / "v2"
    write(root / "job", memory__max=8 * GIB, memory__current=5 * GIB, memory__stat=f"anon 1\ninactive_file {GIB}")
    write(root / "job" / "step", memory__max="max", memory__current=GIB, memory__events="high 0\noom 2\noom_kill 1")
    assert cgroup.limit_bytes(root, membership) == 8 * GIB
    assert cgroup.available_bytes(root, membership) == 4 * GIB
    assert cgroup.oom_kills(root, membership) == 1

    membership.write_text("4:cpu,cpuacct:/\n7:memory:/docker/abc\n0::/\n")
    root = tmp_path / "v1"
    group = root / "memory" / "docker" / "abc"
    write(
        group, memory__limit_in_bytes=6 * GIB, memory__usage_in_bytes=2 * GIB, memory__stat="total_inactive_file 0",
        memory__oom_control="under_oom 0\noom_kill 3",
    )  # fmt: skip
    write(root / "memory", memory__limit_in_bytes=0x7FFFFFFFFFFFF000)
    assert cgroup.limit_bytes(root, membership) == 6 * GIB
    assert cgroup.available_bytes(root, membership) == 4 * GIB and cgroup.oom_kills(root, membership) == 3

    nowhere = tmp_path / "nowhere"
    assert cgroup.limit_bytes(nowhere, membership) is None and cgroup.available_bytes(nowhere, nowhere) is None


def test_swap_files_of_this_rank(tmp_path: Path, clock: list[float]) -> None:
    for rank, size in ((0, 3 * MIB), (1, 5 * MIB)):
        folder = tmp_path / "zero_stage_3" / "optimizer" / f"rank{rank}"
        folder.mkdir(parents=True)
        (folder / "a.swp").write_bytes(bytes(size))
    reader = SwapReader([tmp_path], 1)
    assert reader.read() == {"disk_swap_gib": 5 * MIB / GIB}
    clock[0] += 4
    assert reader.read() == {}
