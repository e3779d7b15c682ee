"""`torch.compile` in the child: nothing can be compiled under a tracer, and nothing eager is passed off as compiled.

The one compiled function of the pack is torchao's AdamW step of one parameter. Compiled, it reads weight, gradient and
states, and writes weight and states. What lies between is fused; only what two kernels share could be memory: both new
moments, which are reduced to a scale for each block and then quantised by it. They are taken as fp32 here: a bound
from above, not measured on a GPU.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from hf_memkit.errors import Unmodelled

__all__ = ["replace_compiler"]


def replace_compiler() -> None:
    """Puts `compiled` in the place of `torch.compile`."""
    torch.compile = compiled


def compiled(model: Any = None, **options: Any) -> Any:
    """In place of `torch.compile`: torchao's step becomes its bound; else `Unmodelled` is raised when it runs."""
    if model is None:
        return functools.partial(compiled, **options)
    if _stance() == "force_eager":
        return model
    if (
        getattr(model, "__module__", "") == "torchao.optim.adam"
        and getattr(model, "__name__", "") == "single_param_adam"
    ):
        return _fused_step
    if not isinstance(model, Callable):  # type: ignore[arg-type]
        return model

    @functools.wraps(model)
    def refuse(*args: Any, **kwargs: Any) -> Any:
        name = getattr(model, "__qualname__", type(model).__name__)
        raise Unmodelled(f"torch.compile({name}): what a compiled function keeps cannot be traced")

    return refuse


def _fused_step(p: torch.Tensor, *rest: Any) -> None:
    """torchao 0.18.0: optim/adam.py, `single_param_adam`: the parameter is the first argument."""
    torch.empty((2, *p.shape), dtype=torch.float32, device=p.device)


def _stance() -> str:
    """What `torch.compiler.set_stance` was told (torch 2.6 and later)."""
    from torch._dynamo import eval_frame

    return str(getattr(getattr(eval_frame, "_stance", None), "stance", "default"))
