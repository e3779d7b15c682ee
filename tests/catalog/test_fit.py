"""`fits`, `tight` and `does not fit` at their bounds, worked out by hand."""

from __future__ import annotations

import pytest

from hf_memkit.catalog import fit
from hf_memkit.catalog.fit import Level, Verdict
from hf_memkit.catalog.hardware import CONTEXT_BYTES, Gpu, Machine
from hf_memkit.common.units import GIB, MIB

GPU = Gpu("a GPU", 16 * GIB, bf16=True, source="by size")
MACHINE = Machine(GPU, ram_bytes=64 * GIB, disk_free_bytes=100 * GIB, disk_path="/data", cpu_count=8)


def verdict(reserved: int, cap: int, level: Level = "trace", memory_fraction: float = 1.0) -> Verdict:
    """With 1 GiB outside the allocator."""
    room = fit.room_bytes(GPU.capacity_bytes, GIB, memory_fraction)
    return fit.verdict(reserved + GIB, cap + fit.slack_bytes(cap, level) + GIB, room, level)


# 16 GiB of GPU, 1 GiB outside the allocator. 92 % of the GPU are 15073.28 MiB, so that 14049 MiB may be reserved; of a
# cpu trace 87 %, 13230 MiB. Of the 15 GiB beside the context a smallest cap leaves 5 % and 200 MiB free up to
# (15 × 1024 − 200) / 1.05 = 14438.10 MiB; 10 % and 200 MiB up to 13781.82 MiB.
@pytest.mark.parametrize(("level", "most", "least"), [("trace", 14049, 14438), ("cpu trace", 13230, 13781)])
def test_verdicts_at_their_bounds(level: Level, most: int, least: int) -> None:
    assert verdict(most * MIB, GIB, level) == "fits"
    assert verdict((most + 1) * MIB, GIB, level) == "tight"
    assert verdict(40 * GIB, least * MIB, level) == "tight"
    assert verdict(40 * GIB, (least + 1) * MIB, level) == "does not fit"


@pytest.mark.parametrize("level", fit.LEVELS)
@pytest.mark.parametrize("gib", [6, 8, 16, 24, 80, 192])
def test_what_fits_has_room_for_the_slack(level: Level, gib: int) -> None:
    """Would notice: "fits" where the error of a prediction is larger than what stays free."""
    reserved = fit.limit_bytes(gib * GIB, level) - CONTEXT_BYTES
    assert reserved + fit.slack_bytes(reserved, level) + CONTEXT_BYTES <= gib * GIB


def test_a_small_gpu_has_less_room_than_the_slack() -> None:
    """Of 1 GiB 92 % are 942.08 MiB; 200 MiB and 5 % leave 784.76 MiB."""
    assert fit.verdict(784 * MIB, 784 * MIB + fit.slack_bytes(784 * MIB, "trace"), GIB) == "fits"
    assert fit.verdict(785 * MIB, 785 * MIB + fit.slack_bytes(785 * MIB, "trace"), GIB) == "does not fit"


def test_a_limit_of_the_allocator_is_all_that_there_is() -> None:
    """Would notice: a script that limits itself to a part of the GPU, and "fits" in all of it. Of 16 GiB it may take 8
    and what lies outside, 9 GiB; 92 % of these are 8.28 GiB."""
    assert verdict(int(7.27 * GIB), 7 * GIB, memory_fraction=0.5) == "fits"
    assert verdict(int(7.29 * GIB), 7 * GIB, memory_fraction=0.5) == "tight"
    assert verdict(9 * GIB, 9 * GIB, memory_fraction=0.5) == "does not fit"
    assert verdict(13 * GIB, 13 * GIB, memory_fraction=0.99) == "fits", "beyond what is free it limits nothing"


def test_ram_and_disk_count_too() -> None:
    assert fit.host_shortages(MACHINE, 64 * GIB, 100 * GIB) == []
    ram, disk = fit.host_shortages(MACHINE, 64 * GIB + 1, 101 * GIB, " (--ram)")
    assert ram == "needs 64.00 GiB of RAM; the machine has 64.00 GiB (--ram)"
    assert disk == "needs 101.0 GiB of disk; /data has 100.0 GiB free"


def test_sums_rule_out_what_is_larger_than_the_gpu() -> None:
    assert not fit.too_small(GPU, 16 * GIB - CONTEXT_BYTES) and fit.too_small(GPU, 16 * GIB - CONTEXT_BYTES + 1)


def test_a_finished_run_was_tight_above_the_same_share_or_with_retries() -> None:
    assert not fit.was_tight(9.2, 10.0, retries=0) and fit.was_tight(9.21, 10.0, retries=0)
    assert fit.was_tight(5.0, 10.0, retries=1)
