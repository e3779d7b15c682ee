"""Memory that only a card's own libraries take, put into the trace where they would take it.

The figures are in `hf_memkit/predict/gpu_memory.py`, with their sources; none is calibrated on a card yet.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch

from hf_memkit.predict.child.tracer import StorageTracer
from hf_memkit.predict.gpu_memory import cublas_workspace_bytes, flash_backward_bytes

__all__ = ["GpuEvents"]

_PRODUCTS: Final = frozenset(
    {
        torch.ops.aten.mm.default,
        torch.ops.aten.addmm.default,
        torch.ops.aten.bmm.default,
        torch.ops.aten.baddbmm.default,
    }
)

_FLASH_BACKWARD: Final = torch.ops.aten._scaled_dot_product_flash_attention_backward.default


class GpuEvents:
    """Workspaces and scratch memory of one training on one card."""

    def __init__(self, capability: tuple[int, int]) -> None:
        self.tracer: StorageTracer | None = None
        self._capability = capability
        self._with_workspace: set[bool] = set()

    def scratch(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> int:
        """Bytes that the kernel of `func` takes while it runs; workspaces that stay are put into the trace here."""
        if func in _PRODUCTS and result.device.type == "cuda":
            self._workspace()
        elif func is _FLASH_BACKWARD:
            query, key = args[1], args[2]
            return flash_backward_bytes(tuple(query.shape), tuple(key.shape), query.element_size())
        return 0

    def _workspace(self) -> None:
        """cuBLAS keeps a workspace for each thread that calls it: autograd's backward has a thread of its own."""
        backward = torch._C._current_graph_task_id() != -1
        if backward in self._with_workspace or self.tracer is None:
            return
        self._with_workspace.add(backward)
        self.tracer.keep(cublas_workspace_bytes(self._capability), "buffers", "cuBLAS workspace")
