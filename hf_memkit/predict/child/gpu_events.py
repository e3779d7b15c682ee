"""Memory that only a card's own libraries take, put into the trace where they would take it.

The figures are in `hf_memkit/predict/gpu_memory.py`, with their sources; none is calibrated on a card yet.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch

from hf_memkit.predict.child.tracer import StorageTracer
from hf_memkit.predict.gpu_memory import (
    cublas_workspace_bytes,
    efficient_backward_bytes,
    flash_backward_bytes,
    four_bit_product_bytes,
)

__all__ = ["GpuEvents"]

Arguments = tuple[Any, ...]

_PRODUCTS: Final = frozenset({"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "bitsandbytes::gemm_4bit"})
"""Operations that call cuBLAS."""


def _flash(args: Arguments, kwargs: Mapping[str, Any]) -> int:
    query, key = args[1], args[2]
    return flash_backward_bytes(tuple(query.shape), tuple(key.shape), query.element_size())


def _efficient(args: Arguments, kwargs: Mapping[str, Any]) -> int:
    query, key, value = (tuple(each.shape) for each in args[1:4])
    return efficient_backward_bytes(query, key, value, args[1].element_size())


def _four_bits(args: Arguments, kwargs: Mapping[str, Any]) -> int:
    inputs, shape = args[0], args[2]
    rows = inputs.numel() // inputs.shape[-1]
    nested = kwargs.get("absmax_8bit") is not None
    return four_bit_product_bytes(rows, tuple(shape), inputs.element_size(), nested=nested)


_SCRATCH: Final[Mapping[str, Callable[[Arguments, Mapping[str, Any]], int]]] = {
    "aten::_scaled_dot_product_flash_attention_backward": _flash,
    "aten::_scaled_dot_product_cudnn_attention_backward": _flash,
    "aten::_scaled_dot_product_efficient_attention_backward": _efficient,
    "bitsandbytes::gemm_4bit": _four_bits,
}


class GpuEvents:
    """Workspaces and scratch memory of one training on one card."""

    def __init__(self, capability: tuple[int, int]) -> None:
        self.tracer: StorageTracer | None = None
        self._capability = capability
        self._with_workspace: set[bool] = set()
        self._names: dict[Any, str] = {}  # operation → its name without the overload

    def scratch(self, func: Any, args: Arguments, kwargs: Mapping[str, Any], result: Any) -> int:
        """Bytes that the kernel of `func` takes while it runs; workspaces that stay are put into the trace here."""
        name = self._names.get(func)
        if name is None:
            name = self._names[func] = func._schema.name
        if name in _PRODUCTS and result.device.type == "cuda":
            self._workspace()
        taken = _SCRATCH.get(name)
        return taken(args, kwargs) if taken is not None and args[1].device.type == "cuda" else 0

    def _workspace(self) -> None:
        """cuBLAS keeps a workspace for each thread that calls it: autograd's backward has a thread of its own."""
        backward = torch._C._current_graph_task_id() != -1
        if backward in self._with_workspace or self.tracer is None:
            return
        self._with_workspace.add(backward)
        self.tracer.keep(cublas_workspace_bytes(self._capability), "buffers", "cuBLAS workspace")
