"""Patches further functions of `torch.cuda` and `torch.accelerator` that scripts call: memory, generators, timing,
NVML.

The original functions would initialize CUDA, or end the process.
"""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any, Final

import torch

from hf_memkit.prediction.child.gpu.fake_gpu import new_do_nothing
from hf_memkit.prediction.child.tracer.tracer import StorageTracer

_fraction: float | None = None


def memory_fraction() -> float | None:
    """The script's value of `torch.cuda.set_per_process_memory_fraction`; None if it was not called."""
    return _fraction


_FROM_NVML: Final = ("utilization", "memory_usage", "temperature", "power_draw", "clock_rate", "device_memory_used")


def patch_memory_queries(tracer: StorageTracer, capacity_bytes: int) -> None:
    """Installs the patches; memory figures come from `tracer`."""

    def stats(*args: Any, **kwargs: Any) -> Counter[str]:
        """Statistics under torch's names; other keys are 0."""
        live, peak = tracer.live_bytes()
        values: Counter[str] = Counter()
        for kind in ("allocated", "reserved", "active", "requested"):
            values[f"{kind}_bytes.all.current"] = live
            values[f"{kind}_bytes.all.peak"] = peak
        return values

    def memory_info(*args: Any, **kwargs: Any) -> tuple[int, int]:
        return capacity_bytes - stats()["allocated_bytes.all.current"], capacity_bytes

    def set_fraction(fraction: float, device: Any = None) -> None:
        global _fraction  # the errors are torch's (2.13: torch/cuda/memory.py)
        if not isinstance(fraction, float):
            raise TypeError("Invalid type for fraction argument, must be `float`")
        if not 0 <= fraction <= 1:
            raise ValueError(f"Invalid fraction value: {fraction}. Allowed range: 0~1")
        _fraction = fraction

    answers: dict[str, Any] = {
        "memory_stats": stats, "mem_get_info": memory_info, "memory_stats_as_nested_dict": lambda device=None: {},
        "memory_summary": lambda *args, **kwargs: "", "memory_snapshot": lambda *args, **kwargs: [],
        "list_gpu_processes": lambda *args, **kwargs: "", "get_allocator_backend": lambda: "native",
        "initial_seed": lambda: 0, "get_per_process_memory_fraction": lambda *args, **kwargs: memory_fraction() or 1.0,
        "set_per_process_memory_fraction": set_fraction,
        "can_device_access_peer": lambda *args: True,
        "get_arch_list": lambda: ["sm_{}{}".format(*torch.cuda.get_device_capability())],
        "is_tf32_supported": lambda: torch.cuda.get_device_capability() >= (8, 0),
        **{name: lambda *args, **kwargs: 0 for name in (*_FROM_NVML, "current_blas_handle")},
        **{
            name: new_do_nothing()
            for name in (
                "init", "seed", "seed_all", "reset_accumulated_memory_stats",
                "reset_max_memory_allocated", "reset_max_memory_cached", "_record_memory_history", "_dump_snapshot",
            )
        },
    }  # fmt: skip
    for module in (torch.cuda, torch.cuda.memory, torch.cuda.random):
        for name, answer in answers.items():
            if hasattr(module, name):
                setattr(module, name, answer)
        for name in ("empty_cache", "reset_peak_memory_stats", "manual_seed", "manual_seed_all", "set_rng_state"):
            setattr(module, name, new_do_nothing())
    for name in ("range_push", "range_pop", "range_start", "range_end", "mark"):
        setattr(torch.cuda.nvtx, name, new_do_nothing())
    _accelerator(stats, memory_info)
    torch.version.cuda = torch.version.cuda or "13.0"
    torch.Generator = _Generator  # type: ignore[misc]
    torch.cuda.default_generators = (_Generator("cuda:0"),)
    torch.cuda._get_generator = lambda device: torch.cuda.default_generators[0]


_WEIGHT_LIBRARIES: Final = ("safetensors", "transformers", "accelerate", "peft")


def replace_everywhere(original: Any, replacement: Any, packages: tuple[str, ...] = _WEIGHT_LIBRARIES) -> None:
    """Replaces `original` in all loaded modules of these packages; by default those that read and write weights."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in packages:
            names = vars(module)
            for key in [key for key, value in names.items() if value is original]:
                names[key] = replacement


def _accelerator(stats: Any, memory_info: Any) -> None:
    """Patches `torch.accelerator`, which asks C++ hooks that know no memory and streams."""
    answers: dict[str, Any] = {
        "is_available": lambda: True, "device_count": lambda: torch.cuda.device_count(),
        "current_accelerator": lambda *args, **kwargs: torch.device("cuda"),
        "current_device_index": lambda: 0, "current_device_idx": lambda: 0,
        "current_stream": lambda *args: torch.cuda.current_stream(),
        "memory_stats": stats, "get_memory_info": memory_info,
        **{
            f"{prefix}memory_{kind}": lambda *args, key=f"{kind}_bytes.all.{when}", **kwargs: stats()[key]
            for prefix, when in (("", "current"), ("max_", "peak"))
            for kind in ("allocated", "reserved")
        },
    }  # fmt: skip
    for name in (
        "set_device_index", "set_device_idx", "set_stream", "synchronize", "empty_cache", "reset_peak_memory_stats",
        "reset_accumulated_memory_stats",
    ):  # fmt: skip
        answers[name] = new_do_nothing()
    for module in (torch.accelerator, getattr(torch.accelerator, "memory", None)):
        for name, answer in answers.items():
            if hasattr(module, name):
                setattr(module, name, answer)
    if hasattr(torch.accelerator, "device_index"):
        torch.accelerator.device_index = torch.cuda.device  # type: ignore[misc, assignment]


class _AnyGenerator(type(torch._C.Generator)):  # type: ignore[misc]
    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, torch._C.Generator)


class _Generator(torch._C.Generator, metaclass=_AnyGenerator):
    """A generator of the host that reports another device: a build without CUDA aborts the process when a GPU
    generator is created (torch 2.13), and fake tensors draw no numbers from it."""

    memkit_device: torch.device

    def __new__(cls, device: Any = "cpu") -> _Generator:
        make: Any = torch._C.Generator.__new__
        made: _Generator = make(cls, "cpu" if torch.device(device).type == "cuda" else device)
        made.memkit_device = torch.device(device)
        return made

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self.memkit_device

    def clone_state(self) -> _Generator:
        return _Generator(self.memkit_device)
