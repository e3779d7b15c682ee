"""Settings of PyTorch's allocator: which would have helped against a message, and which would not."""

from __future__ import annotations

from typing import Final

from hf_memkit.oom.change import Remedy
from hf_memkit.oom.message import OomMessage, show
from hf_memkit.units import MIB

__all__ = ["for_fragmentation", "for_size", "split_size_mb"]

_LEAST_SPLIT: Final = 20 * MIB
"""torch refuses a `max_split_size_mb` below it (torch: c10/core/AllocatorConfig.h: 20 MiB)."""


def split_size_mb(requested_bytes: int) -> int | None:
    """The `max_split_size_mb` that would have served this request: the power of two at or below it.

    Blocks of at least that size are then not cut for smaller tensors, and one that is free can serve the request
    whole, or be given back (torch: c10/cuda/CUDACachingAllocator.cpp, `should_split`, `get_free_block`,
    `release_available_cached_blocks`). None: the request is so small that no allowed value is below it.
    """
    value = 1 << ((requested_bytes // MIB).bit_length() - 1) if requested_bytes >= MIB else 0
    return value if value * MIB > _LEAST_SPLIT else None


def for_fragmentation(message: OomMessage, in_use: str | None) -> tuple[Remedy, ...]:
    """What to set where enough is cached, in pieces. `in_use`: the settings of that run, if they are known."""
    key = f"environment.{message.variable or _variable(message)}"
    requested = message.requested_bytes or 0
    on = in_use is not None and "expandable_segments:true" in in_use.lower().replace(" ", "")
    settings = []
    if on:
        settings.append(
            Remedy(
                key,
                "expandable_segments:True",
                False,
                "it was on: what is cached lies on pages that tensors still use. Fewer different shapes help "
                "(pad_to_multiple_of, packing), and a smaller batch",
            )
        )
    elif message.device_type == "xpu":
        settings.append(_no_such_setting(message))
    else:
        settings.append(Remedy(key, "expandable_segments:True", True, _why_expandable(message)))
    value = split_size_mb(requested)
    if on or message.device_type == "xpu":
        pass  # beside expandable segments it makes things worse
    elif value is None:
        settings.append(
            Remedy(
                key,
                "max_split_size_mb",
                False,
                f"torch takes no value below {_LEAST_SPLIT // MIB}, and the request is {show(requested)}",
            )
        )
    else:
        settings.append(
            Remedy(
                key,
                f"max_split_size_mb:{value}",
                True,
                f"where expandable segments are not to be had: blocks from {value} MiB on are not cut for smaller "
                f"tensors, so that one of them is whole when {show(requested)} is asked for. It is set instead, not "
                "besides",
            )
        )
    return (*settings, _empty_cache())


def for_size(message: OomMessage, why: str) -> tuple[Remedy, ...]:
    """What allocator settings can't do where pieces are not the matter."""
    if message.reserved_bytes is None or message.device_type in ("mps", "npu", "hpu"):
        return (_empty_cache(),) if message.device_type in (None, "cuda", "rocm") else ()
    key = f"environment.{message.variable or _variable(message)}"
    cached = f"all that is cached is {show(message.cached_bytes or 0)}"
    values = "" if message.device_type == "xpu" else "expandable_segments, max_split_size_mb"
    shuffles = (Remedy(key, values, False, f"{why}; {cached}"),) if values else ()
    return (*shuffles, _empty_cache())


def _empty_cache() -> Remedy:
    return Remedy(
        "torch.cuda.empty_cache()", "", False,
        "PyTorch had given back every segment that was whole, and asked again, before it raised this error",
    )  # fmt: skip


def _no_such_setting(message: OomMessage) -> Remedy:
    return Remedy(
        "environment.PYTORCH_ALLOC_CONF", "expandable_segments:True", True,
        "where this version of torch knows it for XPU; else fewer different shapes (pad_to_multiple_of, packing)",
    )  # fmt: skip


def _why_expandable(message: OomMessage) -> str:
    why = "segments then grow and shrink by pages, instead of staying whole around the tensors in them"
    if message.device_type == "rocm":
        return (
            why
            + ". A ROCm build that lacks it warns `expandable_segments not supported on this platform` and goes on "
            "without"
        )
    if message.variable is None or message.reserved_bytes is None:
        return why + ". Linux, torch 2.1 or later (this message may be an older one's); not on Windows, WSL2 or Jetson"
    return why + ". Linux only; on WSL2 and Jetson the driver may refuse it"


def _variable(message: OomMessage) -> str:
    # PYTORCH_ALLOC_CONF is read by new versions only, the other one by all (torch: c10/core/AllocatorConfig.h).
    return "PYTORCH_HIP_ALLOC_CONF" if message.device_type == "rocm" else "PYTORCH_CUDA_ALLOC_CONF"
