"""CUDA streams, events and device contexts on a card that is not there: one stream, on which all is done at once.

A block that another stream still reads is not reused at once by the real allocator (`Tensor.record_stream`); here it
is. Memory that is page-locked is the host's.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch

__all__ = ["Event", "Stream", "one_stream"]


class Event:
    """Something that has happened already."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def record(self, stream: Any = None) -> None:
        pass

    def wait(self, stream: Any = None) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True


class Stream(contextlib.nullcontext[None]):
    """The one stream of the card."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self.device = torch.device("cuda:0")

    def wait_stream(self, stream: Any) -> None:
        pass

    def wait_event(self, event: Any) -> None:
        pass

    def record_event(self, event: Any = None) -> Any:
        return event or Event()

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True


class _Device(contextlib.nullcontext[None]):
    """`torch.cuda.device(…)` as a context."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()


def one_stream() -> None:
    """Replaces what torch would ask CUDA's driver for; nothing where torch sees a card of its own."""
    if getattr(torch.version, "cuda", None) and torch._C._cuda_getDeviceCount() > 0:
        return
    answers: dict[str, Any] = {
        "Stream": Stream, "ExternalStream": Stream, "Event": Event, "StreamContext": _Device,
        "stream": lambda *args, **kwargs: contextlib.nullcontext(),
        "current_stream": Stream, "default_stream": Stream, "set_stream": lambda *args, **kwargs: None,
        "device": _Device, "device_of": _Device,
    }  # fmt: skip
    for name, answer in answers.items():
        setattr(torch.cuda, name, answer)
    torch.Tensor.record_stream = lambda self, stream: None  # type: ignore[method-assign, assignment]
