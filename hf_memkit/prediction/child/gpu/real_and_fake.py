"""Decides which tensors of a user's script are fake before it trains: parameters, and tensors on the GPU.

```
tensor = torch.arange(8)           real: data, lengths, splits, tokenized and cached text
GPT2LMHeadModel(config)            fake: parameters have shapes only
nn.Linear(8, 8)                    real while all such parameters are small, then fake
tensor.to("cuda")                  fake: there is no such memory
model(tensor)                      fake: computed from a fake tensor
```

A batch of data that is copied to the GPU keeps its values (`constant_propagation.py`). A made-up value never reaches a
file or a decision: a script that reads values of a fake tensor is stopped with its line. Libraries that only look at
values (`bool`, `.item()`) get an answer, as in the traced steps.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, NoReturn

import numpy as np
import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Trainer

from hf_memkit.common.errors import Unmodelled
from hf_memkit.prediction.child.gpu.fake_gpu import swap_tensor
from hf_memkit.prediction.child.gpu.saves import skip_fake_saves
from hf_memkit.prediction.child.older_libraries import RUNS_COPIES
from hf_memkit.prediction.child.tracer.constant_propagation import known_values
from hf_memkit.prediction.child.tracer.tracer import StorageTracer
from hf_memkit.prediction.child.user_code import MEMKIT, calling_line, running_evaluation

_ITEM: Final = torch.ops.aten._local_scalar_dense.default
_COPY: Final = torch.ops.aten._to_copy.default
_TORCH_CODE: Final = ("/torch/nn/", "/torch/amp/", "/torch/optim/")


class RealAndFake(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode that is active while the script runs, on its main thread. `tracer` records tensors on the GPU."""

    def __init__(self, tracer: StorageTracer) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # Operations without shape rules would run on real tensors, which is impossible without a GPU.
        self.fake_mode = FakeTensorMode(
            allow_non_fake_inputs=True, allow_fallback_kernels=tracer.device_type != "cuda"
        )
        self.tracer = tracer
        self.read: list[str] | None = None  # functions that read made-up values; None: reading them raises Unmodelled
        self._begins: Callable[[], None] = lambda: None

    def __enter__(self) -> RealAndFake:
        _patch_parameters(self)
        _patch_trunc_normal()
        self.tracer.known.of_data = True
        self._thread = threading.get_ident()
        self._refused = _patch_values(self)
        skip_fake_saves()
        torch._C._set_only_lift_cpu_tensors(True)  # `torch.tensor(…, device="cuda")` is created on the CPU, then moved
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def leave(self) -> None:
        """Ends the mode: from here on all new tensors are fake, and their values may be made up."""
        self.tracer.known.of_data = False
        for name, original in self._refused.items():
            setattr(FakeTensor, name, original)
        torch._C._set_only_lift_cpu_tensors(False)
        if self._thread == threading.get_ident():  # the script may train in another thread, which has no modes
            super().__exit__(None, None, None)  # type: ignore[no-untyped-call]

    @contextlib.contextmanager
    def all_fake(self) -> Iterator[None]:
        """Within it all new tensors are fake."""
        with self.fake_mode, self.tracer:
            yield

    @contextlib.contextmanager
    def allow_made_up_values(self, begins: Callable[[], None]) -> Iterator[list[str]]:
        """Reading fake tensors within it gives made-up values; yields readers. `begins` is called before the first."""
        outer = self.read
        if self.read is None:
            self.read, self._begins = [], begins
        try:
            yield self.read
        finally:
            self.read = outer

    def note_made_up(self, reader: str) -> None:
        """Notes that `reader` gets a made-up value."""
        if self.read is not None:
            if not self.read:
                self._begins()
            self.read.append(reader)

    def empty_like(self, tensor: torch.Tensor, device: Any = None) -> torch.Tensor:
        """A fake tensor of the same shape, strides and dtype."""
        device = tensor.device if device is None else device
        with self.all_fake():
            made = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device)
        self.tracer.label((made,), "weights")
        return made

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if kwargs.get("pin_memory"):  # ends the process in a build without CUDA; it is host memory anyway
            kwargs = {**kwargs, "pin_memory": False}
        if not any(issubclass(kind, FakeTensor) for kind in types):
            device = kwargs.get("device")
            if device is None or torch.device(device).type != "cuda":
                return func(*args, **kwargs)
        if func is _ITEM and self.tracer.known.of(args[0]) is None:
            if self.read is not None:
                self.note_made_up("item")
            elif not _read_by_torch() and calling_line() is not None:
                _refuse("value", "item")
        if RUNS_COPIES and func is _COPY and type(args[0]) in (torch.Tensor, nn.Parameter):
            args = (self.fake_mode.from_tensor(args[0]), *args[1:])
        try:
            with self.all_fake():
                return func(*args, **kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException):
            _refuse("values", str(func))


def _read_by_torch() -> bool:
    """Whether torch itself reads the value, such as an initialisation that the script calls."""
    frame = sys._getframe(2)
    while MEMKIT in frame.f_code.co_filename and frame.f_back is not None:
        frame = frame.f_back
    return any(part in frame.f_code.co_filename for part in _TORCH_CODE)


def _refuse(what: str, reader: str) -> NoReturn:
    for frame, _ in traceback.walk_stack(sys._getframe(1)):
        if frame.f_code.co_name == "train" and isinstance(frame.f_locals.get("self"), Trainer):
            raise Unmodelled(
                f"{type(frame.f_locals['self']).__name__}.train() reads the {what} of a tensor on the GPU ({reader}) "
                "before it trains, and a trace has no values; measure with memkit run"
            )
    evaluation = running_evaluation()
    fix = f"omit {evaluation}, an evaluation before the training" if evaluation else "remove that line"
    raise Unmodelled(
        f"the script reads the {what} of a tensor of the model or on the GPU ({reader}), and a trace has no values; "
        f"{fix}, or measure with memkit run"
    )


_REAL_ELEMENTS: Final = 2**24
"""Total parameters of a script's own modules that stay real: their values can be read, and take 64 MiB."""


def _patch_parameters(boundary: RealAndFake) -> None:
    """Makes parameters of libraries' modules, and large ones, fake; their memory is freed before anything is written
    to it. Assigning `.data` of a fake parameter makes the value fake, too."""
    original, plain = nn.Parameter.__new__, torch.Tensor.data
    real = 0

    def new(cls: Any, data: Any = None, requires_grad: bool = True) -> Any:
        nonlocal real
        if isinstance(data, torch.Tensor) and type(data) in (torch.Tensor, nn.Parameter) and data.device.type == "cpu":
            own = calling_line() is not None
            real += data.numel() if own else 0
            if not own or real > _REAL_ELEMENTS:
                data = boundary.empty_like(data)
        return original(cls, data, requires_grad)

    def set_data(self: Any, value: torch.Tensor) -> None:
        swap_tensor(self, value if isinstance(value, FakeTensor) else boundary.empty_like(value))

    nn.Parameter.__new__ = staticmethod(new)  # type: ignore[method-assign]
    FakeTensor.data = property(plain.__get__, set_data)  # type: ignore[assignment, attr-defined]


def _patch_trunc_normal() -> None:
    """Patches `trunc_normal_`, which resamples until all values are in range: on a fake tensor that never ends (torch
    2.13: nn/init.py, `_no_grad_trunc_normal_`)."""
    original = nn.init._no_grad_trunc_normal_

    def sample(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if isinstance(tensor, FakeTensor):
            with torch.no_grad():
                return tensor.normal_()
        return original(tensor, *args, **kwargs)

    nn.init._no_grad_trunc_normal_ = sample


def _patch_values(boundary: RealAndFake) -> dict[str, Any]:
    """Lets `numpy`, `tolist` and printing return known values only, none made up; returns the original functions."""

    def only_known(name: str) -> Any:
        def only(self: FakeTensor, *args: Any, **kwargs: Any) -> Any:
            value = known_values(self)
            if value is not None:
                if self.is_cuda and name != "tolist":  # torch's own message
                    raise TypeError(
                        f"can't convert {self.device} device type tensor to numpy. Use Tensor.cpu() to copy the "
                        "tensor to host memory first."
                    )
                return getattr(value, name)(*args, **kwargs)
            if boundary.read is None:
                _refuse("values", name)
            boundary.note_made_up(name)
            number = np.ones((), np.float32) if self.dtype.is_floating_point else np.zeros((), np.int64)
            array = np.broadcast_to(number, tuple(self.shape))
            return array.tolist() if name == "tolist" else array

        return only

    def shown(self: FakeTensor, **options: Any) -> str:
        value = known_values(self)
        if value is None:
            return str(originals["__repr__"](self, **options))
        return f"{repr(value)[:-1]}, device='{self.device}')" if self.is_cuda else repr(value)

    def formatted(self: FakeTensor, spec: str) -> str:
        value = known_values(self)
        return str(originals["__format__"](self, spec)) if value is None or value.dim() else format(value.item(), spec)

    names = ("numpy", "tolist", "__array__")
    originals = {name: getattr(FakeTensor, name) for name in (*names, "__repr__", "__format__")}
    for name in names:
        setattr(FakeTensor, name, only_known(name))
    FakeTensor.__repr__ = shown  # type: ignore[method-assign, assignment]
    FakeTensor.__format__ = formatted  # type: ignore[method-assign, assignment]
    return originals
