"""Stores in bf16 and multiplies in fp32, for CPUs without bf16 instructions.

On such CPUs torch multiplies bf16 matrices element by element on one core, many times slower than in fp32 (pytorch:
aten/src/ATen/native/cpu/BlasKernel.cpp, `gemm_notrans_`). Here both factors are widened, the product is computed in
fp32, and the result is rounded to bf16 once. A bf16 instruction does the same, because it sums in fp32. Weights,
gradients, activations and states keep their dtype, so no technique changes.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any, Final

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import TrainerCallback

_ATEN: Final = torch.ops.aten

_ROUNDED: Final[Mapping[Any, tuple[int, ...]]] = {
    _ATEN.mm.default: (0,),
    _ATEN.addmm.default: (0,),
    _ATEN.bmm.default: (0,),
    _ATEN.baddbmm.default: (0,),
    _ATEN.convolution.default: (0,),
    _ATEN.convolution_backward.default: (0, 1, 2),
    _ATEN._scaled_dot_product_flash_attention_for_cpu.default: (0,),  # its second, the log-sum-exp, is fp32 anyway
    _ATEN._scaled_dot_product_flash_attention_for_cpu_backward.default: (0, 1, 2),
}
"""Operations that multiply matrices → indices of the results that have the factors' dtype."""


class Fp32Products(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Context in which this thread computes the products of bf16 tensors in fp32."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        rounded = _ROUNDED.get(func)
        if rounded is None or not any(map(_is_bf16, args)):
            return func(*args, **kwargs)
        result = func(*map(_widened, args), **{name: _widened(value) for name, value in kwargs.items()})
        if isinstance(result, torch.Tensor):
            return result.bfloat16()
        return tuple(
            part.bfloat16() if index in rounded and part is not None else part for index, part in enumerate(result)
        )


def trainer_options(*, model: nn.Module, processing_class: Any, arguments: Any) -> dict[str, Any]:
    """A callback that enters `Fp32Products` when training begins and leaves it when training ends."""
    return {"callbacks": [_WhileTraining()]}


class _WhileTraining(TrainerCallback):  # type: ignore[misc]
    def __init__(self) -> None:
        self._entered = ExitStack()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._entered.enter_context(Fp32Products())  # type: ignore[no-untyped-call]

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.leave()

    def leave(self) -> None:
        """Leaves the mode. Call it after an error in training, when Trainer sends no event; repeating it is safe."""
        self._entered.close()


def _is_bf16(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype == torch.bfloat16


def _widened(value: Any) -> Any:
    return value.float() if _is_bf16(value) else value
