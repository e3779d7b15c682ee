"""Another process on the GPU: what is used there and is neither PyTorch's nor this process's own.

NVML tells it, not at every step. `other_processes_gib` is used as it stands; else it is what is used on the device
less what PyTorch has reserved and what this process holds outside its allocator. If the latter is unknown too, as in
many containers, the rest contains this process's CUDA context, which grows while kernels and NCCL are loaded: then the
bar is higher. A neighbour that was there from the beginning and stays as it is is no news.
"""

from __future__ import annotations

from itertools import pairwise
from statistics import median
from typing import Final

from hf_memkit.hardware import CONTEXT_BYTES
from hf_memkit.report.series import Column, Finding, Steps, pairs
from hf_memkit.units import GIB

_WARM_UP: Final = 2
"""First steps left out where the context cannot be told apart: kernels, cuBLAS and NCCL come in them."""

_BASE: Final = 3
"""The median of up to three first readings is the base."""

_MIN_READINGS: Final = 3

_LEAST_GIB: Final = 0.25
"""A desktop and its windows come and go below this; a CUDA context alone takes more."""

_LEAST_WITH_CONTEXT_GIB: Final = 0.75
"""Where this process's own context cannot be told apart: kernels that are loaded late and communicators take some
hundred MiB."""

_LEAST_SHARE: Final = 0.01
"""… and 1 % of the GPU."""

_NOISE: Final = 6.0
"""… and six times the usual change from one reading to the next: the allocator may grow between NVML's and its own."""

_LASTS: Final = 2
"""Readings in a row, so that one taken while memory changed hands does not count."""


def find_another_process(steps: Steps) -> Finding | None:
    """The first time that others took memory of the GPU and kept it for some readings, or None."""
    others, own_known = _others(steps)
    for process in reversed(steps.processes()):
        kept, (held,) = pairs(process[0 if own_known else _WARM_UP :], others)
        if len(kept) >= _MIN_READINGS:
            return _judge(steps, kept, held, own_known=own_known)
    return None


def available_gib(steps: Steps, process: range) -> float | None:
    """GiB of the GPU that PyTorch's allocator can have; None if the GPU's capacity is unknown.

    That is the capacity less what this process's context, its libraries and others hold, which is the highest of the
    last readings of NVML. Without readings it is one context as `hf_memkit.hardware` assumes it, on a CUDA GPU.
    """
    capacity, usable = steps.capacity_gib(), steps.usable_gib()
    if capacity is None or usable is None:
        return None
    _, (used, reserved) = pairs(process, steps.column("device_used_gib"), steps.column("reserved_gib"))
    outside = [a - b for a, b in zip(used[-_BASE:], reserved[-_BASE:], strict=True)]
    assumed = CONTEXT_BYTES / GIB if not outside and steps.hardware().get("device_type") == "cuda" else 0.0
    return min(usable, capacity - max([assumed, *outside]))


def _others(steps: Steps) -> tuple[Column, bool]:
    """GiB that others hold, and whether this process's own context is told apart from it."""
    told = steps.column("other_processes_gib")
    if any(value is not None for value in told):
        return told, True
    used, reserved = steps.column("device_used_gib"), steps.column("reserved_gib")
    outside = steps.column("outside_allocator_gib")
    own_known = any(value is not None for value in outside)
    if own_known:
        return [
            None if a is None or b is None or c is None else a - b - c
            for a, b, c in zip(used, reserved, outside, strict=True)
        ], True
    return [None if a is None or b is None else a - b for a, b in zip(used, reserved, strict=True)], False


def _judge(steps: Steps, kept: list[int], held: list[float], *, own_known: bool) -> Finding | None:
    capacity = steps.usable_gib() or 0.0
    least = max(_LEAST_GIB if own_known else _LEAST_WITH_CONTEXT_GIB, _LEAST_SHARE * capacity)
    if median(held) < -least:
        return None  # less is used than PyTorch alone has reserved: these are not readings of the same GPU
    rise = max(least, _NOISE * 1.4826 * median(abs(b - a) for a, b in pairwise(held)))
    for i in range(1, len(held) - _LASTS + 1):
        base = median(held[: min(i, _BASE)])
        if min(held[i : i + _LASTS]) > base + rise:
            return _finding(steps, kept, held, i, base, own_known=own_known)
    return None


def _finding(steps: Steps, kept: list[int], held: list[float], at: int, base: float, *, own_known: bool) -> Finding:
    step, most = steps.numbers[kept[at]], max(held[at:])
    figures = {"others_before_gib": base, "others_gib": most, "rise_gib": most - base}
    usable = steps.usable_gib()
    if usable is not None:
        figures["capacity_gib"] = usable
    whose = "other processes on this GPU" if own_known else "GPU memory outside PyTorch"
    why = f"{whose} grew from {max(0.0, base):.2f} GiB to {most:.2f} GiB, first seen at step {step}"
    if not own_known:
        why += "; this process's CUDA context does not grow so late"
    fix = (
        "find the process with nvidia-smi (a notebook kernel, a second training, an inference server); end it, or "
        "move it to another GPU with CUDA_VISIBLE_DEVICES"
    )
    return Finding("another process", step, why, fix, figures)
