"""Runs torch.compile as a GPU would, without compiling and launching kernels.

Dynamo, AOTAutograd, the partitioner and inductor run as they are. Inductor writes a wrapper, Python code that allocates
buffers, launches kernels and frees buffers; here the wrapper runs on fake tensors, and its kernels do nothing. So what
it allocates, reuses and frees is what it does on a GPU.

The dispatch modes of a prediction are inactive while dynamo and inductor compile, and active when compiled code runs:
`TorchDispatchMode.ignore_compile_internals` (torch 2.13: utils/_python_dispatch.py; _dynamo/convert_frame.py, `compile_lock`).
All private names of torch that this needs are in this module.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any, Final

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hf_memkit.prediction.child.tracer.work_recorder import launched

@functools.cache
def install_compiler() -> None:
    """Patches dynamo and inductor. Call it after `torch.cuda` reports the GPU."""
    _configure()
    _patch_device_interface()
    _patch_kernels()
    _patch_wrapper_functions()
    _fold_constants_on_host()
    _hide_from_dynamo()


compiled_modules: Final[list[torch.nn.Module]] = []
"""The original modules that were compiled in this process."""


def compile_module(compile_: Any, model: torch.nn.Module, **options: Any) -> Any:
    """`torch.compile` of a model."""
    install_compiler()
    compiled_modules.append(model)
    return compile_(model, **options)


def _configure() -> None:
    """Turns off what times or checks kernels, and caches whose content comes from another GPU."""
    import torch._functorch.config as functorch_config
    import torch._inductor.config as config

    config.compile_threads = 1
    config.size_asserts = False
    config.alignment_asserts = False
    config.nan_asserts = False
    config.shape_padding = False  # whether a product is padded is decided by timing it
    config.fx_graph_cache = False
    config.fx_graph_remote_cache = False
    config.autotune_local_cache = False
    functorch_config.enable_autograd_cache = False


def _patch_device_interface() -> None:
    """Lets inductor ask the fake GPU. Its class has bound the functions of `torch.cuda` when it was imported."""
    import torch.utils._triton as triton_utils
    from torch._dynamo import device_interface

    interface = device_interface.CudaInterface
    for name in (
        "current_device",
        "set_device",
        "device_count",
        "synchronize",
        "get_device_properties",
        "is_bf16_supported",
        "current_stream",
        "stream",
    ):
        setattr(interface, name, staticmethod(getattr(torch.cuda, name)))
    major, minor = torch.cuda.get_device_capability()
    answers: dict[str, Callable[..., Any]] = {
        "get_raw_stream": lambda index: 0,
        "exchange_device": lambda index: 0,
        "maybe_exchange_device": lambda index: 0,
        "is_available": lambda: True,
        "get_compute_capability": lambda device=None: 10 * major + minor,
    }
    for name, answer in answers.items():
        setattr(interface, name, staticmethod(answer))
    device_interface.caching_worker_device_properties.clear()
    triton_utils.has_triton.cache_clear()
    triton_utils.triton_hash_with_backend = lambda: "no GPU"
    vars(torch._C)["_cuda_getCurrentRawStream"] = lambda index: 0
    torch.cuda._DeviceGuard = lambda *args, **kwargs: contextlib.nullcontext()


class Kernel:
    """A Triton kernel that does nothing but tell the recorder what it reads and writes."""

    launchers: Final[list[Any]] = []
    n_spills: Final = 0

    def __init__(self, name: str) -> None:
        self._name = name

    def run(self, *arguments: Any, **options: Any) -> None:
        launched(self._name, arguments)

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


def _patch_kernels() -> None:
    from torch._inductor.async_compile import AsyncCompile

    AsyncCompile.triton = lambda self, kernel_name, source_code, device_str="cuda": Kernel(kernel_name)
    AsyncCompile.multi_kernel = lambda self, *args, **kwargs: Kernel("multi_kernel")
    AsyncCompile.wait = lambda self, scope: None


def _patch_wrapper_functions() -> None:
    """What the wrapper calls in C++ without the dispatcher, and what needs a generator of the GPU."""
    from torch._functorch import partitioners
    from torch._inductor.fx_passes import fuse_attention

    guards = torch._C._dynamo.guards

    def empty_strided_cuda(size: Any, stride: Any, dtype: Any) -> torch.Tensor:
        return torch.empty_strided(size, stride, dtype=dtype, device="cuda:0")

    def reinterpret_tensor(tensor: torch.Tensor, size: Any, stride: Any, offset: int = 0) -> torch.Tensor:
        return torch.as_strided(tensor, size, stride, offset + int(tensor.storage_offset()))

    guards._empty_strided_cuda = empty_strided_cuda
    guards._reinterpret_tensor = reinterpret_tensor
    # Recomputed operations that draw random numbers keep the generator's state, which is host memory.
    partitioners.functionalize_rng_ops = lambda joint, forward, backward, symbols: (forward, backward)
    patterns = fuse_attention._get_sfdp_patterns
    fuse_attention._get_sfdp_patterns = lambda input_device=None: patterns(torch.device("cpu"))


class _OnHost(TorchDispatchMode):
    """Creates tensors on the CPU that were to be created on the GPU."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def on_host(value: Any) -> Any:
            return torch.device("cpu") if isinstance(value, torch.device) and value.type == "cuda" else value

        return func(*map(on_host, args), **{name: on_host(value) for name, value in (kwargs or {}).items()})


def _fold_constants_on_host() -> None:
    """Inductor computes constants with real tensors."""
    from torch._inductor import constant_folding
    from torch._inductor.fx_passes import joint_graph

    def on_host(method: Any) -> Any:
        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            with _OnHost():
                return method(*args, **kwargs)

        return call

    folder = joint_graph.UniformValueConstantFolder
    folder.__init__ = on_host(folder.__init__)
    constant_folding.ConstantFolder.run = on_host(constant_folding.ConstantFolder.run)


def _hide_from_dynamo() -> None:
    """Keeps dynamo out of the code of dispatch modes, which runs between two graphs."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    from hf_memkit.prediction.child.tracer.tracer import StorageTracer

    for mode in (FakeTensorMode, StorageTracer):
        mode.__torch_dispatch__ = torch._disable_dynamo(mode.__torch_dispatch__, recursive=True)
