"""Batches that the user's loader has made, as tensors of the traced training."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from hf_memkit.prediction.child.tracer.constant_propagation import remember

Batches = Sequence[Any]


def on_host(loader: Any) -> Any:
    """The loader without what happens beside it: workers, and accelerate moving batches to the GPU."""
    for each in (loader, getattr(loader, "base_dataloader", None)):
        plain = {"device": None, "num_workers": 0, "prefetch_factor": None, "persistent_workers": False}
        for name, value in plain.items():
            if hasattr(each, name):
                object.__setattr__(each, name, value)
    return loader


class Loader:
    """Stands for a data loader: batches that were made outside, as tensors of the traced training. Calls `before` with
    the number of each batch before it is there. `left_out`: batches that it does not give."""

    def __init__(
        self,
        batches: Batches,
        arguments: Any,
        dtype: torch.dtype | None,
        before: Callable[[int], None] | None = None,
        *,
        left_out: int = 0,
    ) -> None:
        self.left_out = left_out
        self.batches, self._arguments, self._dtype, self._before = batches, arguments, dtype, before
        self.dataset: Sequence[Any] = range(len(batches) * max(1, arguments.train_batch_size))
        self.batch_size = arguments.train_batch_size
        self.sampler = self.batch_sampler = None

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        def moved(leaf: Any) -> Any:
            """accelerate moves a batch to the GPU when it is fetched; DeepSpeed's has its weights' dtype."""
            if not isinstance(leaf, torch.Tensor):
                return leaf
            return leaf.to(self._arguments.device, self._dtype if leaf.is_floating_point() else None)

        for number, batch in enumerate(self.batches):
            if self._before is not None:
                self._before(number)
            yield _mapped(moved, _mapped(made_here, batch))


def _mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """As Trainer goes through a batch (transformers: `Trainer._prepare_input`)."""
    if isinstance(value, Mapping):
        return type(value)({key: _mapped(function, each) for key, each in value.items()})  # type: ignore[call-arg]
    if isinstance(value, tuple | list):
        return type(value)(_mapped(function, each) for each in value)
    return function(value)


def made_here(leaf: Any) -> Any:
    """A tensor like a real one, made in the traced training, which knows the real one's values."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    if not is_traced():
        return leaf.clone()
    made = torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="cpu")
    remember(made, leaf)
    return made


def is_traced() -> bool:
    """Whether tensors that are made now are fake."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None
