"""Options of PyTorch's caching allocator that change memory use, parsed from the text that torch reads.

Each rule follows torch 2.13.0: c10/core/AllocatorConfig.cpp (`parseArgs` and the functions next to it) and
c10/cuda/CUDAAllocatorConfig.h. A test compares them with the installed torch.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from hf_memkit.common.errors import InputError
from hf_memkit.common.units import MIB
from hf_memkit.setup.techniques.allocator import VARIABLE, options, refused_by_torch

# c10/core/AllocatorConfig.h: kMinBlockSize, kSmallSize, kSmallBuffer, kMinLargeAlloc, kRoundLarge.
MIN_BLOCK: Final = 512  # every block is a multiple of this
MAX_SMALL_BLOCK: Final = 1 * MIB  # blocks up to this size come from the small pool
SMALL_SEGMENT: Final = 2 * MIB  # size of a segment of the small pool
MIN_OWN_SEGMENT: Final = 10 * MIB
"""From this size on, a block gets a segment of its size instead of a part of a segment of `large_segment_bytes`."""
SEGMENT_MULTIPLE: Final = 2 * MIB  # such a segment is a multiple of this

INTERVALS: Final = 16
"""`roundup_power2_divisions` has one value for sizes below 2 MiB and one per power of two up to 32 GiB."""


@dataclass(frozen=True, slots=True)
class AllocatorSettings:
    """Options of the allocator. The defaults are torch's.

    Attributes:
        max_split_bytes: blocks of at least this size are not split and not used for smaller requests; None: no limit.
        garbage_collection_threshold: above this share of the process's limit, cached blocks are released; 0: never.
            torch applies it only if the process is limited to a share of the GPU.
        roundup_divisions: for each interval of sizes, the number of steps up to the next power of two; 0 or 1: sizes
            are rounded to 512 bytes.
        large_segment_bytes: size of a segment of the large pool for blocks below 10 MiB; with expandable segments, the
            page size of that pool.
        memory_fraction: share of the GPU that this process may use (`per_process_memory_fraction`, or
            `torch.cuda.set_per_process_memory_fraction`).
    """

    expandable_segments: bool = False  # segments grow by pages instead of having a fixed size
    max_split_bytes: int | None = None
    max_non_split_rounding_bytes: int = 20 * MIB  # by how much such a block may exceed the request
    garbage_collection_threshold: float = 0.0
    roundup_divisions: tuple[int, ...] = (0,) * INTERVALS
    large_segment_bytes: int = 20 * MIB
    memory_fraction: float = 1.0

    def rounded(self, size_bytes: int) -> int:
        """The block size for a request of `size_bytes` (`round_size`)."""
        if size_bytes < MIN_BLOCK:
            return MIN_BLOCK
        divisions = self.roundup_divisions[min(max(size_bytes.bit_length() - 1 - 20, 0), INTERVALS - 1)]
        if divisions > 1 and size_bytes > MIN_BLOCK * divisions:
            step = (1 << (size_bytes.bit_length() - 1)) // divisions
            return -(-size_bytes // step) * step
        return -(-size_bytes // MIN_BLOCK) * MIN_BLOCK

    def segment_bytes(self, block_bytes: int) -> int:
        """The size of a new segment for a block of `block_bytes` (`get_allocation_size`)."""
        if block_bytes <= MAX_SMALL_BLOCK:
            return SMALL_SEGMENT
        if block_bytes < MIN_OWN_SEGMENT:
            return self.large_segment_bytes
        return -(-block_bytes // SEGMENT_MULTIPLE) * SEGMENT_MULTIPLE


def parse_settings(text: str) -> tuple[AllocatorSettings, tuple[str, ...]]:
    """Parses the value of `PYTORCH_ALLOC_CONF`; returns settings and a note for each option without effect here.
    Raises InputError with all problems if torch would refuse the text, or an option is not modelled."""
    chosen = options(text)
    problems = [f"{name}: {why}" for name, why, _ in refused_by_torch(text)]
    named = {problem.partition(":")[0] for problem in problems}
    values = _Values({name: value for name, value in chosen.items() if name not in named}, problems)
    large = values.mebibytes("large_segment_size_mb", 20, least=11) or 0
    settings = AllocatorSettings(
        expandable_segments=values.text("expandable_segments") == "True",
        max_split_bytes=values.mebibytes("max_split_size_mb", None, least=large // MIB),
        max_non_split_rounding_bytes=values.mebibytes("max_non_split_rounding_mb", large // MIB, least=large // MIB)
        or 0,
        garbage_collection_threshold=values.share("garbage_collection_threshold", 0.0, below=1.0),
        roundup_divisions=values.divisions("roundup_power2_divisions"),
        large_segment_bytes=large,
        memory_fraction=values.share("per_process_memory_fraction", 1.0),
    )
    if values.text("backend", "native") != "native":
        problems.append(
            f"backend:{values.text('backend')}: only torch's allocator (native) can be predicted; remove it"
        )
    if problems:
        raise InputError(f"{VARIABLE}={text}: " + "; ".join(problems))
    return settings, tuple(_notes(settings, chosen))


_MODELLED: Final = (
    "backend", "expandable_segments", "garbage_collection_threshold", "large_segment_size_mb",
    "max_non_split_rounding_mb", "max_split_size_mb", "per_process_memory_fraction", "roundup_power2_divisions",
)  # fmt: skip


def _notes(settings: AllocatorSettings, chosen: dict[str, str]) -> list[str]:
    notes = [f"{name} has no effect on this prediction" for name in chosen if name not in _MODELLED]
    if settings.garbage_collection_threshold and settings.expandable_segments:
        notes.append("garbage_collection_threshold has no effect: expandable segments are never collected")
    elif settings.garbage_collection_threshold and settings.memory_fraction == 1:
        notes.append(
            "garbage_collection_threshold has no effect: torch collects only if per_process_memory_fraction is below 1"
        )
    if settings.max_split_bytes is not None and settings.expandable_segments:
        notes.append(
            "max_split_size_mb with expandable_segments costs memory: torch does not split larger free blocks for "
            "smaller tensors. Remove it"
        )
    if settings.max_split_bytes is None and "max_non_split_rounding_mb" in chosen:
        notes.append("max_non_split_rounding_mb has no effect without max_split_size_mb")
    return notes


@dataclass(slots=True)
class _Values:
    """The options by name. An invalid value is added to `problems`, and its default is returned."""

    chosen: dict[str, str]
    problems: list[str]

    def text(self, name: str, default: str = "") -> str:
        return self.chosen.get(name, default)

    def mebibytes(self, name: str, default: int | None, *, least: int) -> int | None:
        """A whole number of MiB, in bytes. torch also takes `12.5` and `0x40`, and reads them as 12 and 0."""
        value = self.chosen.get(name)
        if value is not None and value.isdecimal() and int(value) >= least:
            return int(value) * MIB
        if value is not None:
            self.problems.append(f"{name}:{value}: write a whole number of MiB, at least {least}")
        return None if default is None else default * MIB

    def share(self, name: str, default: float, *, below: float | None = None) -> float:
        value = self.chosen.get(name)
        if value is None:
            return default
        if re.fullmatch(r"\d*\.?\d+([eE]-?\d+)?", value):
            number = float(value)
            if number > 0 and (number < below if below is not None else number <= 1):
                return number
        limit = "more than 0 and less than 1" if below is not None else "more than 0 and at most 1"
        self.problems.append(f"{name}:{value}: write a number, {limit}")
        return default

    def divisions(self, name: str) -> tuple[int, ...]:
        """`4`, the same for all sizes, or `[256:1,512:2,>:4]`, by intervals that begin at these sizes in MiB."""
        value = self.chosen.get(name)
        nothing = (0,) * INTERVALS
        if value is None:
            return nothing
        if not value.startswith("["):
            if _power_of_two(value):
                return (int(value),) * INTERVALS
            self.problems.append(f"{name}:{value}: write a power of two, such as 4")
            return nothing
        pairs = [part.partition(":") for part in value.strip("[]").split(",") if part]
        powers = (
            (start == ">" or _power_of_two(start)) and (count == "0" or _power_of_two(count))
            for start, _, count in pairs
        )
        if not value.endswith("]") or not all(powers):
            self.problems.append(f"{name}:{value}: write powers of two, such as [256:1,512:2,>:4]")
            return nothing
        return _by_interval([(start, int(count)) for start, _, count in pairs])


def _by_interval(pairs: list[tuple[str, int]]) -> tuple[int, ...]:
    """One value per interval, as torch does: sizes below the first boundary get its value, gaps stay 0, and `>` fills
    everything after the previous boundary."""
    table = [0] * INTERVALS
    last, first = 0, True
    for start, count in pairs:
        if start == ">":
            table[last + 1 :] = [count] * (INTERVALS - last - 1)
            continue
        index = min(int(start).bit_length() - 1, INTERVALS - 1)
        if first:
            table[:index] = [count] * index
            first = False
        table[index] = count
        last = index
    return tuple(table)


def _power_of_two(text: str) -> bool:
    return text.isdecimal() and int(text).bit_count() == 1
