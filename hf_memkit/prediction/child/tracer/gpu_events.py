"""Memory that only a GPU's own libraries take, put into the trace where they would take it.

The figures are in `hf_memkit/prediction/gpu_memory.py`, with their sources. What an H100 takes was measured:
`calibrate` in benchmarks/results/predict.json.
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


def _on_gpu(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cuda"


def _flash(args: Arguments, kwargs: Mapping[str, Any]) -> int:
    """torch copies an output, and a gradient of it, whose memory is not in the order batch, length, head (pytorch:
    aten/src/ATen/native/transformers/cuda/attention_backward.cu, `_flash_attention_backward`: `contiguous()`)."""
    if not _on_gpu(args[1]):
        return 0
    gradient, output = args[0], args[4]
    copied = [each for each in (gradient, output) if not each.transpose(1, 2).is_contiguous()]
    copied_bytes: int = sum(each.numel() * each.element_size() for each in copied)
    return _cudnn(args, kwargs) + copied_bytes


def _cudnn(args: Arguments, kwargs: Mapping[str, Any]) -> int:
    query, key = args[1], args[2]
    if not _on_gpu(query):
        return 0
    return flash_backward_bytes(tuple(query.shape), tuple(key.shape), query.element_size())


def _flash_varlen(args: Arguments, kwargs: Mapping[str, Any]) -> int:
    query, key, sequences = args[1], args[2], args[6]
    if not _on_gpu(query) or sequences is None:
        return 0
    shapes = tuple(query.shape), tuple(key.shape)
    return flash_varlen_backward_bytes(*shapes, sequences.shape[0] - 1, query.element_size())


def _efficient(args: Arguments, kwargs: Mapping[str, Any]) -> int:
    if not _on_gpu(args[1]):
        return 0
    query, key, value = (tuple(each.shape) for each in args[1:4])
    return efficient_backward_bytes(query, key, value, args[1].element_size())


def _four_bits(args: Arguments, kwargs: Mapping[str, Any]) -> int:
    inputs, shape = args[0], args[2]
    if not _on_gpu(inputs):
        return 0
    rows = inputs.numel() // inputs.shape[-1]
    nested = kwargs.get("absmax_8bit") is not None
    return four_bit_product_bytes(rows, tuple(shape), inputs.element_size(), nested=nested)


def _eight_bit_inputs(args: Arguments, kwargs: Mapping[str, Any]) -> int:
    threshold = args[1] if len(args) > 1 else kwargs.get("threshold", 0.0)
    return eight_bit_inputs_bytes(args[0].numel(), threshold=threshold) if _on_gpu(args[0]) else 0


def _eight_bit_product(codes: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype) -> int:
    if not _on_gpu(codes):
        return 0
    elements = codes.numel() // codes.shape[-1] * weight.shape[0]
    return eight_bit_product_bytes(elements, fp16=dtype is torch.float16)


def _eight_bits(args: Arguments, kwargs: Mapping[str, Any]) -> int:
    return _eight_bit_product(args[0], args[1], kwargs.get("dtype") or torch.float16)


def _eight_bits_and_outliers(args: Arguments, kwargs: Mapping[str, Any]) -> int:
    return _eight_bit_product(args[1], args[2], args[0].dtype)


def _norms(args: Arguments, kwargs: Mapping[str, Any]) -> int:
    return foreach_norm_bytes([each.numel() for each in args[0]]) if _on_gpu(args[0][0]) else 0


_SCRATCH: Final[Mapping[str, Callable[[Arguments, Mapping[str, Any]], int]]] = {
    "aten::_scaled_dot_product_flash_attention_backward": _flash,
    "aten::_flash_attention_backward": _flash_varlen,
    "aten::_scaled_dot_product_cudnn_attention_backward": _cudnn,
    "aten::_scaled_dot_product_efficient_attention_backward": _efficient,
    "aten::_foreach_norm": _norms,
    "bitsandbytes::gemm_4bit": _four_bits,
    "bitsandbytes::int8_vectorwise_quant": _eight_bit_inputs,
    "bitsandbytes::int8_scaled_mm": _eight_bits,
    "bitsandbytes::int8_mixed_scaled_mm": _eight_bits_and_outliers,
}


class GpuEvents:
    """Workspaces and scratch memory of one training on one GPU.

    `keep(bytes, category, name)` puts what stays into the trace.
    """

    def __init__(self, capability: tuple[int, int], keep: Callable[[int, Category, str], None]) -> None:
        self._capability = capability
        self._keep = keep
        self._with_workspace: set[bool] = set()
        # By id: an operation stays, its own hash is computed in Python.
        self._known: dict[int, tuple[bool, Callable[[Arguments, Mapping[str, Any]], int] | None]] = {}

    def scratch(self, func: Any, args: Arguments, kwargs: Mapping[str, Any]) -> int:
        """Bytes that the kernel of `func` takes while it runs; workspaces that stay are put into the trace here."""
        known = self._known.get(id(func))
        if known is None:
            name = func._schema.name
            known = self._known[id(func)] = name in _PRODUCTS, _SCRATCH.get(name)
        product, taken = known
        if product and _on_gpu(args[0]):
            self._workspace()
        return taken(args, kwargs) if taken is not None else 0

    def _workspace(self) -> None:
        """cuBLAS keeps a workspace for each thread that calls it: autograd's backward has a thread of its own."""
        backward = torch._C._current_graph_task_id() != -1
        if backward not in self._with_workspace:
            self._with_workspace.add(backward)
            self._keep(cublas_workspace_bytes(self._capability), "buffers", "cuBLAS workspace")
