"""What Trainer keeps of an evaluation's batches: as if all of them had been evaluated, where a few are traced.

```
batches        1 … left out …  n-1  n
traced         ✓               ✓    ✓
containers     ├─ as of n-2 ──┤ + 1 = n-1, then n: joined by Trainer itself
```

Losses, predictions, labels and inputs each have a container (transformers 5.23.0: trainer_pt_utils.py,
`EvalLoopContainer`), and what comes into it is Trainer's business. The first batch that comes stands for those that
are left out, too. Arrays in RAM are fake tensors: numpy's would have memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map
from transformers.trainer_pt_utils import EvalLoopContainer, nested_concat

from hf_memkit.prediction.child.training.traced_batches import is_traced


class Kept:
    """Of one evaluation, of which some batches are traced and others left out; after `every` so many the containers
    move to RAM (None: at the end). `on_gpu`: batches that are on the GPU together, at most; `gpu_bytes`: the most that
    all containers held there, before they were joined."""

    def __init__(self, left_out: int, traced: int, every: int | None) -> None:
        count = left_out + traced
        self.on_gpu = count if every is None else min(every, count)
        self.gpu_bytes = 0
        self._more = max(0, self.on_gpu - traced)  # than are traced, on the GPU
        self._moved = left_out - self._more  # by the time that the first traced one comes
        self._added: dict[Any, int] = {}  # container → batches in its tensors
        self._in_ram: dict[Any, Any] = {}

    def add(self, container: Any, tensors: Any) -> None:
        first = container not in self._added
        _ADD(container, tensors)
        self._added[container] = self._added.get(container, 0) + 1
        if first and self._more:
            self._added[container] += self._more
            if container.do_nested_concat:
                container.tensors = _rows(container.tensors, 1 + self._more, 1)
            else:
                container.tensors.append(_rows(tensors, self._more, 1))
        held = tree_leaves([each.tensors for each in self._added])
        self.gpu_bytes = max(self.gpu_bytes, sum(each.nbytes for each in held if isinstance(each, torch.Tensor)))

    @property
    def containers(self) -> int:
        """How many have something: of losses, predictions, labels and inputs."""
        return len(self._added)

    def move(self, container: Any) -> None:
        if container.tensors is None or not is_traced():
            _MOVE(container)
            return
        arrays = tree_map(_on_host, container.tensors)
        batches, self._added[container] = self._added[container], 0
        so_far = self._in_ram.get(container)
        if so_far is None and self._moved:
            more = _rows(arrays, self._moved, batches)
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
def as_of_more_batches(kept: Kept) -> Iterator[None]:
    """Within it one evaluation runs."""
    EvalLoopContainer.add = lambda container, tensors: kept.add(container, tensors)
    EvalLoopContainer.to_cpu_and_numpy = lambda container: kept.move(container)
    try:
        yield
    finally:
        EvalLoopContainer.add, EvalLoopContainer.to_cpu_and_numpy = _ADD, _MOVE


def _rows(found: Any, times: int, of: int) -> Any:
    """Tensors that hold `times` batches, of those that hold `of`."""

    def one(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        rows, *rest = leaf.shape or (1,)
        return leaf.new_empty((rows * times // of, *rest))

    return tree_map(one, found)


def _on_host(leaf: Any) -> Any:
    """As `nested_numpify` moves it. What is on the host already shares its memory with the array."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    moved = leaf.to("meta" if leaf.device.type == "cpu" else "cpu")
    return moved.float() if moved.dtype is torch.bfloat16 else moved
