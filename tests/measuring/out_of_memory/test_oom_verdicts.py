"""The arithmetic of each verdict, and what is said of allocator settings."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hf_memkit.common.units import GIB, MIB
from hf_memkit.measuring.out_of_memory import OomMessage, Verdict, judge, parse_message
from hf_memkit.measuring.out_of_memory.cause import split_size_mb
from hf_memkit.measuring.out_of_memory.message import Process
from tests.measuring.out_of_memory.oom_messages import EXAMPLES, THE_TEXT

GPU = OomMessage(
    "torch-device", "PyTorch", "device", device_type="cuda", device=0, requested_bytes=2 * GIB,
    capacity_bytes=40 * GIB, free_bytes=1 * GIB, allocated_bytes=37 * GIB, reserved_bytes=38 * GIB,
    process_bytes=39 * GIB,
)  # fmt: skip


def settings(verdict: Verdict) -> tuple[set[str], set[str]]:
    """What helps, and what does not, as `NAME=value`."""
    return {one.assignment for one in verdict.settings}, {one.assignment for one in verdict.no_help}


def test_the_surveys_text() -> None:
    message = parse_message(THE_TEXT.replace("Tried", "CUDA out of memory. Tried"))
    assert message is not None
    verdict = judge(message)
    assert verdict.cause == "fragmentation"
    assert verdict.figures["cached_gib"] == pytest.approx(3.87, abs=0.005)
    assert verdict.figures["requested_gib"] == pytest.approx(1.24)
    assert "14.21 GiB reserved − 10.34 GiB allocated = 3.87 GiB cached" in verdict.why
    helps, does_not = settings(verdict)
    assert helps == {
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
        "PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:1024",
    }
    assert does_not == {"torch.cuda.empty_cache()"}


def test_size_says_that_no_allocator_setting_helps() -> None:
    verdict = judge(replace(GPU, requested_bytes=3 * GIB))
    assert verdict.cause == "size" and "1.00 GiB short" in verdict.why
    assert verdict.figures["short_gib"] == 1
    helps, does_not = settings(verdict)
    assert not helps and "PYTORCH_CUDA_ALLOC_CONF=expandable_segments, max_split_size_mb" in does_not


def test_a_few_per_cent_in_pieces_are_no_fragmentation() -> None:
    """Every full GPU has some: joined, they would serve this request, and the next one would fail."""
    verdict = judge(replace(GPU, requested_bytes=GIB + 512 * MIB))
    assert verdict.cause == "size" and "512.0 MiB" in verdict.why


def test_pieces_and_what_is_free_together() -> None:
    verdict = judge(replace(GPU, requested_bytes=4 * GIB, allocated_bytes=34 * GIB + 512 * MIB))
    assert verdict.cause == "fragmentation" and "512.0 MiB" in verdict.why


def test_segments_that_are_expandable_already() -> None:
    pieces = replace(GPU, allocated_bytes=20 * GIB)
    verdict = judge(pieces, allocator_settings="garbage_collection_threshold:0.8, expandable_segments: True")
    helps, does_not = settings(verdict)
    assert verdict.cause == "fragmentation" and not helps
    assert does_not == {"PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True", "torch.cuda.empty_cache()"}
    assert settings(judge(pieces, allocator_settings="expandable_segments:False"))[0]


def test_the_variable_is_the_one_that_the_message_names() -> None:
    pieces = replace(GPU, allocated_bytes=20 * GIB)
    for variable in ("PYTORCH_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"):
        helps, _ = settings(judge(replace(pieces, variable=variable)))
        assert f"{variable}=expandable_segments:True" in helps
    assert "not supported on this platform" in str(judge(replace(pieces, device_type="rocm")).settings[0])


@pytest.mark.parametrize(
    ("requested", "value"),
    [
        (1.24 * GIB, 1024),
        (2 * GIB, 2048),
        (130 * MIB, 128),
        (33 * MIB, 32),
        (32 * MIB, 32),
        (31 * MIB, None),
        (0, None),
    ],
)
def test_max_split_size_is_at_most_the_request_and_above_what_torch_refuses(
    requested: float, value: int | None
) -> None:
    assert split_size_mb(int(requested)) == value
    assert value is None or 20 * MIB < value * MIB <= requested


def test_a_small_request_cannot_be_helped_by_max_split_size() -> None:
    verdict = judge(replace(GPU, requested_bytes=24 * MIB, free_bytes=8 * MIB, allocated_bytes=20 * GIB))
    assert verdict.cause == "fragmentation"
    assert "PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb" in settings(verdict)[1]


def test_the_cap() -> None:
    verdict = judge(replace(GPU, free_bytes=20 * GIB, reserved_bytes=19 * GIB, allocated_bytes=19 * GIB,
                            process_bytes=20 * GIB, allowed_bytes=20 * GIB))  # fmt: skip
    assert verdict.cause == "cap" and "19.00 GiB reserved + 2.00 GiB" in verdict.why


def test_pieces_below_the_cap() -> None:
    verdict = judge(replace(GPU, free_bytes=20 * GIB, reserved_bytes=19 * GIB, allocated_bytes=10 * GIB,
                            process_bytes=20 * GIB, allowed_bytes=20 * GIB))  # fmt: skip
    assert verdict.cause == "fragmentation"


def test_another_process_counts_only_where_it_decides() -> None:
    small = replace(GPU, processes=(Process(7, 300 * MIB),), requested_bytes=GIB + 200 * MIB)
    assert judge(small).cause == "size"
    large = replace(GPU, process_bytes=20 * GIB, allocated_bytes=18 * GIB, reserved_bytes=18 * GIB,
                    processes=(Process(7, 19 * GIB),))  # fmt: skip
    verdict = judge(large)
    assert verdict.cause == "another process" and "19.00 GiB" in verdict.why
    assert verdict.settings[0].value == "nvidia-smi" and "process 7" in verdict.settings[0].reason


def test_its_own_entry_under_the_hosts_number_is_not_another_process() -> None:
    own = replace(GPU, process_bytes=None, processes=(Process(11, 300 * MIB), Process(12, 39 * GIB)),
                  requested_bytes=3 * GIB)  # fmt: skip
    verdict = judge(own)
    assert verdict.cause == "size"
    assert verdict.figures["other_processes_gib"] == pytest.approx(300 / 1024)
    assert verdict.figures["outside_allocator_gib"] == 1


def test_what_lies_outside_the_allocator() -> None:
    verdict = judge(replace(GPU, requested_bytes=3 * GIB, allocated_bytes=30 * GIB, reserved_bytes=30 * GIB))
    assert verdict.cause == "context and libraries" and "9.00 GiB outside PyTorch's allocator" in verdict.why


def test_others_of_which_only_some_have_a_size_do_not_hide_the_rest() -> None:
    """As where one container's processes have sizes and another's do not."""
    some = replace(GPU, process_bytes=None, allocated_bytes=9 * GIB, reserved_bytes=10 * GIB,
                   processes=(Process(7, 300 * MIB), Process(8, None)))  # fmt: skip
    verdict = judge(some)
    assert verdict.cause == "another process"
    assert verdict.figures["outside_allocator_gib"] == 29 and "other_processes_gib" not in verdict.figures


def test_what_can_have_been_free_at_most_decides_where_the_message_has_no_free_size() -> None:
    xpu = replace(GPU, device_type="xpu", free_bytes=None, process_bytes=None)  # 38 of 40 GiB reserved
    for requested, allocated, cause, short in (
        (4, 37, "size", 1),
        (4, 30, "fragmentation", None),
        (2, 37, "unknown", None),
    ):
        verdict = judge(replace(xpu, requested_bytes=requested * GIB, allocated_bytes=allocated * GIB))
        assert (verdict.cause, verdict.figures.get("short_gib")) == (cause, short)
        assert not {"free_gib", "outside_allocator_gib"} & set(verdict.figures)


def test_free_after_all() -> None:
    assert judge(replace(GPU, free_bytes=8 * GIB, process_bytes=32 * GIB)).cause == "unknown"
    raced = replace(GPU, free_bytes=8 * GIB, process_bytes=30 * GIB, processes=(Process(5, 2 * GIB),))
    assert judge(raced).cause == "another process"


def test_every_verdict_names_sizes_in_its_figures_as_json_can_hold_them() -> None:
    for example in EXAMPLES:
        message = parse_message(example.text)
        assert message is not None
        content = judge(message).to_json()
        assert set(content) == {"cause", "why", "settings", "no_help", "figures"}
        assert all(name.endswith("_gib") and size >= 0 for name, size in content["figures"].items())
