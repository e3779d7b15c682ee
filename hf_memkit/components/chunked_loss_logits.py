"""Placeholders for logits, which hold what would compute them, for the loss in chunks (`chunked_loss.py`).

This file needs torch and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

Step = Callable[[Any], Any]
"""What a model does to its logits: scaling, capping, another dtype."""


def vocabulary_of(head: Any) -> int:
    """Rows of the output embedding, also where PEFT wraps it or its weight is partitioned."""
    return int(head.out_features if hasattr(head, "out_features") else head.weight.shape[0])


class NotedLogits:
    """Placeholder for logits: the output embedding's input, and the operations that the model applied to the logits.

    Operations that change each logit alone are recorded; any other raises ValueError.

    Attributes:
        chunked: the loss in chunks that computes logits from `hidden` (`head`, `name`, `logits(hidden, steps)`).
        hidden: the output embedding's input, [..., width].
        steps: the operations, in order.
    """

    def __init__(self, chunked: Any, hidden: Tensor, steps: tuple[Step, ...] = ()) -> None:
        self.chunked, self.hidden, self.steps = chunked, hidden, steps
        self.device = hidden.device
        self.shape = torch.Size((*hidden.shape[:-1], vocabulary_of(chunked.head)))

    def noted(self, step: Step) -> NotedLogits:
        return NotedLogits(self.chunked, self.hidden, (*self.steps, step))

    def float(self) -> NotedLogits:
        return self.noted(lambda logits: logits.float())

    def to(self, *args: Any, **kwargs: Any) -> NotedLogits:
        return self.noted(lambda logits: logits.to(*args, **kwargs))

    def contiguous(self) -> NotedLogits:
        return self

    def tanh(self) -> NotedLogits:
        return self.noted(torch.tanh)

    def __mul__(self, factor: Any) -> NotedLogits:
        self._must_be_constant(factor)
        return self.noted(lambda logits: logits * factor)

    __rmul__ = __mul__

    def __truediv__(self, divisor: Any) -> NotedLogits:
        self._must_be_constant(divisor)
        return self.noted(lambda logits: logits / divisor)

    def __getitem__(self, index: Any) -> Any:
        raise self._refusal("indexes its logits")

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name) if name.startswith("__") else self._refusal(f"uses .{name} of its logits")

    @classmethod
    def __torch_function__(cls, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        noted = next(value for value in (*args, *(kwargs or {}).values()) if isinstance(value, cls))
        if func in (torch.tanh, nn.functional.tanh) and len(args) == 1 and not kwargs:
            return noted.tanh()
        raise noted._refusal(f"calls {getattr(func, '__name__', func)} on its logits")

    def _must_be_constant(self, value: Any) -> None:
        if not isinstance(value, Tensor | int | float) or (
            isinstance(value, Tensor) and (value.dim() > 0 or value.requires_grad)
        ):
            raise self._refusal("scales its logits by something other than a constant number")

    def _refusal(self, doing: str) -> ValueError:
        return ValueError(
            f"{self.chunked.name} {doing}, which chunked_loss cannot repeat for each chunk. Omit chunked_loss"
        )


class LogitsOnDemand(torch.Tensor):
    """All logits of an evaluation, computed as the model does when an operation first reads them."""

    noted: NotedLogits
    autocast: tuple[str, torch.dtype, bool]
    whole: Tensor | None

    @staticmethod
    def __new__(cls: Any, noted: NotedLogits) -> Any:
        kind = noted.device.type
        autocast = torch.is_autocast_enabled(kind)
        # accelerate turns what a model gives under autocast into fp32, and would look at every logit for it.
        dtype = torch.float32 if autocast else noted.hidden.dtype
        self = torch.Tensor._make_wrapper_subclass(cls, noted.shape, dtype=dtype, device=noted.device)
        self.noted, self.whole = noted, None
        self.autocast = kind, torch.get_autocast_dtype(kind), autocast
        return self

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = tree_map_only(cls, cls.made, (args, kwargs or {}))
        return func(*args, **kwargs)

    def made(self) -> Tensor:
        if self.whole is None:
            kind, dtype, enabled = self.autocast
            with torch.no_grad(), torch.autocast(kind, dtype=dtype, enabled=enabled):
                self.whole = self.noted.chunked.logits(self.noted.hidden, self.noted.steps).to(self.dtype)
        return self.whole


def without_notes(output: Any, instead: Callable[[NotedLogits], Any]) -> Any:
    """The model's output, with each NotedLogits replaced by what `instead` returns for it."""

    def value_of(value: Any) -> Any:
        return instead(value) if isinstance(value, NotedLogits) else value

    if isinstance(output, tuple):
        return tuple(value_of(value) for value in output)
    return type(output)(**{key: value_of(value) for key, value in output.items()})
