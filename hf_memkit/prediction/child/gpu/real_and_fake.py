"""What is fake in a user's script before it trains: parameters, and what lies on the GPU. All else is real.

```
tensor = torch.arange(8)           real: data, lengths, splits, what is tokenised and cached
GPT2LMHeadModel(config)            fake: its parameters are shapes
nn.Linear(8, 8)                    real while all such parameters are small, then fake
tensor.to("cuda")                  fake: there is no such memory
model(tensor)                      fake: made from one that is
```

A batch of data that was copied to the GPU keeps its values (`constant_propagation.py`). Nothing that is made up can
become a file or a decision: who asks a fake tensor for its values is stopped, with the line of the script. Libraries
get an answer where they only look (`bool`, `.item()`), as in the traced steps.
"""

from __future__ import annotations

import contextlib
import sys
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
from hf_memkit.prediction.child.gpu.fake_gpu import become
from hf_memkit.prediction.child.gpu.saves import save_no_made_up_values
from hf_memkit.prediction.child.older_libraries import RUNS_COPIES
from hf_memkit.prediction.child.tracer.constant_propagation import known_values
from hf_memkit.prediction.child.tracer.tracer import StorageTracer
from hf_memkit.prediction.child.users_code import MEMKIT, evaluation_that_runs, line_that_asks

_ITEM: Final = torch.ops.aten._local_scalar_dense.default
_COPY: Final = torch.ops.aten._to_copy.default
_TORCHS_OWN: Final = ("/torch/nn/", "/torch/amp/", "/torch/optim/")


class RealAndFake(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Active while the script runs, on its main thread. `tracer` records what is made on the GPU, and all fake tensors
    belong to `fake_mode`; `read`: how values of fake tensors were asked for, where they are made up; None: whoever
    asks is stopped."""

    def __init__(self, tracer: StorageTracer) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # What torch has no shapes for it would run on real tensors, which a GPU that is not there cannot.
        self.fake_mode = FakeTensorMode(
            allow_non_fake_inputs=True, allow_fallback_kernels=tracer.device_type != "cuda"
        )
        self.tracer = tracer
        self.read: list[str] | None = None
        self._begins: Callable[[], None] = lambda: None

    def __enter__(self) -> RealAndFake:
        _parameters_are_fake(self)
        _nothing_is_drawn_again()
        self.tracer.known.of_data = True
        self._refused = _values_are_refused(self)
        save_no_made_up_values()
        torch._C._set_only_lift_cpu_tensors(True)  # `torch.tensor(…, device="cuda")` is made here, then moved
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def leave(self) -> None:
        """Ends it: what is made from here on is fake, and may be made up."""
        self.tracer.known.of_data = False
        for name, original in self._refused.items():
            setattr(FakeTensor, name, original)
        torch._C._set_only_lift_cpu_tensors(False)
        super().__exit__(None, None, None)  # type: ignore[no-untyped-call]

    @contextlib.contextmanager
    def all_fake(self) -> Iterator[None]:
        """Within it every tensor that is made is fake."""
        with self.fake_mode, self.tracer:
            yield

    @contextlib.contextmanager
    def values_are_made_up(self, begins: Callable[[], None]) -> Iterator[list[str]]:
        """Within it whoever asks for values gets some, and is noted in the list that is given; `begins` is called
        before the first."""
        outer = self.read
        if self.read is None:
            self.read, self._begins = [], begins
        try:
            yield self.read
        finally:
            self.read = outer

    def made_up(self, asked: str) -> None:
        """A value is asked for, and is made up."""
        if self.read is not None:
            if not self.read:
                self._begins()
            self.read.append(asked)

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
        if kwargs.get("pin_memory"):  # a build without CUDA ends the process; it is the host's memory either way
            kwargs = {**kwargs, "pin_memory": False}
        if not any(issubclass(each, FakeTensor) for each in types):
            device = kwargs.get("device")
            if device is None or torch.device(device).type != "cuda":
                return func(*args, **kwargs)
        if func is _ITEM and self.tracer.known.of(args[0]) is None:
            if self.read is not None:
                self.made_up("item")
            elif not _asked_by_torch() and line_that_asks() is not None:
                _refuse("value", "item")
        if RUNS_COPIES and func is _COPY and type(args[0]) in (torch.Tensor, nn.Parameter):
            args = (self.fake_mode.from_tensor(args[0]), *args[1:])
        try:
            with self.all_fake():
                return func(*args, **kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException):
            _refuse("values", str(func))


def _asked_by_torch() -> bool:
    """Whether torch itself looks at the value, such as an initialisation that the script has called."""
    frame = sys._getframe(2)
    while MEMKIT in frame.f_code.co_filename and frame.f_back is not None:
        frame = frame.f_back
    return any(part in frame.f_code.co_filename for part in _TORCHS_OWN)


def _refuse(what: str, asked: str) -> NoReturn:
    for frame, _ in traceback.walk_stack(sys._getframe(1)):
        if frame.f_code.co_name == "train" and isinstance(frame.f_locals.get("self"), Trainer):
            raise Unmodelled(
                f"{type(frame.f_locals['self']).__name__}.train() reads the {what} of a tensor on the GPU ({asked}) "
                "before it trains, and a trace has no values; measure with memkit run"
            )
    evaluation = evaluation_that_runs()
    fix = f"leave out {evaluation}, an evaluation before the training" if evaluation else "remove that line"
    raise Unmodelled(
        f"the script reads the {what} of a tensor of the model or on the GPU ({asked}), and a trace has no values; "
        f"{fix}, or measure with memkit run"
    )


_REAL_ELEMENTS: Final = 2**24
"""Of all parameters that a script makes itself: their values can be looked at, and take 64 MiB."""


def _parameters_are_fake(boundary: RealAndFake) -> None:
    """A parameter keeps its shape, and its memory is given back before anything is written to it: those of libraries'
    modules, and what is large. What is put into a fake one by `.data` is fake, too."""
    original, plain = nn.Parameter.__new__, torch.Tensor.data
    real = 0

    def new(cls: Any, data: Any = None, requires_grad: bool = True) -> Any:
        nonlocal real
        if isinstance(data, torch.Tensor) and type(data) in (torch.Tensor, nn.Parameter) and data.device.type == "cpu":
            own = line_that_asks() is not None
            real += data.numel() if own else 0
            if not own or real > _REAL_ELEMENTS:
                data = boundary.empty_like(data)
        return original(cls, data, requires_grad)

    def set_data(self: Any, value: torch.Tensor) -> None:
        become(self, value if isinstance(value, FakeTensor) else boundary.empty_like(value))

    nn.Parameter.__new__ = staticmethod(new)  # type: ignore[method-assign]
    FakeTensor.data = property(plain.__get__, set_data)  # type: ignore[assignment, attr-defined]


def _nothing_is_drawn_again() -> None:
    """What is outside of its bounds would be drawn again for ever: a fake tensor cannot say so (torch 2.13:
    nn/init.py, `_no_grad_trunc_normal_`)."""
    original = nn.init._no_grad_trunc_normal_

    def drawn(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if isinstance(tensor, FakeTensor):
            with torch.no_grad():
                return tensor.normal_()
        return original(tensor, *args, **kwargs)

    nn.init._no_grad_trunc_normal_ = drawn


def _values_are_refused(boundary: RealAndFake) -> dict[str, Any]:
    """`numpy` and `tolist` give what is known, and would give what is made up to whoever writes it down; returns what
    stood there."""

    def only_known(name: str) -> Any:
        def only(self: FakeTensor, *args: Any, **kwargs: Any) -> Any:
            value = known_values(self)
            if value is not None:
                if self.is_cuda and name != "tolist":  # as torch says it
                    raise TypeError(
                        f"can't convert {self.device} device type tensor to numpy. Use Tensor.cpu() to copy the "
                        "tensor to host memory first."
                    )
                return getattr(value, name)(*args, **kwargs)
            if boundary.read is None:
                _refuse("values", name)
            boundary.made_up(name)
            made = np.ones((), np.float32) if self.dtype.is_floating_point else np.zeros((), np.int64)
            array = np.broadcast_to(made, tuple(self.shape))
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
