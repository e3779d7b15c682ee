"""Measuring: device counters, phases, categories, modules, and records on disk.

Names are imported when first used, so that reading records (`hf_memkit.memory.records`, standard library only) loads
neither torch nor transformers.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hf_memkit.memory.holdings import walk
    from hf_memkit.memory.modules import module_rows
    from hf_memkit.memory.optimizer_state import optimizer_chain, state_summary
    from hf_memkit.memory.phases import PhaseTracker
    from hf_memkit.memory.readers import (
        CudaReader,
        HostReader,
        MemoryReader,
        MpsReader,
        NvmlReader,
        PinnedReader,
        SwapReader,
        XpuReader,
        readers_for_this_machine,
    )
    from hf_memkit.memory.recompute import RecomputeCounter
    from hf_memkit.memory.records import RecordWriter, read_records, steps
    from hf_memkit.memory.snapshot import write_snapshot

__all__ = [
    "CudaReader",
    "HostReader",
    "MemoryReader",
    "MpsReader",
    "NvmlReader",
    "PhaseTracker",
    "PinnedReader",
    "RecomputeCounter",
    "RecordWriter",
    "SwapReader",
    "XpuReader",
    "module_rows",
    "optimizer_chain",
    "read_records",
    "readers_for_this_machine",
    "state_summary",
    "steps",
    "walk",
    "write_snapshot",
]

_MODULE = {
    "CudaReader": "readers",
    "HostReader": "readers",
    "MemoryReader": "readers",
    "MpsReader": "readers",
    "NvmlReader": "readers",
    "PhaseTracker": "phases",
    "PinnedReader": "readers",
    "RecomputeCounter": "recompute",
    "RecordWriter": "records",
    "SwapReader": "readers",
    "XpuReader": "readers",
    "module_rows": "modules",
    "optimizer_chain": "optimizer_state",
    "read_records": "records",
    "readers_for_this_machine": "readers",
    "state_summary": "optimizer_state",
    "steps": "records",
    "walk": "holdings",
    "write_snapshot": "snapshot",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULE[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
