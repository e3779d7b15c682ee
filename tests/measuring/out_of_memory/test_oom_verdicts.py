"""The arithmetic of each verdict, and the advice on allocator settings."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hf_memkit.common.units import GIB, MIB
from hf_memkit.measuring.out_of_memory import OomMessage, explain_records, judge
from hf_memkit.measuring.out_of_memory.message import Process
from hf_memkit.measuring.out_of_memory.remedies import split_size_mb

GPU = OomMessage(
    "torch-device", "PyTorch", "device", device_type="cuda", device=0, requested_bytes=2 * GIB,
    capacity_bytes=40 * GIB, free_bytes=1 * GIB, allocated_bytes=37 * GIB, reserved_bytes=38 * GIB,
    process_bytes=39 * GIB,
)  # fmt: skip


def of_gib(**sizes: float | None) -> dict[str, Any]:
    return {f"{name}_bytes": None if size is None else int(size * GIB) for name, size in sizes.items()}


CAPPED = of_gib(free=20, reserved=19, allocated=19, process=20, allowed=20)
XPU = {"device_type": "xpu", **of_gib(free=None, process=None)}  # 38 of 40 GiB reserved
NOT_TOLD = {"free_gib": None, "outside_allocator_gib": None}


@pytest.mark.parametrize(
    ("changes", "cause", "why", "figures"),
    [
        (of_gib(requested=3), "size", "1.00 GiB short", {"short_gib": 1}),
        # Every full GPU has a few per cent in pieces: joined, they would serve this request, and the next would fail.
        (of_gib(requested=1.5), "size", "512.0 MiB", {}),
        (of_gib(requested=4, allocated=34.5), "fragmentation", "512.0 MiB", {}),  # and what is free together
        (CAPPED, "cap", "19.00 GiB reserved + 2.00 GiB", {}),
        (CAPPED | of_gib(allocated=10), "fragmentation", "", {}),
        # Another process counts only where it decides.
        (of_gib(requested=1.2) | {"processes": (Process(7, 300 * MIB),)}, "size", "", {}),
        (of_gib(process=20, allocated=18, reserved=18) | {"processes": (Process(7, 19 * GIB),)}, "another process",
         "19.00 GiB", {}),
        # Its own entry under the host's number is none.
        (of_gib(requested=3, process=None) | {"processes": (Process(11, 300 * MIB), Process(12, 39 * GIB))}, "size",
         "", {"other_processes_gib": 300 / 1024, "outside_allocator_gib": 1}),
        (of_gib(requested=3, allocated=30, reserved=30), "context and libraries",
         "9.00 GiB outside PyTorch's allocator", {}),
        # Others of which only some have a size do not hide the rest: one container's processes, not another's.
        (of_gib(process=None, allocated=9, reserved=10) | {"processes": (Process(7, 300 * MIB), Process(8, None))},
         "another process", "", {"outside_allocator_gib": 29, "other_processes_gib": None}),
        # What can have been free at most decides where the message has no free size.
        (XPU | of_gib(requested=4, allocated=37), "size", "", {"short_gib": 1, **NOT_TOLD}),
        (XPU | of_gib(requested=4, allocated=30), "fragmentation", "", {"short_gib": None, **NOT_TOLD}),
        (XPU | of_gib(requested=2, allocated=37), "unknown", "", {"short_gib": None, **NOT_TOLD}),
        # Free after all.
        (of_gib(free=8, process=32), "unknown", "", {}),
        (of_gib(free=8, process=30) | {"processes": (Process(5, 2 * GIB),)}, "another process", "", {}),
    ],
)  # fmt: skip
def test_the_cause_follows_from_the_sizes(
    changes: dict[str, Any], cause: str, why: str, figures: dict[str, float | None]
) -> None:
    verdict = judge(replace(GPU, **changes))
    assert verdict.cause == cause and why in verdict.why
    assert {name: verdict.figures.get(name) for name in figures} == pytest.approx(figures)


VARIABLE, EXPANDABLE = "PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"
PIECES = of_gib(allocated=20)


@pytest.mark.parametrize(
    ("changes", "in_use", "helps", "does_not"),
    [
        (of_gib(requested=3), None, [], f"{VARIABLE}=expandable_segments, max_split_size_mb"),
        (PIECES, None, [f"{VARIABLE}={EXPANDABLE}", f"{VARIABLE}=max_split_size_mb:2048"], "torch.cuda.empty_cache()"),
        (PIECES, "garbage_collection_threshold:0.8, expandable_segments: True", [], f"{VARIABLE}={EXPANDABLE}"),
        (PIECES, "expandable_segments:False", [f"{VARIABLE}={EXPANDABLE}"], "torch.cuda.empty_cache()"),
        # The variable is the one that the message names.
        (PIECES | {"variable": "PYTORCH_ALLOC_CONF"}, None, [f"PYTORCH_ALLOC_CONF={EXPANDABLE}"], ""),
        (PIECES | {"variable": "PYTORCH_HIP_ALLOC_CONF"}, None, [f"PYTORCH_HIP_ALLOC_CONF={EXPANDABLE}"], ""),
        # A small request cannot be helped by max_split_size.
        (PIECES | {"requested_bytes": 24 * MIB, "free_bytes": 8 * MIB}, None, [f"{VARIABLE}={EXPANDABLE}"],
         f"{VARIABLE}=max_split_size_mb"),
    ],
)  # fmt: skip
def test_allocator_settings(changes: dict[str, Any], in_use: str | None, helps: list[str], does_not: str) -> None:
    verdict = judge(replace(GPU, **changes), allocator_settings=in_use)
    settings = [one.assignment for one in verdict.settings]
    assert settings[: len(helps)] == helps and bool(settings) is bool(helps)
    assert not does_not or does_not in {one.assignment for one in verdict.no_help}


def test_what_is_said_of_settings() -> None:
    pieces = replace(GPU, **PIECES)
    assert "not supported on this platform" in str(judge(replace(pieces, device_type="rocm")).settings[0])
    others = replace(GPU, **of_gib(process=20, allocated=18, reserved=18), processes=(Process(7, 19 * GIB),))
    first = judge(others).settings[0]
    assert first.value == "nvidia-smi" and "process IDs: 7" in first.reason


@pytest.mark.parametrize(
    ("requested", "value"),
    [(1.24 * GIB, 1024), (2 * GIB, 2048), (33 * MIB, 32), (32 * MIB, 32), (31 * MIB, None), (0, None)],
)
def test_max_split_size_is_at_most_the_request_and_above_what_torch_refuses(
    requested: float, value: int | None
) -> None:
    assert split_size_mb(int(requested)) == value
    assert value is None or 20 * MIB < value * MIB <= requested


def test_an_error_of_python_without_words_is_about_ram() -> None:
    explanation = explain_records(
        {}, {"error_type": "MemoryError", "error": "", "phase": "data", "allocated_gib": 4.0}
    )
    assert explanation.verdict is not None and explanation.verdict.cause == "host memory"
