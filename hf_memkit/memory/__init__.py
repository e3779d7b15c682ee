"""Measuring: device counters, phases, categories, modules, and records on disk.

Names are imported when first used, so that reading records (`hf_memkit.memory.records`, standard library only) loads
neither torch nor transformers.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hf_memkit.memory.categories import optimizer_chain, state_summary, walk
    from hf_memkit.memory.phases import PhaseTracker
    from hf_memkit.memory.readers import (
        CudaReader,
        HostReader,
        MemoryReader,
        NvmlReader,
        readers_for_this_machine,
    )
    from hf_memkit.memory.recompute import RecomputeCounter
    from hf_memkit.memory.records import RecordWriter, read_records, steps

__all__ = [
    "CudaReader",
    "HostReader",
    "MemoryReader",
    "NvmlReader",
    "PhaseTracker",
    "RecomputeCounter",
    "RecordWriter",
    "optimizer_chain",
    "read_records",
    "readers_for_this_machine",
    "state_summary",
    "steps",
    "walk",
]

_MODULE = {
    "CudaReader": "readers",
    "HostReader": "readers",
    "MemoryReader": "readers",
    "NvmlReader": "readers",
    "PhaseTracker": "phases",
    "RecomputeCounter": "recompute",
    "RecordWriter": "records",
    "optimizer_chain": "categories",
    "read_records": "records",
    "readers_for_this_machine": "readers",
    "state_summary": "categories",
    "steps": "records",
    "walk": "categories",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULE[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
