"""Corrects operations whose result on fake tensors differs from the kernel's in dtype, layout or reuse of memory.

Rules get the arguments of an operation on fake tensors, and return the result as the kernel makes it. They come from
running every operation of `tests/prediction/architectures.py` on real and on fake tensors side by side. A layout
matters as much as a size, because the next product copies a gradient in another order.

| operation | kernel (torch 2.13) | on fake tensors |
|---|---|---|
| layer and group norm | mean and 1/σ are fp32 where weights are fp32 and inputs are not (native/layer_norm.cpp, native/group_norm.cpp: `param_scalar_type`) | of the inputs' type, on a CPU |
| layer norm's and log-softmax's backward | a contiguous gradient (`LEGACY_CONTIGUOUS_MEMORY_FORMAT`, native/SoftMax.cpp) | in the order of the gradient that came in |
| group norm's backward | a gradient of the inputs' type | of the wider type |
| the experts' grouped product | accepts all floating dtypes (native/GroupedMMUtils.h, `create_grouped_gemm_output_tensor`) | accepts bf16 only |
| a product with an output dtype (`out_dtype`) | of that dtype (native/cuda/Blas.cpp, `_addmm_dtype_out_cuda`) | with torch 2.11 the dtype is taken for a factor, and the operation fails |
| the sum of two gradients of one tensor | written into the first if nothing else references it (autograd/input_buffer.cpp) | another tensor: autograd writes into no tensor while operations are recorded |
"""  # noqa: E501

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import _engine_run_backward
from torch.utils._python_dispatch import TorchDispatchMode

_aten: Final = torch.ops.aten
_HALF: Final = (torch.float16, torch.bfloat16)
_HAS_COUNTS: Final = hasattr(torch.Tensor, "_use_count") and hasattr(torch._C, "_storage_Use_Count")
"""Whether this torch counts references to a tensor; if not, sums of gradients are treated as new tensors."""


def _layer_norm(*args: Any, **kwargs: Any) -> Any:
    output, mean, scale = _aten.native_layer_norm.default(*args, **kwargs)
    return output, *_statistics(args[0], args[2], mean, scale)


def _group_norm(*args: Any, **kwargs: Any) -> Any:
    output, mean, scale = _aten.native_group_norm.default(*args, **kwargs)
    return output, *_statistics(args[0], args[1], mean, scale)


def _statistics(inputs: torch.Tensor, weight: torch.Tensor | None, *values: torch.Tensor) -> tuple[torch.Tensor, ...]:
    mixed = inputs.dtype in _HALF and weight is not None and weight.dtype is torch.float32
    return tuple(value.float() if mixed and value.dtype is not torch.float32 else value for value in values)


def _layer_norm_backward(*args: Any, **kwargs: Any) -> Any:
    gradient, *rest = _aten.native_layer_norm_backward.default(*args, **kwargs)
    return _contiguous(gradient), *rest


def _group_norm_backward(*args: Any, **kwargs: Any) -> Any:
    gradient, *rest = _aten.native_group_norm_backward.default(*args, **kwargs)
    return gradient if gradient is None else gradient.to(args[1].dtype), *rest


def _grouped_product(
    a: torch.Tensor, b: torch.Tensor, offs: Any = None, bias: Any = None, out_dtype: Any = None
) -> Any:
    """Rows of the result start at multiples of 16 bytes."""
    if a.dtype is torch.bfloat16 and b.dtype is torch.bfloat16:
        return _aten._grouped_mm.default(a, b, offs, bias, out_dtype)
    rows, columns = a.shape[-2], b.shape[-1]
    groups: tuple[int, ...] = ()
    if a.dim() == b.dim():
        groups = (offs.shape[0],) if a.dim() == 2 else (b.shape[0],)
    multiple = 16 // a.element_size()
    wide = -(-columns // multiple) * multiple
    return a.new_empty((*groups, rows, wide), dtype=out_dtype or a.dtype)[..., :columns]


def _contiguous(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return tensor if tensor is None or tensor.is_contiguous() else tensor.new_empty(tensor.shape)


def _add(*args: Any, **kwargs: Any) -> Any:
    """The sum, or the first of two gradients if autograd would add the second to it in place."""
    if (
        _HAS_COUNTS
        and _EXPECTED_COUNTS
        and torch._C._current_graph_task_id() != -1
        and not torch.is_grad_enabled()
        and len(args) == 2
        and not kwargs
        and all(isinstance(argument, torch.Tensor) for argument in args)
        and (args[0].shape, args[0].dtype, args[0].device) == (args[1].shape, args[1].dtype, args[1].device)
        and _dense(args[0])
        and _counts(args[0]) == _EXPECTED_COUNTS[0]
        and _called_by_autograd()
    ):
        return args[0]
    return _aten.add.Tensor(*args, **kwargs)


def _dense(tensor: torch.Tensor) -> bool:
    """Whether it fills its storage without gaps or overlaps, in any order of its dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True


def _counts(tensor: torch.Tensor) -> tuple[int, int]:
    """Reference counts of the tensor and of its storage, including those of the call."""
    return tensor._use_count(), torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)  # type: ignore[attr-defined]


def _called_by_autograd() -> bool:
    """Whether autograd's engine calls the operation, not a backward function written in Python."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").startswith(_BETWEEN):
        frame = frame.f_back  # type: ignore[assignment]
    return frame is None or frame.f_code is _engine_run_backward.__code__


_BETWEEN: Final = ("hf_memkit.prediction.child", "torch._dynamo.eval_frame", "torch._compile")
"""Modules of the frames between an operation and its caller. Torch's are there if a module is compiled: dynamo is
disabled in dispatch modes then (`gpu/compiler.py`)."""


_EXPECTED_COUNTS: Final[list[tuple[int, int]]] = []


def learn_use_counts(*, in_a_fork: bool = False) -> None:
    """Learns the `_counts` of a gradient that only autograd references, by a backward pass before the training.
    `in_a_fork`: in a forked process, because after a backward pass a process can be forked, but not run another."""
    if _EXPECTED_COUNTS:
        return
    if not in_a_fork:
        _EXPECTED_COUNTS.append(_measured_counts())
        return
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        torch.set_num_threads(1)  # see forks.py
        os.write(write, "{} {}".format(*_measured_counts()).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as answer:
        counts = answer.read().split()
    os.waitpid(child, 0)
    # If the process crashed, sums of gradients are treated as new tensors.
    _EXPECTED_COUNTS.append((int(counts[0]), int(counts[1])) if len(counts) == 2 else (0, 0))


def _measured_counts() -> tuple[int, int]:
    if not _HAS_COUNTS:
        return 0, 0
    measured: list[tuple[int, int]] = []

    class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
        ) -> Any:
            if func is _aten.add.Tensor and torch._C._current_graph_task_id() != -1:
                measured.append(_counts(args[0]))
            return func(*args, **(kwargs or {}))

    with FakeTensorMode(), Recorder():  # type: ignore[no-untyped-call]
        leaf = torch.ones(2, requires_grad=True)
        (leaf.exp() + leaf.sin()).sum().backward()  # type: ignore[no-untyped-call]
    (counts,) = measured
    return counts


KERNEL_RULES: Final[Mapping[Any, Callable[..., Any]]] = {
    _aten.native_layer_norm.default: _layer_norm,
    _aten.native_layer_norm_backward.default: _layer_norm_backward,
    _aten.native_group_norm.default: _group_norm,
    _aten.native_group_norm_backward.default: _group_norm_backward,
    _aten._log_softmax_backward_data.default: lambda *args, **kwargs: _contiguous(
        _aten._log_softmax_backward_data.default(*args, **kwargs)
    ),
    # The kernel of the product also adds `added`.
    _aten.addmm.dtype: lambda added, a, b, out_dtype, **_: _aten.mm.dtype(a, b, out_dtype),
    _aten.addmm.dtype_out: lambda added, a, b, out_dtype, *, out, **_: _aten.mm.dtype_out(a, b, out_dtype, out=out),
    _aten.add.Tensor: _add,
    **({_aten._grouped_mm.default: _grouped_product} if hasattr(_aten, "_grouped_mm") else {}),
}
