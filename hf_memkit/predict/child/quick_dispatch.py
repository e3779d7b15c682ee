"""Makes torch's way to the tracer shorter, in the child process only: each operation goes it, and twice as often the
question on which device a fake tensor lies.

Nothing that is traced hangs on it, and where torch has no such function everything stays as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

__all__ = ["quick_dispatch"]

Lists = Sequence[Sequence[Any]]


def quick_dispatch(mode: type) -> None:
    """Replaces two of torch's functions. To be called before the first operation under a dispatch mode: torch keeps
    what it finds then.

    * Before it calls a mode, torch looks for a rule that somebody registered for this operation and this class of mode
      (torch 2.13: _library/simple_registry.py, `find_torch_dispatch_rule`). For `mode` there is none.
    * Optimizers ask each tensor of their lists for its device and type, to put together what belongs together (torch
      2.13: utils/_foreach_utils.py). Where all are alike, the lists stay as they are.
    """
    import torch._library.simple_registry

    registry: Any = torch._library.simple_registry
    find = getattr(registry, "find_torch_dispatch_rule", None)
    if find is not None:
        registry.find_torch_dispatch_rule = lambda operation, kind: None if kind is mode else find(operation, kind)

    core: Any = torch._C
    group = getattr(core, "_group_tensors_by_device_and_dtype", None)
    if group is None:
        return

    def grouped(lists: Lists, with_indices: bool = False) -> Any:
        kinds = {_kind(tensor) for tensor in lists[0]}
        if len(kinds) != 1 or None in kinds:
            return group(lists, with_indices)
        indices = list(range(len(lists[0]))) if with_indices else []
        return {kinds.pop(): ([list(each) for each in lists], indices)}

    core._group_tensors_by_device_and_dtype = grouped


def _kind(tensor: Any) -> tuple[torch.device, torch.dtype] | None:
    return (tensor.fake_device, tensor.dtype) if tensor.__class__ is FakeTensor else None
