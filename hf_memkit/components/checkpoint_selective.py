"""Selective activation checkpointing: matrix products and attention are kept, everything else is recomputed.

The kept operations do most of the arithmetic; the recomputed ones (norms, activation functions, dropout, residual
sums) do almost none. A `context_fn` in `activation_checkpointing_kwargs` would do the same, but TrainingArguments are
saved as JSON, which cannot hold a function. So it is installed on the layers.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from transformers.modeling_layers import GradientCheckpointingLayer

_FLAGS: tuple[str, ...] = ("gradient_checkpointing", "_gradient_checkpointing_func")  # transformers:modeling_layers.py

_aten = torch.ops.aten
_PRODUCTS: Final = {_aten.mm.default, _aten.addmm.default, _aten._scaled_mm.default}
# Batched products are left out: eager attention computes its scores with them, one number per pair of tokens.
_ATTENTION: Final = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
    "_flash_attn_forward",
    "_flash_attn_varlen_forward",
)


def install(model: nn.Module) -> Callable[[], None]:
    """Checkpoints every layer of `model` selectively; returns a function that undoes it.

    Raises:
        ValueError: the model has no layer that transformers can checkpoint.
    """
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise ValueError(f"{type(model).__name__} has no GradientCheckpointingLayer. Omit selective-checkpointing")
    # Also the modules around the layers: with the flag on, a model makes no cache in training.
    switched = [module for module in model.modules() if hasattr(module, "gradient_checkpointing")]
    before = [{name: vars(module)[name] for name in _FLAGS if name in vars(module)} for module in switched]
    for module in switched:
        vars(module)["gradient_checkpointing"] = True
    for layer in layers:
        context = _Products().contexts
        vars(layer)["_gradient_checkpointing_func"] = partial(checkpoint, use_reentrant=False, context_fn=context)

    def undo() -> None:
        for module, old in zip(switched, before, strict=True):
            for name in _FLAGS:
                vars(module).pop(name, None)
            vars(module).update(old)

    return undo


class _Products:
    """Keeps one layer's attention and its matrix products except the last: backward does not need its output, and
    torch stops recomputing before it. A layer's products are counted during its first forward pass."""

    def __init__(self) -> None:
        self._counted = 0

    def contexts(self) -> Any:
        """The two contexts of one forward pass, as torch expects them from `context_fn`."""
        last = self._counted
        seen = {False: 0, True: 0}

        def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            if operator in _PRODUCTS:
                seen[context.is_recompute] += 1
                if not context.is_recompute:
                    self._counted = seen[False]
                if seen[context.is_recompute] != last:
                    return CheckpointPolicy.MUST_SAVE
            elif _name(operator) in _ATTENTION:
                return CheckpointPolicy.MUST_SAVE
            return CheckpointPolicy.PREFER_RECOMPUTE

        return create_selective_checkpoint_contexts(policy)  # type: ignore[no-untyped-call]


def _name(operator: Any) -> str:
    """`_flash_attn_forward` of `flash_attn._flash_attn_forward.default`."""
    return str(operator).split(".")[1] if "." in str(operator) else str(operator)
