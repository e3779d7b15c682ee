"""Adds memory that a GPU's libraries use, such as workspaces, to the trace at the operation that needs it.

The figures are in `hf_memkit/prediction/gpu_memory.py`, with their sources. Measurements on an H100: `calibrate` in
benchmarks/results/predict.json.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch

from hf_memkit.common.terms import Category
from hf_memkit.prediction.gpu_memory import (
    cublas_workspace_bytes,
    efficient_backward_bytes,
    eight_bit_inputs_bytes,
    eight_bit_product_bytes,
    flash_backward_bytes,
    flash_varlen_backward_bytes,
    foreach_norm_bytes,
    four_bit_product_bytes,
)

Arguments = tuple[Any, ...]

_PRODUCTS: Final = frozenset(
    {"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"}
    | {"bitsandbytes::gemm_4bit", "bitsandbytes::int8_mixed_scaled_mm"}
)
"""Operations that call cuBLAS."""


def _cudnn(args: Arguments, kwargs: Mapping[str, Any]) -> int:
    query, key = args[1], args[2]
    return flash_backward_bytes(tuple(query.shape), tuple(key.shape), query.element_size())


def _flash(args: Arguments, kwargs: Mapping[str, Any]) -> int:
    """torch copies an output, and its gradient, whose memory is not in the order batch, length, head (pytorch:
    aten/src/ATen/native/transformers/cuda/attention_backward.cu, `_flash_attention_backward`: `contiguous()`)."""
    copied = [tensor for tensor in (args[0], args[4]) if not tensor.transpose(1, 2).is_contiguous()]
    return _cudnn(args, kwargs) + sum(int(tensor.nbytes) for tensor in copied)


def _flash_varlen(args: Arguments, kwargs: Mapping[str, Any]) -> int:
    query, key, sequences = args[1], args[2], args[6]
    if sequences is None:
        return 0
    shapes = tuple(query.shape), tuple(key.shape)
    return flash_varlen_backward_bytes(*shapes, sequences.shape[0] - 1, query.element_size())


def _efficient(args: Arguments, kwargs: Mapping[str, Any]) -> int:
    query, key, value = (tuple(tensor.shape) for tensor in args[1:4])
    return efficient_backward_bytes(query, key, value, args[1].element_size())


def _four_bits(args: Arguments, kwargs: Mapping[str, Any]) -> int:
    inputs, shape = args[0], args[2]
    rows, nested = inputs.numel() // inputs.shape[-1], kwargs.get("absmax_8bit") is not None
    return four_bit_product_bytes(rows, tuple(shape), inputs.element_size(), nested=nested)


def _eight_bits(codes: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype) -> int:
    elements = codes.numel() // codes.shape[-1] * weight.shape[0]
    return eight_bit_product_bytes(elements, fp16=dtype is torch.float16)


_SCRATCH: Final[Mapping[str, Callable[[Arguments, Mapping[str, Any]], int]]] = {
    "aten::_scaled_dot_product_flash_attention_backward": _flash,
    "aten::_flash_attention_backward": _flash_varlen,
    "aten::_scaled_dot_product_cudnn_attention_backward": _cudnn,
    "aten::_scaled_dot_product_efficient_attention_backward": _efficient,
    "aten::_foreach_norm": lambda args, kwargs: foreach_norm_bytes([tensor.numel() for tensor in args[0]]),
    "bitsandbytes::gemm_4bit": _four_bits,
    "bitsandbytes::int8_vectorwise_quant": lambda args, kwargs: eight_bit_inputs_bytes(
        args[0].numel(), threshold=args[1] if len(args) > 1 else kwargs.get("threshold", 0.0)
    ),
    "bitsandbytes::int8_scaled_mm": lambda args, kwargs: _eight_bits(
        args[0], args[1], kwargs.get("dtype") or torch.float16
    ),
    "bitsandbytes::int8_mixed_scaled_mm": lambda args, kwargs: _eight_bits(args[1], args[2], args[0].dtype),
}


class GpuEvents:
    """Workspaces and scratch memory of a training on one GPU. `keep(bytes, category, name)` adds permanent memory."""

    def __init__(self, capability: tuple[int, int], keep: Callable[[int, Category, str], None]) -> None:
        self._capability = capability
        self._keep = keep
        self._with_workspace: set[bool] = set()
        # By id, because hashing an operation runs Python code.
        self._known: dict[int, tuple[bool, Callable[[Arguments, Mapping[str, Any]], int] | None]] = {}

    def scratch(self, func: Any, args: Arguments, kwargs: Mapping[str, Any]) -> int:
        """Bytes that the kernel of `func` uses while it runs; adds permanent workspaces to the trace."""
        known = self._known.get(id(func))
        if known is None:
            name = func._schema.name
            known = self._known[id(func)] = name in _PRODUCTS, _SCRATCH.get(name)
        product, scratch = known
        if not product and scratch is None:
            return 0
        first = args[0][0] if isinstance(args[0], list | tuple) else args[0]
        if first.device.type != "cuda":
            return 0
        # cuBLAS keeps a workspace per calling thread, and autograd's backward has a separate thread.
        if product and (backward := torch._C._current_graph_task_id() != -1) not in self._with_workspace:
            self._with_workspace.add(backward)
            self._keep(cublas_workspace_bytes(self._capability), "buffers", "cuBLAS workspace")
        return scratch(args, kwargs) if scratch is not None else 0
