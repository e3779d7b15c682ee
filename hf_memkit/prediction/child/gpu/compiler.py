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
import importlib.util
import re
from collections.abc import Callable, Iterable
from typing import Any, Final

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hf_memkit.common.errors import Unmodelled
from hf_memkit.prediction.child.tracer.work_recorder import launched
from hf_memkit.setup.techniques.compiling import GRAPH_MODES

TRACED_BACKENDS: Final = ("inductor", "aot_eager", "eager")

LEAST_CAPABILITY: Final = (7, 0)
"""The first GPUs that Triton compiles for (torch 2.13: _inductor/exc.py, `GPUTooOldForTriton`)."""


@functools.cache
def install_compiler() -> None:
    """Patches dynamo and inductor. Call it after `torch.cuda` reports the GPU; without one, compiled code runs on fake
    tensors of the CPU, which tests compare with real ones."""
    _configure()
    if torch.cuda.is_available():
        _patch_device_interface()
    _patch_kernels()
    _patch_wrapper_functions()
    _name_modules()
    _fold_constants_on_host()
    _hide_from_dynamo()


compiled_modules: Final[list[torch.nn.Module]] = []
"""The modules that were compiled in this process, without torch.compile's wrapper."""

on_allocation: list[Callable[[str], None]] = []
"""Called with the dotted name of a module, relative to the compiled one, before its compiled code allocates a tensor
for it; the name is empty for code outside of all submodules."""


def compile_module(compile_: Callable[..., Any], model: torch.nn.Module, **options: Any) -> Any:
    """Compiles a module with `compile_`, the original `torch.compile`. Raises Unmodelled for what cannot be traced."""
    _refuse(options)
    install_compiler()
    compiled_modules.append(model)
    return compile_(model, **options)


def _refuse(options: dict[str, Any]) -> None:
    """Raises Unmodelled for torch.compile with `options`, if it cannot be traced here."""
    if not hasattr(TorchDispatchMode, "ignore_compile_internals"):
        raise Unmodelled(
            f"torch.compile: the trace needs torch 2.13; this is {torch.__version__}. Install it, or omit torch_compile"
        )
    backend = options.get("backend") or "inductor"
    if backend not in TRACED_BACKENDS:
        name = backend if isinstance(backend, str) else getattr(backend, "__name__", type(backend).__name__)
        raise Unmodelled(
            f"torch_compile_backend={name}: not traced. Traced: {', '.join(TRACED_BACKENDS)}; use one of them"
        )
    mode = options.get("mode") or "default"
    if mode in GRAPH_MODES or (options.get("options") or {}).get("triton.cudagraphs"):
        raise Unmodelled(
            f"torch_compile_mode={mode}: CUDA graphs hold memory that is not traced. Use torch_compile_mode=default, or "
            "measure with memkit run"
        )
    if backend != "inductor":
        return
    if importlib.util.find_spec("triton") is None:
        raise Unmodelled("torch_compile: the trace needs triton; run: pip install triton")
    if torch.cuda.is_available() and torch.cuda.get_device_capability() < LEAST_CAPABILITY:
        raise Unmodelled(
            f"torch_compile: Triton needs a GPU of compute capability 7.0 or later; {torch.cuda.get_device_name()} has "
            f"{'.'.join(map(str, torch.cuda.get_device_capability()))}. Omit torch_compile, or use "
            "torch_compile_backend=aot_eager"
        )


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
    config.max_autotune_gemm_backends = "ATEN"  # one kernel for a product, so that none is timed
    config.max_autotune_conv_backends = "ATEN"
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
    AsyncCompile.cpp_pybinding = lambda self, argtypes, source_code: Kernel("cpp_fused").run
    AsyncCompile.wait = lambda self, scope: None


def _patch_wrapper_functions() -> None:
    """What the wrapper calls in C++ without the dispatcher, and what needs a generator of the GPU."""
    from torch._functorch import partitioners
    from torch._inductor.fx_passes import fuse_attention

    guards = torch._C._dynamo.guards

    def empty_strided(device: str, size: Any, stride: Any, dtype: Any, module: str = "") -> torch.Tensor:
        for notify in on_allocation:
            notify(module)
        return torch.empty_strided(size, stride, dtype=dtype, device=device)

    def reinterpret_tensor(tensor: torch.Tensor, size: Any, stride: Any, offset: int = 0) -> torch.Tensor:
        return torch.as_strided(tensor, size, stride, offset + int(tensor.storage_offset()))

    guards._empty_strided_cuda = functools.partial(empty_strided, "cuda:0")
    guards._empty_strided_cpu = functools.partial(empty_strided, "cpu")
    guards._reinterpret_tensor = reinterpret_tensor
    # Recomputed operations that draw random numbers keep the generator's state, which is host memory.
    partitioners.functionalize_rng_ops = lambda joint, forward, backward, symbols: (forward, backward)
    patterns = fuse_attention._get_sfdp_patterns
    fuse_attention._get_sfdp_patterns = lambda input_device=None: patterns(torch.device("cpu"))


def _name_modules() -> None:
    """Makes the wrapper pass the name of the module that an allocation is for."""
    from torch._inductor.codegen.wrapper import PythonWrapperCodegen
    from torch._inductor.virtualized import V

    original = PythonWrapperCodegen.make_allocation

    def make_allocation(self: Any, name: str, *args: Any, **kwargs: Any) -> str:
        line: str = original(self, name, *args, **kwargs)
        buffer = V.graph.try_get_buffer(name)
        if buffer is None:
            return line
        module = module_of(buffer.get_origins())
        # The view that may follow is of another size: "empty_strided_cuda(…).as_strided(…)".
        return re.sub(r"(empty_strided_(?:cuda|cpu)\(.*?)\)(?=$|\.as_strided)", rf"\1, {module!r})", line)

    PythonWrapperCodegen.make_allocation = make_allocation


def module_of(origins: Iterable[Any]) -> str:
    """The dotted name of the module that a buffer belongs to, relative to the compiled one.

    Args:
        origins: the nodes of the FX graph that the buffer is computed from; the last one is its own operation.
    """
    for node in sorted(origins, reverse=True):
        stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
        if stack:
            path, _ = list(stack.values())[-1]  # such as L['self'].model.layers.0
            return str(path).rpartition("]")[2].removeprefix(".")
    return ""


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
