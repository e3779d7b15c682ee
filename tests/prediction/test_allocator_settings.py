"""The allocator's options: parsed as torch parses them; refused options and options without effect."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from hf_memkit.common.errors import InputError
from hf_memkit.common.units import MIB
from hf_memkit.prediction.allocator.settings import INTERVALS, AllocatorSettings, parse_settings

DIVISIONS = (
    "roundup_power2_divisions:4",
    "roundup_power2_divisions:[256:1,512:2,>:4]",
    "roundup_power2_divisions:[64:8,256:4,1024:4,>:1]",
    "roundup_power2_divisions:[1:2,>:4]",
    "roundup_power2_divisions:[>:4]",
    "roundup_power2_divisions:[65536:4]",
    "roundup_power2_divisions:[4:2,2:8]",
    "roundup_power2_divisions:[256:2,256:4]",
    "roundup_power2_divisions:[4:0,8:2]",
    "roundup_power2_divisions:[]",
)

REFUSED = (
    "roundup_power2_divisions:3",
    "roundup_power2_divisions:0",
    "roundup_power2_divisions:[3:2]",
    "roundup_power2_divisions:[4:0,8:3]",
    "roundup_power2_divisions:[256:1,512]",
    "roundup_power2_divisions:[256:1",
    "large_segment_size_mb:10",
    "large_segment_size_mb:40,max_split_size_mb:30",
    "max_split_size_mb:30,large_segment_size_mb:40",
    "max_split_size_mb:19",
    "max_split_size_mb:abc",
    "max_split_size_mb",
    "max_non_split_rounding_mb:19",
    "garbage_collection_threshold:1",
    "garbage_collection_threshold:0",
    "garbage_collection_threshold:x",
    "expandable_segments:true",
)


@pytest.fixture
def torch_divisions() -> Iterator[Callable[[int], int]]:
    """torch's own answer for a size in bytes, for the settings that were set last."""
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    name = "_ZN3c1016CachingAllocator26AcceleratorAllocatorConfig24roundup_power2_divisionsEm"
    if not hasattr(library, name):
        pytest.skip("this torch keeps it elsewhere")
    function = library[name]
    function.restype, function.argtypes = ctypes.c_size_t, [ctypes.c_size_t]
    yield function
    torch._C._accelerator_setAllocatorSettings("")


@pytest.mark.parametrize("text", DIVISIONS)
def test_divisions_are_those_of_torch(text: str, torch_divisions: Callable[[int], int]) -> None:
    torch._C._accelerator_setAllocatorSettings(text)
    expected = tuple(torch_divisions(2 ** (20 + interval)) for interval in range(INTERVALS))
    assert parse_settings(text)[0].roundup_divisions == expected
    assert torch_divisions(100) == expected[0] and torch_divisions(2**40) == expected[-1]


@pytest.mark.parametrize("text", REFUSED)
def test_what_torch_refuses_is_refused(text: str) -> None:
    with pytest.raises(InputError, match=text.partition(":")[0]):
        parse_settings(text)
    try:
        with pytest.raises((ValueError, RuntimeError)):
            torch._C._accelerator_setAllocatorSettings(text)
    finally:  # torch keeps the segment size of a text that it refused
        torch._C._accelerator_setAllocatorSettings("large_segment_size_mb:20,expandable_segments:False")


def test_defaults_and_every_option() -> None:
    assert parse_settings("") == (AllocatorSettings(), ())
    settings, notes = parse_settings(
        "expandable_segments:False,max_split_size_mb:128,max_non_split_rounding_mb:64,large_segment_size_mb:32,"
        "garbage_collection_threshold:0.75,per_process_memory_fraction:0.5,roundup_power2_divisions:8"
    )
    assert settings == AllocatorSettings(
        expandable_segments=False,
        max_split_bytes=128 * MIB,
        max_non_split_rounding_bytes=64 * MIB,
        large_segment_bytes=32 * MIB,
        garbage_collection_threshold=0.75,
        memory_fraction=0.5,
        roundup_divisions=(8,) * INTERVALS,
    )
    assert notes == ()
    # The allowance for a block that may not be cut follows the segment size, as in torch.
    assert parse_settings("large_segment_size_mb:48")[0].max_non_split_rounding_bytes == 48 * MIB


def test_options_that_change_nothing_are_named() -> None:
    assert [note.split()[0] for note in parse_settings("pinned_use_background_threads:True")[1]] == [
        "pinned_use_background_threads"
    ]
    (unlimited,) = parse_settings("garbage_collection_threshold:0.8")[1]
    assert "per_process_memory_fraction" in unlimited
    (expandable,) = parse_settings("garbage_collection_threshold:0.8,expandable_segments:True")[1]
    assert "never collected" in expandable
    (costly,) = parse_settings("max_split_size_mb:32,expandable_segments:True")[1]
    assert "costs memory" in costly
    (alone,) = parse_settings("max_non_split_rounding_mb:64")[1]
    assert "max_split_size_mb" in alone
    assert parse_settings("garbage_collection_threshold:0.8,per_process_memory_fraction:0.9")[1] == ()


def test_what_is_not_modelled_is_refused() -> None:
    with pytest.raises(InputError, match="backend:cudaMallocAsync"):
        parse_settings("backend:cudaMallocAsync")
    assert parse_settings("backend:native")[0] == AllocatorSettings()


def test_all_mistakes_stand_in_one_message() -> None:
    with pytest.raises(InputError) as refusal:
        parse_settings("max_split_size_mb:5,no_such_option:1,garbage_collection_threshold:2,backend:other")
    for name in ("max_split_size_mb", "no_such_option", "garbage_collection_threshold", "backend"):
        assert name in str(refusal.value)
    assert os.linesep not in str(refusal.value)


def test_rounding() -> None:
    plain = AllocatorSettings()
    assert [plain.rounded(size) for size in (1, 511, 512, 513, MIB + 1)] == [512, 512, 512, 1024, MIB + 512]
    # torch's own example (roundup_power2_next_division): 1200 with 4 divisions of 1024..2048 becomes 1280. Here in
    # units of 512 bytes, so that 4 divisions apply.
    four = AllocatorSettings(roundup_divisions=(4,) * INTERVALS)
    assert four.rounded(1200 * 512) == 1280 * 512
    assert four.rounded(1280 * 512) == 1280 * 512 and four.rounded(1280 * 512 + 1) == 1536 * 512
    assert four.rounded(2048) == 2048 and four.rounded(2049) == 2560  # 2048 is not above 512 × 4: by 512 bytes
    assert four.rounded(1025) == 1536  # and not to 1280, a quarter of the way from 1024 to 2048
    assert four.rounded(4 * MIB) == 4 * MIB and four.rounded(4 * MIB + 1) == 5 * MIB
    # Only sizes from 4 to 8 MiB have two divisions, 4 and 6: the others are rounded to 512 bytes.
    only = AllocatorSettings(roundup_divisions=(0, 0, 2, *(0,) * (INTERVALS - 3)))
    assert only.rounded(5 * MIB) == 6 * MIB and only.rounded(7 * MIB) == 8 * MIB
    assert only.rounded(3 * MIB + 1) == 3 * MIB + 512 and only.rounded(9 * MIB) == 9 * MIB
