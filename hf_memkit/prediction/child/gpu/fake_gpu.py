"""Patches torch to show one GPU, and makes FakeTensors movable to it. Nothing is compiled."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar, Final

import torch
from torch import nn

from hf_memkit.common.errors import Unmodelled
from hf_memkit.prediction.child.tracer.tracer import allocate_on
from hf_memkit.prediction.child.tracer.work_recorder import active_recorder, launched
from hf_memkit.prediction.trace.work import HOST


def skip_own_functions(trace_rules: Any) -> None:
    """Leaves functions of memkit out of dynamo's rules, because several functions of `torch.cuda` are now the same
    one, which would get two rules (torch 2.13: _dynamo/trace_rules.py, `get_torch_obj_rule_map`)."""
    load_object = trace_rules.load_object

    def of_torch(name: str) -> Any:
        loaded = load_object(name)
        return None if str(getattr(loaded, "__module__", "")).startswith("hf_memkit.") else loaded

    trace_rules.load_object = of_torch


def patch_cuda_device(capability: tuple[int, int], capacity_bytes: int, name: str = "fake GPU") -> None:
    """Makes `torch.cuda` report one GPU of this compute capability, which cannot run anything."""
    from torch._subclasses import fake_tensor
    from torch.cuda.amp import common

    properties = SimpleNamespace(
        name=name, major=capability[0], minor=capability[1], total_memory=capacity_bytes,
        multi_processor_count=100, is_integrated=0, gcnArchName="", warp_size=32, max_threads_per_multi_processor=2048,
        regs_per_multiprocessor=65536, shared_memory_per_block=49152, shared_memory_per_block_optin=101376, uuid="",
        L2_cache_size=40 * 2**20,
    )  # fmt: skip
    answers: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_name": lambda *args, **kwargs: properties.name,
        "get_device_capability": lambda *args, **kwargs: capability,
        "get_device_properties": lambda *args, **kwargs: properties,
        "mem_get_info": lambda *args, **kwargs: (capacity_bytes, capacity_bytes),
        "is_current_stream_capturing": lambda: False,  # called at each step of an optimizer
        "memory_stats": lambda *args, **kwargs: {},
        # GPUs before Ampere emulate it (torch 2.13: cuda/__init__.py, `_check_bf16_tensor_supported`).
        "is_bf16_supported": lambda including_emulation=True: including_emulation or capability >= (8, 0),
        # The state of a generator, as large as a real one and on the host.
        "get_rng_state": lambda *args, **kwargs: torch.zeros(16, dtype=torch.uint8),
        "get_rng_state_all": lambda: [torch.zeros(16, dtype=torch.uint8)],
    }
    for name in (
        "_lazy_init", "set_device", "manual_seed", "manual_seed_all", "set_rng_state", "set_rng_state_all",
        "empty_cache", "synchronize", "reset_peak_memory_stats", "ipc_collect",
    ):  # fmt: skip
        answers[name] = new_do_nothing()
    for name, answer in answers.items():
        setattr(torch.cuda, name, answer)
    if not hasattr(torch._C, "_cuda_getCurrentRawStream"):  # bitsandbytes 0.50 reads it on import
        vars(torch._C)["_cuda_getCurrentRawStream"] = lambda device: 0
    common.amp_definitely_not_available = lambda: False  # autocast would disable itself
    # Operations that torch decomposes if a backend has no kernel: a build without CUDA would compute them in several
    # steps with temporaries of the result's size (torch 2.13: aten/src/ATen/native/native_functions.yaml: those with
    # kernels for CUDA and for CompositeImplicitAutograd). Fake tensors are handled before the kernel is called.
    for name in ("silu_backward", "mish_backward"):
        if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "CUDA"):
            _CUDA_KERNELS.impl(name, do_nothing, "CUDA")  # type: ignore[no-untyped-call]
    # FakeTensorMode would initialize CUDA to find its current device.
    fake_tensor.FakeTensorMode.avoid_device_init = property(lambda self: True)  # type: ignore[assignment, method-assign]
    fake_tensor.init_gpu_context = do_nothing  # type: ignore[assignment]


_CUDA_KERNELS = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]


def patch_fake_values() -> None:
    """Gives values to fake tensors and lets torch treat them as plain tensors. As an array a fake tensor holds ones;
    fp16 gradients never overflow."""
    import numpy
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
    from torch.optim import optimizer
    from torch.utils import _foreach_utils
    from transformers.utils import import_utils

    # Without the decorator that keeps torch.compile out of every call: nothing is compiled here.
    plain = getattr(FakeTensorMode.__torch_dispatch__, "__wrapped__", None)
    if plain is not None:
        FakeTensorMode.__torch_dispatch__ = plain  # type: ignore[method-assign]

    # On a GPU, optimizers default to the foreach form, with temporaries as large as all parameters, and gradient norms
    # are computed in one operation, but only for tensors of these classes.
    for plain_classes in (optimizer._foreach_supported_types, _foreach_utils._foreach_supported_types):
        plain_classes.append(FakeTensor)

    # transformers takes fake tensors for a compilation and then makes masks that a real run does not make.
    import_utils.is_fake_tensor = lambda tensor: False

    def as_array(self: torch.Tensor, **options: Any) -> Any:
        kind = numpy.float32 if self.dtype.is_floating_point else numpy.int64
        return numpy.broadcast_to(numpy.ones((), kind), tuple(self.shape))

    FakeTensor.numpy = as_array  # type: ignore[method-assign, assignment]

    def step(self: Any, optimizer: Any, state: Any, *args: Any, **kwargs: Any) -> Any:
        launched("torch.amp: whether gradients are finite", (), waits=True)
        return optimizer.step(*args, **kwargs)

    # A step that is skipped because of an overflow would create no optimizer states.
    torch.amp.GradScaler._maybe_opt_step = step  # type: ignore[method-assign, assignment]


def patch_module_apply() -> None:
    """Patches `Module.to` for fake parameters, and from real ones to a GPU. Each parameter stays the same object, so
    that optimizers and tied weights keep it. Also lets libraries' parameter classes, such as bitsandbytes'
    `Params4bit`, hold fake tensors: `Tensor._make_subclass` would lose the class FakeTensor; here both stay."""
    from torch._subclasses.fake_tensor import FakeTensor

    original = torch.Tensor._make_subclass

    def make(cls: Any, data: torch.Tensor, requires_grad: bool = False, **options: Any) -> Any:
        if not isinstance(data, FakeTensor) or not issubclass(cls, nn.Parameter):
            return original(cls, data, requires_grad, **options)
        if cls not in _LIBRARY_KINDS:
            _LIBRARY_KINDS[cls] = type(cls.__name__, (FakeTensor, cls), {"__deepcopy__": _deepcopy})
        made = nn.Parameter(data.detach(), requires_grad)
        made.__class__ = _LIBRARY_KINDS[cls]
        return made

    def apply(self: nn.Module, function: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        if recurse:
            for child in self.children():
                child._apply(function)  # type: ignore[no-untyped-call]
        for parameter in self._parameters.values():
            if parameter is None:
                continue
            with torch.no_grad():
                new = function(parameter)
            if new is parameter:
                continue
            alike = (new.device, new.dtype, new.shape) == (parameter.device, parameter.dtype, parameter.shape)
            if not alike or new.untyped_storage()._cdata != parameter.untyped_storage()._cdata:
                swap_tensor(parameter, new)
        for name, buffer in self._buffers.items():
            if buffer is not None:
                self._buffers[name] = function(buffer)
        return self

    torch.Tensor._make_subclass = staticmethod(make)  # type: ignore[assignment]
    nn.Module._apply = apply  # type: ignore[method-assign]


def replace_inference_mode() -> None:
    """Replaces `torch.inference_mode` by `no_grad`, which needs the same memory. In inference mode a dispatch mode
    sees operations before they are decomposed, such as `Tensor.to` and `bool`; fake tensors have no rule for them."""

    def enter(self: Any) -> None:
        self.memkit_no_grad = torch.no_grad() if self.mode else contextlib.nullcontext()
        self.memkit_no_grad.__enter__()

    def leave(self: Any, *error: Any) -> None:
        self.memkit_no_grad.__exit__(*error)

    torch.inference_mode.__enter__ = enter  # type: ignore[method-assign]
    torch.inference_mode.__exit__ = leave  # type: ignore[method-assign]


def swap_tensor(parameter: nn.Parameter, new: torch.Tensor) -> None:
    """Gives a parameter another tensor, also on another device, which `Tensor.data` cannot. Works like
    `torch.utils.swap_tensors` (torch 2.13), which refuses tensors that a fake mode references weakly."""
    kind, moved = parameter.__class__, {}
    if new.__class__ in _LIBRARY_KINDS.values():  # its scales are moved, too
        new, moved = new.detach(), vars(new)
    other = nn.Parameter(new, parameter.requires_grad)
    for key, value in (vars(parameter) | moved).items():  # attributes that optimizers read
        vars(other).setdefault(key, value)
    for hooks in ("_backward_hooks", "_post_accumulate_grad_hooks"):  # the swap below exchanges them, too
        if (registered := getattr(parameter, hooks)) is not None:
            setattr(other, hooks, registered)
    gradient = parameter.grad  # bitsandbytes 0.50.2 sets `p.data` in its step, optim/optimizer.py
    kinds = [(tensor.shape, tensor.dtype, tensor.device) for tensor in (new, gradient) if tensor is not None]
    if gradient is not None and kinds[0] == kinds[1]:
        other.grad = gradient
    parameter.__class__, other.__class__ = other.__class__, kind
    parameter.__dict__, other.__dict__ = other.__dict__, parameter.__dict__
    torch._C._swap_tensor_impl(parameter, other)
    if kind in _LIBRARY_KINDS.values():
        parameter.__class__ = kind


_LIBRARY_KINDS: Final[dict[type, type]] = {}  # a library's parameter class → its subclass for fake tensors


def _deepcopy(self: Any, memo: dict[int, Any]) -> Any:
    made = nn.Parameter(copy.deepcopy(self.data, memo), self.requires_grad)
    for name in vars(self).keys() - vars(made).keys():
        value = getattr(self, name)
        setattr(made, name, value if isinstance(value, nn.Module) else copy.deepcopy(value, memo))
    made.__class__ = self.__class__
    return made


def do_nothing(*args: Any, **kwargs: Any) -> None:
    """Does nothing."""


def new_do_nothing() -> Callable[..., None]:
    """Another `do_nothing`: dynamo tells functions of `torch.cuda` apart."""
    return lambda *args, **kwargs: None


class Event:
    """A CUDA event: the work of a stream up to a point. To the host it has already happened."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.stream, self.calls = 0, 0

    def record(self, stream: Stream | None = None) -> None:
        working = active_recorder()
        self.stream = (stream or _current_stream[0]).stream_id
        self.calls = len(working.work.calls) if working is not None else 0

    def wait(self, stream: Stream | None = None) -> None:
        (stream or _current_stream[0]).wait_event(self)

    def synchronize(self) -> None:
        _wait(HOST, self)

    def elapsed_time(self, end_event: Any) -> float:
        """Milliseconds; not 0, because scripts divide by it."""
        return 1.0

    def query(self) -> bool:
        return True


def _wait(stream: int, event: Event) -> None:
    working = active_recorder()
    if working is not None:
        working.wait(stream, event.stream, event.calls)


class Stream:
    """A stream of the GPU. In a trace operations follow one another; waits are recorded with the work."""

    _numbers: ClassVar = itertools.count()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.device = torch.device("cuda:0")
        self.stream_id = self.cuda_stream = next(self._numbers)

    priority = 0

    def is_capturing(self) -> bool:
        return False

    def wait_event(self, event: Event) -> None:
        _wait(self.stream_id, event)

    def wait_stream(self, stream: Stream) -> None:
        _wait(self.stream_id, stream.record_event())

    def synchronize(self) -> None:
        _wait(HOST, self.record_event())

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def query(self) -> bool:
        return True


_default_stream: Final = Stream()
_current_stream: Final = [_default_stream]


def _set_stream(stream: Stream) -> None:
    _current_stream[0] = stream
    allocate_on(stream.stream_id)
    working = active_recorder()
    if working is not None:
        working.on_stream(stream.stream_id)


class StreamContext:
    """`torch.cuda.stream(…)`: what is allocated within it belongs to the stream."""

    def __init__(self, stream: Stream | None) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        self._outer = _current_stream[0]
        if self.stream is not None:
            _set_stream(self.stream)

    def __exit__(self, *error: object) -> None:
        _set_stream(self._outer)


class _Device(contextlib.nullcontext[None]):
    """`torch.cuda.device(…)` as a context manager."""

    idx, prev_idx = 0, -1

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()


def patch_streams() -> None:
    """Patches streams, events and pinned memory, which would ask CUDA's driver; does nothing if torch sees a GPU. A
    block that another stream still reads is reused at once (`Tensor.record_stream`); pinned memory counts as RAM."""
    count = getattr(torch._C, "_cuda_getDeviceCount", None)  # missing in a CPU build
    if count is not None and count() > 0:
        return
    answers: dict[str, Any] = {
        "Stream": Stream, "ExternalStream": Stream, "Event": Event,
        "StreamContext": StreamContext, "stream": lambda stream: StreamContext(stream), "set_stream": _set_stream,
        "current_stream": lambda device=None: _current_stream[0],
        "default_stream": lambda device=None: _default_stream,
        "device": _Device, "device_of": _Device,
    }  # fmt: skip
    for name, answer in answers.items():
        setattr(torch.cuda, name, answer)
    torch.Tensor.record_stream = do_nothing  # type: ignore[method-assign]
    torch.Tensor.pin_memory = lambda self, device=None: self  # type: ignore
    torch.Tensor.is_pinned = lambda self, device=None: False  # type: ignore[method-assign]


torch_compile: Final = torch.compile
"""The original, which compiles."""


def replace_compiler() -> None:
    """Replaces `torch.compile` with `_compiled`."""
    torch.compile = _compiled


def _compiled(model: Any = None, **options: Any) -> Any:
    """Replaces `torch.compile`. Modules, `forward` of a module and flex attention are compiled with kernels that do
    nothing. torchao's AdamW step of one parameter becomes an upper bound of its memory. Other functions raise
    `Unmodelled` when they run."""
    if model is None:
        return functools.partial(_compiled, **options)
    from torch._dynamo import config, eval_frame

    if getattr(getattr(eval_frame, "_stance", None), "stance", "") == "force_eager":  # `torch.compiler.set_stance`
        return model
    disabled = config.disable or os.environ.get("TORCHDYNAMO_DISABLE") == "1"  # as in `torch._dynamo.optimize`
    if disabled or options.get("disable"):
        return model
    name = f"{getattr(model, '__module__', '')}.{getattr(model, '__name__', '')}"
    if name == "torchao.optim.adam.single_param_adam":
        return _fused_step
    if not isinstance(model, Callable):  # type: ignore[arg-type]
        return model
    module = getattr(model, "__self__", None)
    is_forward = isinstance(module, nn.Module) and model.__name__ == "forward"
    if is_forward or isinstance(model, nn.Module) or name.startswith("torch.nn.attention.flex_attention."):
        from hf_memkit.prediction.child.gpu.compiler import compile_module

        return compile_module(torch_compile, model, **options)

    @functools.wraps(model)
    def refuse(*args: Any, **kwargs: Any) -> Any:
        if isinstance(module, nn.Module) and model.__name__ == "_call_impl":
            raise Unmodelled(
                f"{type(module).__name__}.compile(): a module that is compiled in place is not traced. Write "
                "torch_compile=True in TrainingArguments (for each layer alone, set the environment variable "
                "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION=true)"
            )
        name = getattr(model, "__qualname__", type(model).__name__)
        raise Unmodelled(f"torch.compile({name}): what a compiled function keeps cannot be traced; omit it")

    return refuse


def _fused_step(p: torch.Tensor, *rest: Any) -> None:
    """torchao 0.18.0: optim/adam.py, `single_param_adam`: the parameter is the first argument.

    Compiled, the step reads weight, gradient and states, and writes weight and states. Everything in between is fused
    except values that two kernels share: both new moments, which are reduced to a scale per block and then quantised.
    They are assumed to be fp32: an upper bound, not measured on a GPU.
    """
    torch.empty((2, *p.shape), dtype=torch.float32, device=p.device)
    gradient, *others = (tensor for tensor in rest if isinstance(tensor, torch.Tensor))
    states = [tensor for tensor in others if tensor.dim()]  # without scalars such as the learning rate
    launched("torchao.single_param_adam", (p, p, gradient, *states, *states))
