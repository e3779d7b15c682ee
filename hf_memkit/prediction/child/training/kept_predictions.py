"""Counts the predictions that Trainer would keep of all batches of an evaluation, while a few batches are traced.

```
batches        1 … skipped …  n-1  n
traced         ✓              ✓    ✓
containers     ├── of n-2 ───┤ + 1 = n-1, then n: joined by Trainer itself
```

Losses, predictions, labels and inputs have separate containers (transformers 5.23.0: trainer_pt_utils.py,
`EvalLoopContainer`), which Trainer fills. The first traced batch also stands for the skipped ones. Arrays in RAM are
fake tensors, because numpy's would need memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map
from transformers.trainer_pt_utils import EvalLoopContainer, nested_concat

from hf_memkit.prediction.child.training.traced_batches import is_traced


class KeptPredictions:
    """Predictions kept in one evaluation, of which some batches are traced and others skipped. `every`: number of
    batches after which the containers move to RAM; None: at the end."""

    def __init__(self, skipped: int, traced: int, every: int | None) -> None:
        count = skipped + traced
        self.on_gpu = count if every is None else min(every, count)  # most batches at a time
        self.gpu_bytes = 0  # most in all containers, before they are joined
        self._skipped_on_gpu = max(0, self.on_gpu - traced)
        self._skipped_in_ram = skipped - self._skipped_on_gpu  # moved before the first traced batch
        self._added: dict[Any, int] = {}  # container → batches in its tensors
        self._in_ram: dict[Any, Any] = {}

    def add(self, container: Any, tensors: Any) -> None:
        first = container not in self._added
        _ADD(container, tensors)
        self._added[container] = self._added.get(container, 0) + 1
        if first and self._skipped_on_gpu:
            self._added[container] += self._skipped_on_gpu
            if container.do_nested_concat:
                container.tensors = _rows(container.tensors, 1 + self._skipped_on_gpu, 1)
            else:
                container.tensors.append(_rows(tensors, self._skipped_on_gpu, 1))
        tensors = tree_leaves([container.tensors for container in self._added])
        self.gpu_bytes = max(self.gpu_bytes, sum(leaf.nbytes for leaf in tensors if isinstance(leaf, torch.Tensor)))

    @property
    def containers(self) -> int:
        """Number of containers with content: losses, predictions, labels, inputs."""
        return len(self._added)

    def move(self, container: Any) -> None:
        if container.tensors is None or not is_traced():
            _MOVE(container)
            return
        arrays = tree_map(_as_array, container.tensors)
        batches, self._added[container] = self._added[container], 0
        so_far = self._in_ram.get(container)
        if so_far is None and self._skipped_in_ram:
            more = _rows(arrays, self._skipped_in_ram, batches)
            so_far = more if container.do_nested_concat else list(more)
        if so_far is None:
            joined = arrays
        elif container.do_nested_concat:
            joined = nested_concat(so_far, arrays, padding_index=container.padding_index)
        else:
            joined = [*so_far, *arrays]
        self._in_ram[container] = joined
        container.arrays = tree_map(lambda leaf: leaf.numpy() if isinstance(leaf, torch.Tensor) else leaf, joined)
        container.tensors = None


_ADD, _MOVE = EvalLoopContainer.add, EvalLoopContainer.to_cpu_and_numpy


@contextlib.contextmanager
def counting_all_batches(kept: KeptPredictions) -> Iterator[None]:
    """Context for one evaluation whose containers `kept` counts."""
    EvalLoopContainer.add = lambda container, tensors: kept.add(container, tensors)
    EvalLoopContainer.to_cpu_and_numpy = lambda container: kept.move(container)
    try:
        yield
    finally:
        EvalLoopContainer.add, EvalLoopContainer.to_cpu_and_numpy = _ADD, _MOVE


def _rows(tensors: Any, times: int, held: int) -> Any:
    """Tensors with `times` batches, like tensors with `held` batches."""

    def resized(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        rows, *rest = leaf.shape or (1,)
        return leaf.new_empty((rows * times // held, *rest))

    return tree_map(resized, tensors)


def _as_array(leaf: Any) -> Any:
    """Moves a tensor as `nested_numpify` does; an array shares the memory of a host tensor."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    moved = leaf.to("meta" if leaf.device.type == "cpu" else "cpu")
    return moved.float() if moved.dtype is torch.bfloat16 else moved
