"""Turns batches of the user's loader into tensors of the traced training."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from hf_memkit.prediction.child.tracer.constant_propagation import remember

Batches = Sequence[Any]


def on_host(loader: Any) -> Any:
    """The loader without workers, and without accelerate's moving of batches to the GPU."""
    for part in (loader, getattr(loader, "base_dataloader", None)):
        plain = {"device": None, "num_workers": 0, "prefetch_factor": None, "persistent_workers": False}
        for name, value in plain.items():
            if hasattr(part, name):
                object.__setattr__(part, name, value)
    return loader


class Loader:
    """Data loader of given batches, as tensors of the traced training. `before` is called with the index of each batch
    before it is created; `skipped`: number of batches that it does not yield."""

    def __init__(
        self,
        batches: Batches,
        arguments: Any,
        dtype: torch.dtype | None,
        before: Callable[[int], None] | None = None,
        *,
        skipped: int = 0,
    ) -> None:
        self.skipped = skipped
        self.batches, self._arguments, self._dtype, self._before = batches, arguments, dtype, before
        self.dataset: Sequence[Any] = range(len(batches) * max(1, arguments.train_batch_size))
        self.batch_size = arguments.train_batch_size
        self.sampler = self.batch_sampler = None

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        def moved(leaf: Any) -> Any:
            """Moves a tensor as accelerate does when it fetches a batch; DeepSpeed's get its weights' dtype."""
            dtype = self._dtype if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else None
            return leaf.to(self._arguments.device, dtype) if isinstance(leaf, torch.Tensor) else leaf

        for number, batch in enumerate(self.batches):
            if self._before is not None:
                self._before(number)
            yield _map_leaves(moved, _map_leaves(traced_tensor, batch))


def _map_leaves(function: Callable[[Any], Any], value: Any) -> Any:
    """Applies a function to the leaves of a batch as Trainer does (transformers: `Trainer._prepare_input`)."""
    if isinstance(value, Mapping):
        return type(value)({key: _map_leaves(function, item) for key, item in value.items()})  # type: ignore[call-arg]
    if isinstance(value, tuple | list):
        return type(value)(_map_leaves(function, item) for item in value)
    return function(value)


def traced_tensor(leaf: Any) -> Any:
    """A tensor of the traced training like a real one, whose values stay known."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    if not is_traced():
        return leaf.clone()
    made = torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="cpu")
    remember(made, leaf)
    return made


def is_traced() -> bool:
    """Whether new tensors are fake."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None
