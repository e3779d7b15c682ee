"""Replaces activation functions that transformers composes of many operations by one operation each, to save memory.

GPT-2's `gelu_new` is a product of powers and a tanh: autograd keeps five tensors as large as the feed-forward
layer. torch's GELU keeps only its input and recomputes the rest in backward: the same formula, with other rounding.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn
from transformers import activations


class QuickGELU(nn.Module):
    """x·sigmoid(1.702 x) (Hendrycks & Gimpel, arXiv 1606.08415) as silu(1.702 x) / 1.702, which keeps one tensor."""

    def forward(self, value: Tensor) -> Tensor:
        return nn.functional.silu(1.702 * value) / 1.702


def _fused(module: nn.Module) -> nn.Module | None:
    """The same function as one operation, or None. Matches the exact type: a subclass may compute something else."""
    name = type(module).__name__
    if type(module) is not getattr(activations, name, None):
        return None
    if name in ("NewGELUActivation", "FastGELUActivation", "AccurateGELUActivation"):
        return nn.GELU(approximate="tanh")
    own = getattr(module, "act", None)
    if name == "GELUTanh" and own == getattr(module, "_gelu_tanh_python", None):
        return nn.GELU(approximate="tanh")
    if name == "GELUActivation" and own == getattr(module, "_gelu_python", None):
        return nn.GELU()
    return QuickGELU() if name == "QuickGELUActivation" else None


def install(model: nn.Module) -> Callable[[], None]:
    """Replaces the composed activation functions in `model`; returns a function that undoes it.

    Raises:
        ValueError: the model has none.
    """
    replaced = [
        (parent, name, module, fused)
        for parent in list(model.modules())
        for name, module in list(parent.named_children())
        if (fused := _fused(module)) is not None
    ]
    if not replaced:
        raise ValueError(
            f"{type(model).__name__} has no activation function of several operations to fuse. Omit fused-gelu"
        )
    for parent, name, module, fused in replaced:
        fused.train(module.training)
        setattr(parent, name, fused)

    def undo() -> None:
        for parent, name, module, fused in replaced:
            if getattr(parent, name) is fused:
                module.train(fused.training)
                setattr(parent, name, module)

    return undo
