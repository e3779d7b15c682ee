"""Hooks on a model that cannot harm it: they never raise, never change values, do nothing in a copied or pickled
model, and stay out of compiled graphs."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from hf_memkit.measuring.memory.error_barrier import ErrorBarrier


class InertHook:
    """Copy of a hook: a copied or saved model must not report to the training."""

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        return None


class ModelHook:
    """Calls a function behind the barrier; returns None, so that torch changes no inputs, outputs or gradients."""

    def __init__(self, name: str, function: Callable[..., object], barrier: ErrorBarrier) -> None:
        self._name = name
        self._function = function
        self._barrier = barrier

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        try:  # as in ErrorBarrier.call, but faster: this runs once a layer
            self._function(*args, **kwargs)
        except Exception as error:
            self._barrier.note(self._name, error)

    def __reduce__(self) -> tuple[type[InertHook], tuple[()]]:
        return (InertHook, ())


class HookSet:
    """The hooks of one owner on one model. A model has one owner at a time. A training that raised leaves its hooks
    behind, because Trainer has no event for that: the next owner removes them, and the previous one sees `removed`."""

    _owner: ClassVar[WeakKeyDictionary[nn.Module, HookSet]] = WeakKeyDictionary()

    def __init__(self, model: nn.Module, barrier: ErrorBarrier, *, compiled: bool = False) -> None:
        self.removed = False
        self._compiled = compiled
        self._barrier = barrier
        self._handles: list[RemovableHandle] = []
        before = HookSet._owner.get(model)
        if before is not None:
            before.remove()
        HookSet._owner[model] = self

    def before_forward(self, module: nn.Module, function: Callable[..., object]) -> RemovableHandle:
        """Call `function(module, args, kwargs)` before each forward of `module`, until `drop` of the result."""
        hook = self._hook("forward pre-hook", function)
        self._handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))
        return self._handles[-1]

    def after_forward(self, module: nn.Module, function: Callable[..., object]) -> None:
        """Call `function(module, args, output)` after each forward of `module`."""
        self._handles.append(module.register_forward_hook(self._hook("forward hook", function)))

    def on_gradient(self, tensor: torch.Tensor, function: Callable[..., object]) -> None:
        """Call `function(gradient)` when the gradient of `tensor` has been computed. The hook disappears with the
        tensor; parameters, which outlive the training, get none."""
        if not isinstance(tensor, nn.Parameter):
            tensor.register_hook(self._hook("gradient hook", function))  # type: ignore[no-untyped-call]

    def before_step(self, optimizer: Any, function: Callable[..., object]) -> None:
        """Call `function(optimizer, args, kwargs)` before each step of a `torch.optim.Optimizer`."""
        self._handles.append(optimizer.register_step_pre_hook(self._hook("step pre-hook", function)))

    def drop(self, handles: list[RemovableHandle]) -> None:
        """Remove these hooks."""
        for handle in handles:
            handle.remove()
        self._handles = [handle for handle in self._handles if handle not in handles]

    def remove(self) -> None:
        """Remove every hook."""
        self.removed = True
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _hook(self, name: str, function: Callable[..., object]) -> ModelHook:
        kind = _hidden_from_dynamo() if self._compiled else ModelHook
        return kind(name, function, self._barrier)


@cache
def _hidden_from_dynamo() -> type[ModelHook]:
    """A ModelHook that dynamo runs as ordinary Python. Made on demand, as `torch.compiler.disable` imports dynamo."""

    class HiddenHook(ModelHook):
        @torch.compiler.disable  # type: ignore[untyped-decorator]
        def __call__(self, *args: Any, **kwargs: Any) -> None:
            super().__call__(*args, **kwargs)

    return HiddenHook


def output_embedding(model: nn.Module) -> nn.Module | None:
    """The module that computes logits from hidden states, if the model names it."""
    find = getattr(model, "get_output_embeddings", None)
    try:
        head = find() if callable(find) else None
    except Exception:  # custom models may inherit the method and lack its attributes
        return None
    return head if isinstance(head, nn.Module) else None


def is_compiled(args: Any, model: nn.Module) -> bool:
    """Whether dynamo compiles the forward of the model or of a part of it."""
    if getattr(args, "torch_compile", False) or os.environ.get("ACCELERATE_DYNAMO_BACKEND", "no").lower() != "no":
        return True
    for module in model.modules():
        # By `module.compile()`, or `torch.compile` of it or of its forward, which is then an attribute of the
        # instance; so is a forward excluded from dynamo.
        forward = vars(module).get("forward")
        disabled = getattr(forward, "_torchdynamo_disable", False) is True
        if hasattr(forward, "_torchdynamo_orig_callable") and not disabled:
            return True
        if getattr(module, "_compiled_call_impl", None) is not None:
            return True
    return False


def needs_whole_graph(model: nn.Module) -> bool:
    """Whether the graph must be whole, by accelerate's settings or `model.compile(fullgraph=True)`, so that hooks are
    impossible. The context of `torch.compile` is in the closure of its wrapper (torch 2.13:
    torch/_dynamo/eval_frame.py, `_TorchDynamoContext`)."""
    if os.environ.get("ACCELERATE_DYNAMO_USE_FULLGRAPH", "").lower() in ("1", "true", "yes"):
        return True
    closure = getattr(getattr(model, "_compiled_call_impl", None), "__closure__", None) or ()
    return any(getattr(cell.cell_contents, "fullgraph", False) is True for cell in closure)
