"""Remedies against a cause: settings that help, and frequent advice that does not."""

from __future__ import annotations

from typing import Final

from hf_memkit.common.units import GIB, MIB
from hf_memkit.measuring.out_of_memory.change import Remedy
from hf_memkit.measuring.out_of_memory.device_tools import tools_of
from hf_memkit.measuring.out_of_memory.known_messages import VLLM_SHARE
from hf_memkit.measuring.out_of_memory.message import OomMessage, show
from hf_memkit.setup.techniques.allocator import SMALLEST_SPLIT_MIB
from hf_memkit.setup.techniques.registry import CATALOGUE

_EXPANDABLE: Final = CATALOGUE["expandable-segments"]

OWN_CONTEXT: Final = 2 * GIB
"""The CUDA context and its kernels take 0.5 to 2 GiB outside PyTorch's allocator (stas00/ml-engineering:
training/performance). More is probably another process or library."""

_NCCL_MOST: Final = 4 * GIB
"""NCCL's buffers rarely take more: 4 MiB for each of up to 32 channels and each peer (NCCL: NCCL_BUFFSIZE)."""


def smaller_libraries(outside: int) -> tuple[Remedy, ...]:
    """Settings with which other libraries take less of the `outside` bytes that PyTorch did not allocate."""
    vllm = Remedy(
        VLLM_SHARE, "smaller",
        "if vLLM runs in this process: it reserves this share of the GPU (trl: vllm_gpu_memory_utilization)",
    )  # fmt: skip
    jax = Remedy(
        "environment.XLA_PYTHON_CLIENT_PREALLOCATE", "false",
        "if JAX runs in this process: it reserves 75 % of the GPU (TensorFlow: TF_FORCE_GPU_ALLOW_GROWTH=true)",
    )  # fmt: skip
    buffers = "with several GPUs: shrinks the buffer of each NCCL channel (default 4 MiB)"
    nccl = Remedy("environment.NCCL_BUFFSIZE", "1048576", buffers)
    return (vllm, jax) if outside > OWN_CONTEXT + _NCCL_MOST else (nccl, vllm)


def free_the_gpu(message: OomMessage) -> tuple[Remedy, ...]:
    """How to find the other processes on the GPU, or another GPU."""
    who = [str(process.pid) for process in message.other_processes[:5]]
    ids = f" (process IDs: {', '.join(who)})" if who else ""
    tools = tools_of(message.device_type)
    return (
        Remedy(
            "command", tools.processes,
            f"lists the processes on the GPU{ids}. First check that none belongs to this job: another rank or worker, "
            "or this process itself, which has another ID in a container. Then wait, or use another GPU",
        ),
        Remedy(
            f"environment.{tools.choice}", "an idle GPU",
            "also if several ranks of this job share one GPU: each must set its device before it loads a model",
        ),
        *for_size(message, "the memory belongs to another process"),
    )  # fmt: skip


def split_size_mb(requested_bytes: int) -> int | None:
    """The `max_split_size_mb` for a request: the power of two at or below it; None if torch refuses such a value.

    PyTorch then does not split blocks of that size, so that a free one can serve the request or be released (torch:
    c10/cuda/CUDACachingAllocator.cpp, `should_split`, `get_free_block`, `release_available_cached_blocks`).
    """
    value = 1 << ((requested_bytes // MIB).bit_length() - 1) if requested_bytes >= MIB else 0
    return value if value > SMALLEST_SPLIT_MIB else None


def for_fragmentation(message: OomMessage, in_use: str | None) -> tuple[Remedy, ...]:
    """Allocator settings against fragmentation. `in_use`: those of the run, if known."""
    key = f"environment.{message.variable}"
    requested = message.requested_bytes or 0
    on = _EXPANDABLE.settings[_EXPANDABLE.key]
    if message.variable is None:
        return _empty_cache(message)
    if in_use is not None and "expandable_segments:true" in in_use.lower().replace(" ", ""):
        why = (
            "already on: the cached pages still hold live tensors. Fewer tensor shapes (pad_to_multiple_of, packing) "
            "or a smaller batch help"
        )
        # Not max_split_size_mb: with expandable segments it makes fragmentation worse.
        return Remedy(key, on, why, helps=False), *_empty_cache(message)
    if message.device_type == "xpu":
        known = "if this torch supports it on XPU; otherwise use fewer tensor shapes (pad_to_multiple_of, packing)"
        return Remedy(key, on, known), *_empty_cache(message)
    value = split_size_mb(requested)
    if value is None:
        why = f"torch accepts no value below {SMALLEST_SPLIT_MIB}, and the request is {show(requested)}"
        cut = Remedy(key, "max_split_size_mb", why, helps=False)
    else:
        why = (
            "use this instead where expandable segments are unavailable; do not combine them. PyTorch then splits no "
            f"block of {value} MiB or more, so that a freed one can serve {show(requested)}"
        )
        cut = Remedy(key, f"max_split_size_mb:{value}", why)
    return Remedy(key, on, _why_expandable(message)), cut, *_empty_cache(message)


def for_size(message: OomMessage, why: str) -> tuple[Remedy, ...]:
    """Allocator settings that do not help, because the cause is not fragmentation."""
    if message.reserved_bytes is None or message.variable is None or message.device_type == "xpu":
        return _empty_cache(message)
    why = f"{why}; PyTorch has {show(message.cached_bytes or 0)} cached"
    settings = "expandable_segments, max_split_size_mb"
    return Remedy(f"environment.{message.variable}", settings, why, helps=False), *_empty_cache(message)


def _empty_cache(message: OomMessage) -> tuple[Remedy, ...]:
    module = tools_of(message.device_type).module
    why = "PyTorch already released every unused segment and retried before it raised this error"
    return (Remedy(f"{module}.empty_cache()", "", why, helps=False),) if module and module != "torch.mps" else ()


def _why_expandable(message: OomMessage) -> str:
    why = _EXPANDABLE.saves
    if message.device_type == "rocm":
        warning = "`expandable_segments not supported on this platform`"
        return f"{why}. A ROCm build without it warns {warning} and ignores it"
    if message.device_type in ("npu", "mlu", "musa"):
        return f"{why}. Needs a driver and a version of the device's torch plugin that have it"
    return f"{why}. Needs Linux and torch 2.1 or later; on WSL2 and Jetson the driver may refuse it"
