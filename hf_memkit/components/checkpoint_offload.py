"""Activation checkpointing with the layers' inputs kept in host memory.

On a CUDA GPU Trainer does this itself (`activation_checkpointing_kwargs={"offload": true}`, transformers 5.17 and
later), with pinned memory, which PyTorch refuses on a machine without an accelerator. Here pinning is optional, so
that a rehearsal on a CPU runs the same code.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

_FLAGS: tuple[str, ...] = ("gradient_checkpointing", "_gradient_checkpointing_func")  # transformers:modeling_layers.py


def install(model: nn.Module, *, pin_memory: bool = True) -> Callable[[], None]:
    """Checkpoints every layer of `model`, with inputs in (pinned) host memory; returns a function that undoes it.

    Raises:
        ValueError: no layer that transformers can checkpoint, or `pin_memory` is True without an accelerator.
    """
    accelerator = torch.accelerator.current_accelerator()
    if pin_memory and accelerator is None:
        raise ValueError("pin_memory=True: pinned memory needs a GPU, and torch finds none. Write pin_memory=False")
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise ValueError(f"{type(model).__name__} has no GradientCheckpointingLayer. Omit checkpoint_offload")
    device_type = "cpu" if accelerator is None else accelerator.type

    def offloading(function: Callable[..., Any], *args: Any) -> Any:
        with save_on_cpu(pin_memory=pin_memory, device_type=device_type):
            return checkpoint(function, *args, use_reentrant=False)

    # Also the modules around the layers: with the flag on, a model makes no cache in training.
    switched = [module for module in model.modules() if hasattr(module, "gradient_checkpointing")]
    before = [{name: vars(module)[name] for name in _FLAGS if name in vars(module)} for module in switched]
    for module in switched:
        vars(module)["gradient_checkpointing"] = True
    for layer in layers:
        vars(layer)["_gradient_checkpointing_func"] = offloading

    def undo() -> None:
        for module, old in zip(switched, before, strict=True):
            for name in _FLAGS:
                vars(module).pop(name, None)
            vars(module).update(old)

    return undo
