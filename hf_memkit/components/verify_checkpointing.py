"""Stops a run in its first step if activation checkpointing recomputed too few layers.

The flag alone proves nothing: a wrapper of the model may drop it, the model may be in evaluation mode, or the argument
was set too late. Training then silently needs several times the memory.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import TrainerCallback
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import logging


def trainer_options(*, model: nn.Module, processing_class: Any, arguments: Any, every: int = 1) -> dict[str, Any]:
    """A callback that raises RuntimeError before the first optimizer step if layers were not recomputed.

    Args:
        model, processing_class: not used.
        arguments: the TrainingArguments.
        every: n, if every n-th layer is checkpointed.

    With `torch_compile` it only warns: hooks do not see what compiled code recomputes.
    """
    if getattr(arguments, "torch_compile", False):
        logging.get_logger(__name__).warning(
            "torch_compile=True: activation checkpointing is not verified, because hooks do not see what compiled "
            "code recomputes. To verify it, train one step without torch_compile"
        )
        return {}
    return {"callbacks": [VerifyCheckpointing(every)]}


class VerifyCheckpointing(TrainerCallback):  # type: ignore[misc]
    """Hooks layers until the first optimizer step, and raises RuntimeError there if too few ran again in backward.

    Attributes:
        layers, recomputed: number of layers in the first step, and of those recomputed in backward; None before it.
    """

    def __init__(self, every: int = 1) -> None:
        self.layers: int | None = None
        self.recomputed: int | None = None
        self._every = every
        self._model: weakref.ref[nn.Module] | None = None
        self._handles: list[RemovableHandle] = []
        self._ran: set[int] = set()
        self._again: set[int] = set()
        self._flagged: set[int] = set()

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if model is None or self.layers is not None:
            return
        self._remove()  # training restarts after auto_find_batch_size caught an error
        for numbers in (self._ran, self._again, self._flagged):
            numbers.clear()
        self._model = weakref.ref(model)
        for number, layer in enumerate(_layers(model)):
            # On the first child, not on the layer: transformers 5.23 checkpoints a layer's `forward` and 5.17 its
            # `__call__`, so that a hook on the layer fires a second time in one of them only.
            for child in _first_children(layer):
                self._handles.append(child.register_forward_pre_hook(self._hook(number, layer), with_kwargs=True))

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._remove()

    def _hook(self, number: int, layer: nn.Module) -> Callable[..., None]:
        trained = any(parameter.requires_grad for parameter in layer.parameters())

        def hook(child: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            # Inside of backward there is a graph task; torch's own checkpoint asks the same way.
            if torch._C._current_graph_task_id() != -1:
                if torch.is_grad_enabled():
                    self._again.add(number)
            elif trained or any(
                isinstance(value, Tensor) and value.requires_grad for value in (*args, *kwargs.values())
            ):
                self._ran.add(number)
                if getattr(layer, "gradient_checkpointing", False):
                    self._flagged.add(number)

        return hook

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        model = self._model() if self._model is not None else None
        if self.layers is not None or model is None:
            return
        self._remove()
        expected = self._ran if self._every == 1 else {*sorted(self._ran)[:1], *(self._ran & self._flagged)}
        self.layers = len(self._ran)
        self.recomputed = len(self._ran & self._again)
        if not self._ran:
            raise RuntimeError(
                f"activation checkpointing has no effect: {type(model).__name__} ran no layer to checkpoint. Omit it "
                "for this model"
            )
        if missing := len(expected - self._again):
            raise RuntimeError(
                f"activation checkpointing: {missing} of {len(expected)} layers were not recomputed in the first "
                f"step: {self._why(model)}"
            )

    on_step_end = on_pre_optimizer_step

    def _why(self, model: nn.Module) -> str:
        if not model.training or any(not layer.training for layer in _layers(model)):
            return "the model or a layer is in evaluation mode, where nothing is checkpointed. Call model.train()"
        if not self._flagged:
            return (
                "gradient_checkpointing is False in every layer: a wrapper of the model dropped the call, or it was "
                "set too late. Turn it on in the model itself, before train()"
            )
        return "gradient_checkpointing is False in those layers, or ignored by their class. Omit it for this model"

    def _remove(self) -> None:
        while self._handles:
            self._handles.pop().remove()


def _layers(model: nn.Module) -> list[nn.Module]:
    """The layers that transformers can checkpoint, else the members of the model's module lists."""
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if layers:
        return layers
    return [layer for stack in model.modules() if isinstance(stack, nn.ModuleList) for layer in stack]


def _first_children(module: nn.Module) -> Iterator[nn.Module]:
    """Yields the first child that is called; module lists and dictionaries never are."""
    for child in module.children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            inner = list(_first_children(child))
            if inner:
                yield inner[0]
                return
        else:
            yield child
            return
