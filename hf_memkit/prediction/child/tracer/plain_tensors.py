"""Properties of tensors below autograd: device, whether they are fake, and the tensors that hold their memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch


def plain_tensors_in(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """The tensors among values and in lists; for a subclass, such as torchao's 8-bit states or a
    DTensor, its inner tensors."""
    for value in values:
        if isinstance(value, torch.Tensor):
            flatten = None if is_fake(value) else getattr(value, "__tensor_flatten__", None)
            if flatten is None:
                yield value
            else:
                yield from plain_tensors_in([getattr(value, name) for name in flatten()[0]])
        elif isinstance(value, list | tuple):
            yield from plain_tensors_in(value)


def device_type(tensor: torch.Tensor) -> str:
    """`tensor.device.type`, without the operation that reading the device of a fake tensor runs."""
    device: torch.device = getattr(tensor, "fake_device", None) or tensor.device
    return device.type


def is_fake(tensor: Any) -> bool:
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(tensor, FakeTensor)
