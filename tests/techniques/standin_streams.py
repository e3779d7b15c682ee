"""torchao's real CPUOffloadOptimizer on a CPU: only the streams between GPU and host are stood in for.

Every copy is done at once, so that what is shown is the order of torchao's steps, not their overlap. Pinned memory is
ordinary memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torchao.optim import cpu_offload


class _Event:
    def synchronize(self) -> None:
        pass


class _Stream:
    def wait_stream(self, other: Any) -> None:
        pass

    def record_event(self) -> _Event:
        return _Event()

    def synchronize(self) -> None:
        pass


class _Torch:
    """torch as torchao's module sees it: with streams that are none, and no pinned memory."""

    cuda = SimpleNamespace(Stream=_Stream, current_stream=_Stream, stream=lambda stream: contextlib.nullcontext())

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def empty_like(tensor: torch.Tensor, *, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        return torch.empty_like(tensor, **options)


@contextlib.contextmanager
def standin_streams() -> Iterator[None]:
    """Inside the block torchao finds a "cuda" whose memory is this machine's."""
    with (
        mock.patch.object(cpu_offload, "torch", _Torch()),
        mock.patch.object(cpu_offload, "get_available_devices", lambda: ["cpu", "cuda"]),
        mock.patch.object(torch.Tensor, "record_stream", lambda tensor, stream: None),
    ):
        yield
