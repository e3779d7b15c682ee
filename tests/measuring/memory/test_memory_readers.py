from __future__ import annotations

import math
import os
from typing import Any

import pytest
import torch

from hf_memkit.measuring.memory.readers import nvml, readers_for_this_machine
from hf_memkit.measuring.memory.readers.allocators import CachingAllocatorReader
from hf_memkit.measuring.memory.readers.base import MemoryReader, ReaderGroup
from hf_memkit.measuring.memory.readers.host import HostReader, PinnedReader
from hf_memkit.measuring.memory.readers.nvml import NvmlReader


def test_the_readers_of_this_machine() -> None:
    result = readers_for_this_machine(torch.device("cpu"))
    assert [type(reader) for reader in result] == [HostReader]
    assert all(isinstance(reader, MemoryReader) for reader in result)
    assert 0.01 < result[0].read()["host_rss_gib"] < 1000
    assert result[0].peak() == {} and result[0].capacity() == {}


def test_values_that_are_no_numbers_are_omitted(allocator: Any) -> None:
    allocator.read = lambda: {"allocated_gib": math.nan, "reserved_gib": None, "alloc_retries": 0}
    assert ReaderGroup([allocator]).read() == {"alloc_retries": 0}


def test_one_reader_failing_leaves_the_others(allocator: Any) -> None:
    class Broken:
        device = None

        def read(self) -> dict[str, float]:
            raise OSError("first" if not group.errors else "second")

    group = ReaderGroup([Broken(), allocator])  # type: ignore[list-item]
    for _ in range(2):
        assert group.read()["allocated_gib"] == 10
    assert group.errors == {"Broken.read": "OSError: first"}
    assert group.peak()["peak_allocated_gib"] == 10  # Broken has no peak at all
    assert group.device == torch.device("cpu")


def test_which_process_is_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    me, gib = os.getpid(), 2**30

    def ours(
        processes: list[tuple[int, int | None]], reserved: int, *, outside_a_container: bool = True
    ) -> int | None:
        monkeypatch.setattr(nvml, "_in_first_pid_namespace", lambda: outside_a_container)
        return nvml.bytes_of_this_process(processes, reserved)

    assert ours([(me, 3 * gib), (1, 9 * gib)], 2 * gib) == 3 * gib
    assert ours([(1, 9 * gib), (2, 3 * gib)], 2 * gib) is None
    assert ours([(me, None)], 2 * gib) is None
    assert ours([(me, 1 * gib)], 2 * gib) is None  # less than the allocator holds: not ours
    assert ours([(me, 1 * gib)], 0) is None
    assert ours([(77, 3 * gib)], 2 * gib, outside_a_container=False) == 3 * gib
    assert ours([(me, 3 * gib), (1, 9 * gib)], 2 * gib, outside_a_container=False) is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_cuda_counters() -> None:
    assert [type(r) for r in readers_for_this_machine()] == [
        HostReader, CachingAllocatorReader, PinnedReader, NvmlReader,
    ]  # fmt: skip
    reader = CachingAllocatorReader(torch.cuda, torch.device("cuda", 0))
    block = torch.empty(2**28, dtype=torch.uint8, device="cuda")
    before = reader.read()["allocated_gib"]
    assert before >= 0.25
    reader.reset_peak()
    scratch = torch.empty(2**29, dtype=torch.uint8, device="cuda")
    del scratch
    numbers = {**reader.read(), **reader.peak(), **reader.capacity()}
    assert numbers["peak_allocated_gib"] == pytest.approx(before + 0.5, abs=0.01)
    assert numbers["reserved_gib"] >= numbers["allocated_gib"]
    assert numbers["fragmentation_gib"] == pytest.approx(numbers["reserved_gib"] - numbers["allocated_gib"])
    assert numbers["alloc_retries"] == 0 and numbers["capacity_gib"] > numbers["peak_reserved_gib"]
    outside = NvmlReader().read()
    assert numbers["reserved_gib"] < outside["device_used_gib"] <= numbers["capacity_gib"] * 1.1
    assert outside.get("outside_allocator_gib", 0.1) > 0
    del block
