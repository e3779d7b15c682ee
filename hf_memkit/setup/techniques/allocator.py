"""Settings of PyTorch's caching allocator: one environment variable, with options separated by commas."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Mapping, MutableMapping
from typing import Final, NamedTuple

from hf_memkit.setup.setup import Setup
from hf_memkit.setup.techniques.registry import InPlans, advice, technique

VARIABLE: Final = "PYTORCH_ALLOC_CONF"

OLD_VARIABLES: Final = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""Older names, which torch still reads. Where two are set, torch 2.13 takes the first of these and then the new one,
though its header says the opposite (torch/include/c10/core/AllocatorConfig.h): a test shows it."""

_SWITCHES: Final = (
    "expandable_segments", "pinned_use_background_threads", "pinned_use_cuda_host_register",
    "pinned_use_hip_host_register", "release_lock_on_cudamalloc", "release_lock_on_hipmalloc",
    "graph_capture_record_stream_reuse", "throw_on_cudamalloc_oom", "pinned_free_catch_all",
)  # fmt: skip
_KNOWN: Final = (
    *_SWITCHES, "backend", "garbage_collection_threshold", "large_segment_size_mb", "max_non_split_rounding_mb",
    "max_split_size_mb", "per_process_memory_fraction", "pinned_max_cached_size_mb", "pinned_max_round_threshold_mb",
    "pinned_num_register_threads", "pinned_reserve_segment_size_mb", "roundup_power2_divisions",
)  # fmt: skip
"""Options of torch 2.13.0: c10/core/AllocatorConfig.h and c10/cuda/CUDAAllocatorConfig.h (`getKeys`)."""

_BESIDE_EXPANDABLE: Final[Mapping[str, str]] = {
    "max_split_size_mb": "expandable segments are split anyway, and free memory above the limit serves no smaller "
    "request: more is reserved, not less",
    "garbage_collection_threshold": "expandable segments are never collected: torch ignores the option",
}
"""Options that help only segments of fixed size (pytorch: c10/cuda/CUDACachingAllocator.cpp,
`should_split`, `get_free_block` and `garbage_collect_cached_blocks`)."""

_LIMIT: Final = "per_process_memory_fraction"
LIMITED_SHARE: Final = 0.99
"""torch collects only in a process with a limit, from the threshold's share of it on (pytorch:
CUDACachingAllocator.cpp, `malloc`). This limit is above what a CUDA context leaves of any GPU."""

SMALLEST_SPLIT_MIB: Final = 20
"""torch refuses less: the size of its large segments (pytorch: c10/core/AllocatorConfig.cpp)."""

DEFAULT_SPLIT_MIB: Final = 512  # assumed
DEFAULT_THRESHOLD: Final = 0.8
"""The value in PyTorch's own documentation (docs/source/notes/cuda.rst, "garbage_collection_threshold")."""


@technique(
    "expandable-segments",
    slot="segments",
    saves="segments grow and shrink by pages, so that PyTorch can reuse the cached memory",
    costs="nothing on Linux, but processes cannot share GPU tensors",
    not_when="on Windows, where the CUDA allocator has none, or tensors are shared between processes through CUDA IPC",
    proof="gpu",
    gpu_only="a setting of the CUDA allocator",
    settings={f"environment.{VARIABLE}": "expandable_segments:True"},
    devices=("cuda",),
    planned=InPlans("allocator", "expandable segments"),
)
def expandable_segments(setup: Setup) -> Setup:
    """`expandable_segments:True`, set before torch starts CUDA."""
    return with_option(
        setup, "expandable_segments", "True",
        "cached memory does not get stuck in pieces too small to use (torch:c10/core/AllocatorConfig.h)",
    )  # fmt: skip


@technique(
    "max-split-size",
    slot="segments",
    saves="fragmentation where expandable segments are unavailable: large blocks are not split for small tensors",
    costs="memory: a block above the limit serves only requests of nearly its size",
    not_when="segments are expandable: they are split anyway, and more is reserved",
    proof="gpu",
    gpu_only="a setting of the CUDA allocator",
    values={"max_split_size_mb": int},
    bounds={"max_split_size_mb": (SMALLEST_SPLIT_MIB, None)},
)
def max_split_size(setup: Setup) -> Setup:
    """`max_split_size_mb:N`. Value: `max_split_size_mb` (MiB, at least 20; default 512)."""
    size = int(setup.resolved_for.values.get("max_split_size_mb", DEFAULT_SPLIT_MIB))
    return with_option(setup, "max_split_size_mb", str(size), f"blocks above {size} MiB are not cut up")


@technique(
    "garbage-collection-threshold",
    slot="",
    saves="reserved memory: unused blocks go back to the driver before the GPU is full",
    costs="time: a block that is needed again must be allocated again",
    not_when="segments are expandable: they are never collected",
    proof="gpu",
    gpu_only="a setting of the CUDA allocator",
    values={"garbage_collection_threshold": float},
    bounds={"garbage_collection_threshold": (1e-6, 1)},  # torch wants more than 0; less than this means nothing
)
def garbage_collection_threshold(setup: Setup) -> Setup:
    """`garbage_collection_threshold:X`, and the limit without which torch collects nothing."""
    share = float(setup.resolved_for.values.get("garbage_collection_threshold", DEFAULT_THRESHOLD))
    setup = with_option(
        setup, "garbage_collection_threshold", f"{share:g}",
        f"above {100 * share:g} % of the GPU, cached blocks go back to the driver, the longest unused first",
    )  # fmt: skip
    return with_option(setup, _LIMIT, f"{LIMITED_SHARE:g}", "torch collects only where the process has a limit")


def with_option(setup: Setup, name: str, value: str, reason: str) -> Setup:
    """The setup with this option added to the variable."""
    key = f"environment.{VARIABLE}"
    before = next((setting for setting in setup.settings if setting.key == key), None)
    if before is None:
        return setup.put(key, f"{name}:{value}", reason)
    kept = {known: old for known, old in options(str(before.value)).items() if known != name}
    text = ",".join(f"{known}:{old}" for known, old in (*kept.items(), (name, value)))
    return setup.put(key, text, f"{before.reason}; {reason}" if kept else reason)


def options(text: str) -> dict[str, str]:
    """`{option: value}` of the variable's text, spaces left out; "" for an option without a value.

    >>> options("max_split_size_mb:128, roundup_power2_divisions:[256:1,>:4]")
    {'max_split_size_mb': '128', 'roundup_power2_divisions': '[256:1,>:4]'}
    """
    pairs = {}
    for part in re.split(r",(?![^\[]*\])", text):  # commas outside brackets
        name, _, value = part.partition(":")
        if part.strip():
            pairs[name.strip()] = "".join(value.split())
    return pairs


class Mistake(NamedTuple):
    """A wrong option in the variable, what torch does with it, and what to write instead."""

    option: str
    effect: str
    fix: str


def problems_of(text: str) -> list[Mistake]:
    """All mistakes in the variable's text: options that torch refuses, and options without use."""
    return [*refused_by_torch(text), *of_no_use(text)]


def refused_by_torch(text: str) -> list[Mistake]:
    """Options with which torch fails, when it reads the variable or first uses the GPU."""
    mistakes = []
    chosen = options(text)
    for name, value in chosen.items():
        if name not in _KNOWN:
            effect = "torch has no such option: its CPU build silently accepts it, and its CUDA build fails at the "
            effect += "first use of the GPU"
            mistakes.append(Mistake(name, effect, "delete it, or correct its name"))
        elif not value:
            mistakes.append(Mistake(name, "the option has no value; torch fails", f"write {name}:VALUE"))
        elif name in _SWITCHES and value not in ("True", "False"):
            mistakes.append(Mistake(name, "torch accepts only True or False, spelt like this", f"write {name}:True"))
        elif name == "max_split_size_mb" and value.isdecimal() and int(value) < SMALLEST_SPLIT_MIB:
            effect = f"torch rejects less than {SMALLEST_SPLIT_MIB}"
            mistakes.append(Mistake(name, effect, f"write {SMALLEST_SPLIT_MIB} or more"))
    return mistakes


def of_no_use(text: str) -> list[Mistake]:
    """Options that torch accepts, but that do nothing or harm together with the others."""
    mistakes: list[Mistake] = []
    chosen = options(text)
    if chosen.get("expandable_segments") == "True":
        mistakes.extend(
            Mistake(name, why, "delete it, or expandable_segments")
            for name, why in _BESIDE_EXPANDABLE.items()
            if name in chosen
        )
    elif "garbage_collection_threshold" in chosen and chosen.get(_LIMIT, "1") in ("1", "1.0"):
        effect = "torch collects only where the process has a limit: without one it ignores the option"
        fix = f"write {_LIMIT}:{LIMITED_SHARE:g} beside it (or call torch.cuda.set_per_process_memory_fraction)"
        mistakes.append(Mistake("garbage_collection_threshold", effect, fix))
    return mistakes


def user_settings(environment: Mapping[str, str]) -> tuple[str, str] | None:
    """(variable, text) that torch reads from this environment, or None. The older names take precedence."""
    for name in (*OLD_VARIABLES, VARIABLE):
        if name in environment:
            return name, environment[name]
    return None


def too_late(text: str) -> str:
    """Why the variable can no longer be set in this process, and what to do; empty if it can.

    torch reads it once, when the GPU is first used (torch 2.13.0: include/c10/core/AllocatorConfig.h,
    `AcceleratorAllocatorConfig::instance`).
    """
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return ""
    if "backend" in options(text):
        return f"{VARIABLE}={text}: set too late, after CUDA started. Set it before Python starts"
    return (
        f"{VARIABLE}={text}: set too late, after CUDA started. Set it before Python starts. Or, for later allocations "
        f'only: torch._C._accelerator_setAllocatorSettings("{text}"), which replaces all other options'
    )


def set_allocator(text: str, say: Callable[[str], None], environment: MutableMapping[str, str] | None = None) -> bool:
    """Sets the variable to `text` unless the user has set it or CUDA has started.

    Args:
        say: receives one line if `text` is not set: the reason.

    Returns:
        Whether the allocator will use `text`.
    """
    target = os.environ if environment is None else environment
    users = user_settings(target)
    if users is not None:
        if options(users[1]) != options(text):
            say(f"Your {users[0]}={users[1]} overrides {text}.")
            return False
        return True
    late = too_late(text)
    if late and not _set_before_first_use(text):
        say(late)
        return False
    target[VARIABLE] = text
    return True


def _set_before_first_use(text: str) -> bool:
    """Sets the options if CUDA has started but no tensor was allocated yet; whether it worked."""
    import torch

    put = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    if put is None or "backend" in options(text) or torch.cuda.memory_reserved():
        return False
    put(text)
    return True


advice(
    "empty-cache-steps", "allocator", {"arguments.torch_empty_cache_steps": 1},
    saves="blocks too small for a request go back to the driver after each step, if segments are expandable already",
    # transformers 5.23: training_args.py, help of torch_empty_cache_steps
    costs="about 10% slower, according to transformers' documentation",
    devices=("cuda",), slows=True, unless=("torch_empty_cache_steps",),
)  # fmt: skip
