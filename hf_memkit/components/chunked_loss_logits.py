"""Placeholders for logits that record how to compute them (used by `chunked_loss.py`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

Step = Callable[[Any], Any]
"""An operation that a model applies to its logits: scaling, capping, a cast."""


def vocabulary_of(head: Any) -> int:
    """Rows of the output embedding, also if PEFT wraps it or its weight is partitioned."""
    return int(head.out_features if hasattr(head, "out_features") else head.weight.shape[0])


class RecordedLogits:
    """Placeholder for logits: the output embedding's input, and the operations that the model applied to the logits.

    Operations that change each logit alone are recorded; any other raises ValueError.

    Attributes:
        chunked: the `_ChunkedLoss`, which computes logits from `hidden` (`head`, `name`, `logits(hidden, steps)`).
        hidden: the output embedding's input, [..., width].
        steps: the operations, in order.
    """

    def __init__(self, chunked: Any, hidden: Tensor, steps: tuple[Step, ...] = ()) -> None:
        self.chunked, self.hidden, self.steps = chunked, hidden, steps
        self.device = hidden.device
        self.shape = torch.Size((*hidden.shape[:-1], vocabulary_of(chunked.head)))

    def with_step(self, step: Step) -> RecordedLogits:
        return RecordedLogits(self.chunked, self.hidden, (*self.steps, step))

    def float(self) -> RecordedLogits:
        return self.with_step(lambda logits: logits.float())

    def to(self, *args: Any, **kwargs: Any) -> RecordedLogits:
        return self.with_step(lambda logits: logits.to(*args, **kwargs))

    def contiguous(self) -> RecordedLogits:
        return self

    def tanh(self) -> RecordedLogits:
        return self.with_step(torch.tanh)

    def __mul__(self, factor: Any) -> RecordedLogits:
        self._must_be_constant(factor)
        return self.with_step(lambda logits: logits * factor)

    __rmul__ = __mul__

    def __truediv__(self, divisor: Any) -> RecordedLogits:
        self._must_be_constant(divisor)
        return self.with_step(lambda logits: logits / divisor)

    def __getitem__(self, index: Any) -> Any:
        raise self._refusal("indexes its logits")

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name) if name.startswith("__") else self._refusal(f"uses .{name} of its logits")

    @classmethod
    def __torch_function__(cls, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        recorded = next(value for value in (*args, *(kwargs or {}).values()) if isinstance(value, cls))
        if func in (torch.tanh, nn.functional.tanh) and len(args) == 1 and not kwargs:
            return recorded.tanh()
        raise recorded._refusal(f"calls {getattr(func, '__name__', func)} on its logits")

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
    """All logits of an evaluation, computed when an operation first reads them."""

    recorded: RecordedLogits
    autocast: tuple[str, torch.dtype, bool]
    computed: Tensor | None

    @staticmethod
    def __new__(cls: Any, recorded: RecordedLogits) -> Any:
        kind = recorded.device.type
        autocast = torch.is_autocast_enabled(kind)
        # accelerate casts a model's outputs under autocast to fp32, which would compute every logit.
        dtype = torch.float32 if autocast else recorded.hidden.dtype
        self = torch.Tensor._make_wrapper_subclass(cls, recorded.shape, dtype=dtype, device=recorded.device)
        self.recorded, self.computed = recorded, None
        self.autocast = kind, torch.get_autocast_dtype(kind), autocast
        return self

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = tree_map_only(cls, cls.compute, (args, kwargs or {}))
        return func(*args, **kwargs)

    def compute(self) -> Tensor:
        if self.computed is None:
            kind, dtype, enabled = self.autocast
            with torch.no_grad(), torch.autocast(kind, dtype=dtype, enabled=enabled):
                self.computed = self.recorded.chunked.logits(self.recorded.hidden, self.recorded.steps).to(self.dtype)
        return self.computed


def replace_recorded(output: Any, replacement: Callable[[RecordedLogits], Any]) -> Any:
    """The model's output with `replacement(logits)` for each RecordedLogits."""

    def value_of(value: Any) -> Any:
        return replacement(value) if isinstance(value, RecordedLogits) else value

    if isinstance(output, tuple):
        return tuple(value_of(value) for value in output)
    return type(output)(**{key: value_of(value) for key, value in output.items()})
