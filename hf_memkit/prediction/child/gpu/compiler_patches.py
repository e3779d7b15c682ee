"""The changes to dynamo and inductor by which compiled code allocates on fake tensors what it allocates on a GPU.

The private names of torch that a compiled training needs are in this module, and those that only save time are in
`compiler_speed.py`. One that is missing is refused, with the installed version of torch; `compiler.py` verifies that
those that exist do what the trace rests on.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import math
import re
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType
from typing import Any, Final

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hf_memkit.common.errors import Unmodelled
from hf_memkit.prediction.child.gpu.other_ranks import bucket_bytes
from hf_memkit.prediction.child.tracer.tracer import StorageTracer
from hf_memkit.prediction.child.tracer.work_recorder import compiled_code, launched, separate_recorder

TESTED_WITH: Final = ("2.9.1", "2.13.0")
"""The earliest and the latest torch that compiled trainings are compared on (tests/prediction/test_compiled.py)."""

compiled_modules: Final[list[torch.nn.Module]] = []
"""The modules that were compiled in this process, without torch.compile's wrapper."""

on_allocation: list[Callable[[str], None]] = []
"""Called with the dotted name of a module, relative to the compiled one, before its compiled code allocates a tensor
for it; the name is empty for code outside of all submodules."""


@functools.cache
def patch_compiler() -> None:
    """Patches dynamo and inductor. Call it after `torch.cuda` reports the GPU; without one, compiled code runs on fake
    tensors of the CPU, which tests compare with real ones.

    Raises:
        Unmodelled: a private name that this needs is missing in the installed torch.
    """
    _configure()
    if torch.cuda.is_available():
        _patch_device_interface()
    _patch_kernels()
    _watch_graphs()
    _count_bytes()
    _patch_wrapper_functions()
    _repeat_random_operations()
    _name_modules()
    _fold_constants_on_host()
    _hide_from_dynamo()
    split_graphs()


def private(path: str) -> Any:
    """The private object of torch with the dotted name `path`. Raises Unmodelled if the installed torch has none."""
    value: Any = torch
    for name in path.split(".")[1:]:
        if isinstance(value, ModuleType) and not hasattr(value, name):
            with contextlib.suppress(ImportError):
                importlib.import_module(f"{value.__name__}.{name}")
        if not hasattr(value, name):
            raise Unmodelled(
                f"torch_compile: torch {torch.__version__} has no {path}, which the trace needs. Install torch "
                f"{TESTED_WITH[-1]}, omit torch_compile, or measure with memkit run"
            )
        value = getattr(value, name)
    return value


def replace_private(path: str, value: Any) -> Any:
    """Replaces the private object of torch with the dotted name `path`, and returns the original one."""
    original = private(path)
    parent, _, name = path.rpartition(".")
    setattr(private(parent), name, value)
    return original


@contextlib.contextmanager
def undisturbed() -> Iterator[list[str]]:
    """Lets code be compiled and run within it without a mark in the prediction; yields the names that it passes to
    `on_allocation`."""
    counters = private("torch._dynamo.utils.counters")
    counted = {name: dict(counts) for name, counts in counters.items()}
    notified = on_allocation[:]
    graphs = len(graph_calls)
    names: list[str] = []
    on_allocation[:] = [names.append]
    try:
        with private("torch.utils._python_dispatch._disable_current_modes")(), separate_recorder():
            yield names
    finally:
        on_allocation[:] = notified
        del graph_calls[graphs:]
        counters.clear()
        for name, counts in counted.items():
            counters[name].update(counts)


def _configure() -> None:
    """Turns off what times or checks kernels, and caches whose content comes from another GPU."""
    values = {
        "compile_threads": 1,
        "size_asserts": False,
        "alignment_asserts": False,
        "nan_asserts": False,
        "fx_graph_cache": False,
        "fx_graph_remote_cache": False,
        "autotune_local_cache": False,
        "max_autotune_gemm_backends": "ATEN",  # one kernel for a product, so that none is timed
        "max_autotune_conv_backends": "ATEN",
    }
    for name, value in values.items():
        replace_private(f"torch._inductor.config.{name}", value)
    replace_private("torch._functorch.config.enable_autograd_cache", False)
    replace_private("torch._inductor.fx_passes.pad_mm._should_pad", _pads)
    # Into how many parts a reduction is split (mode max-autotune-no-cudagraphs); earlier versions do not tune it.
    tuner = private("torch._inductor.runtime.coordinate_descent_tuner.CoordescTuner")
    tuner.autotune_single_field = staticmethod(lambda function, first_value, *bounds: first_value)


_PADDED_FROM: Final = 150
"""FLOPs for each element read or written, from which inductor tries on an H100 whether a padded product is faster
(torch 2.13: _inductor/fx_passes/pad_mm.py, `is_mm_compute_bound`: half of FLOP/s over bytes/s)."""


def _pads(match: Any, left: torch.Tensor, right: torch.Tensor, *_: Any) -> bool:
    """Whether inductor pads a product with a side that is no multiple of 16 bytes, such as GPT-2's vocabulary, 50257.

    Inductor measures it. Here large products in 16 bits are padded: unaligned ones run without the fast kernels of
    tensor cores. On an H200, GPT-2's logits were (benchmarks/results/predict-h200.json).
    """
    inverse_intensity = 1 / left.shape[-2] + 1 / left.shape[-1] + 1 / right.shape[-1]
    return left.dtype.itemsize == 2 and 1 / inverse_intensity > _PADDED_FROM


def _patch_device_interface() -> None:
    """Lets inductor ask the fake GPU. Its class has bound the functions of `torch.cuda` when it was imported."""
    major, minor = torch.cuda.get_device_capability()
    bound = (
        "current_device",
        "set_device",
        "device_count",
        "synchronize",
        "get_device_properties",
        "is_bf16_supported",
        "current_stream",
        "stream",
    )
    answers: dict[str, Callable[..., Any]] = {
        **{name: getattr(torch.cuda, name) for name in bound},
        "get_raw_stream": lambda index: 0,
        "exchange_device": lambda index: 0,
        "maybe_exchange_device": lambda index: 0,
        "is_available": lambda: True,
        "get_compute_capability": lambda device=None: 10 * major + minor,
    }
    for name, answer in answers.items():
        replace_private(f"torch._dynamo.device_interface.CudaInterface.{name}", staticmethod(answer))
    private("torch._dynamo.device_interface.caching_worker_device_properties").clear()
    private("torch.utils._triton.has_triton").cache_clear()
    replace_private("torch.utils._triton.triton_hash_with_backend", lambda: "no GPU")
    vars(torch._C)["_cuda_getCurrentRawStream"] = lambda index: 0
    replace_private("torch.cuda._DeviceGuard", lambda *args, **kwargs: contextlib.nullcontext())
    # Dynamo's own fake mode creates `torch.tensor(…, device="cuda")` on the CPU and moves it, as without a GPU.
    replace_private("torch._subclasses.fake_tensor.FakeTensorMode.avoid_device_init", property(lambda self: True))
    replace_private("torch._C._ensureCUDADeviceGuardSet", lambda: None)


class Kernel:
    """A Triton kernel that does nothing but tell the recorder what it reads and writes."""

    launchers: Final[list[Any]] = []
    n_spills: Final = 0

    def __init__(self, name: str, source_code: str = "") -> None:
        self._name = name
        self._multiplies = "tl.dot" in source_code

    def run(self, *arguments: Any, moved_bytes: int | None = None, **options: Any) -> None:
        if moved_bytes is not None:
            launched(self._name, arguments, moved_bytes=moved_bytes)
        elif self._multiplies:  # a template such as flex attention, or a kernel of the user or of a library
            launched(self._name, arguments, kind="unknown")
        else:
            launched(self._name, arguments)

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


def _patch_kernels() -> None:
    """Replaces inductor's kernels, of Triton and of C++, with ones that do nothing."""
    kernels: dict[str, Callable[..., Any]] = {
        "triton": lambda self, kernel_name, source_code, device_str="cuda": Kernel(kernel_name, source_code),
        "multi_kernel": lambda self, *args, **kwargs: Kernel("multi_kernel"),
        "cpp_pybinding": lambda self, argtypes, source_code: Kernel("cpp_fused").run,
        "wait": lambda self, scope: None,
    }
    for name, make in kernels.items():
        replace_private(f"torch._inductor.async_compile.AsyncCompile.{name}", make)


def _watch_graphs() -> None:
    """Records what compiled code calls as called by it, and the size of each compiled graph at its first call."""

    def call(self: Any, inputs: Any) -> Any:
        if id(self) not in graphs:
            graphs[id(self)] = self
            graph_calls.append(len(_CALL_OF_WRAPPER.findall(self.source_code)))
        with compiled_code():
            return original(self, inputs)

    graphs: dict[int, Any] = {}  # holds them, so that no other object gets the same `id`
    original = replace_private("torch._inductor.output_code.CompiledFxGraph.__call__", call)


graph_calls: Final[list[int]] = []
"""The number of calls in the wrapper of each compiled graph."""

_CALL_OF_WRAPPER: Final = re.compile(
    r"^ +(?:\w+ = )?(?:\w+\.run\(|cpp_fused|extern_kernels\.|torch\.ops\.|aten\.|graphsafe_run_with|.*\(dim=0\))",
    re.MULTILINE,
)
"""A line of inductor's wrapper that starts a generated kernel or an operation of torch."""


def _count_bytes() -> None:
    """Makes the wrapper pass to each generated kernel the bytes that it moves."""

    def add_sizes(self: Any, name: str, call_arguments: list[Any], types: list[Any]) -> None:
        original(self, name, call_arguments, types)
        if name:  # else the arguments are for a benchmark of the kernel
            call_arguments.append(f"moved_bytes={moved_bytes(self.args, self.features.scheduler_nodes())}")
            types.append(int)

    def call_cpp_kernel(self: Any, wrapper: Any, kernel_name: str, **options: Any) -> None:
        _, call_arguments, types = self.args.cpp_argdefs()
        call_arguments.append(f"moved_bytes={moved_bytes(self.args, self.scheduled_nodes)}")
        wrapper.generate_kernel_call(kernel_name, call_arguments, triton=False, arg_types=[*types, int], **options)

    original = replace_private("torch._inductor.codegen.triton.TritonKernel.add_numel_to_call_args", add_sizes)
    replace_private("torch._inductor.codegen.cpp.KernelGroup.call_kernel", call_cpp_kernel)


def moved_bytes(arguments: Any, nodes: Iterable[Any]) -> str:
    """The bytes that a generated kernel reads and writes, as a Python expression of the sizes in the wrapper.

    Each pointer is read or written once, and one that is changed in place is read and written. Of a tensor, only the
    elements count that the kernel's loops reach: of an embedding table, as many as its result has.

    Args:
        arguments: the kernel's pointers (inductor's `KernelArgs`).
        nodes: the scheduler's nodes that were fused into the kernel.
    """
    graph = private("torch._inductor.virtualized.V").graph
    minimum = private("torch.utils._sympy.functions.Min")
    reads = [dep for node in nodes for dep in node.read_writes.reads]
    writes = [dep for node in nodes for dep in node.read_writes.writes]
    made_inside = {dep.name for dep in writes}

    pointers: dict[str, list[str]] = {}  # name in the kernel → names of its buffer, the last one after the kernel
    for name, pointer in (*arguments.input_buffers.items(), *arguments.output_buffers.items()):
        pointers[str(pointer)] = [name]
    for buffer in arguments.inplace_buffers.values():
        pointers[getattr(buffer, "inner_name", _REMOVED)] = getattr(buffer, "other_names", [])
    pointers.pop(_REMOVED, None)

    total: Any = 0
    for names in pointers.values():
        last = names[-1]
        numel = graph.get_numel(last)
        real_names = graph.scheduler.mutation_real_name
        read = {dep for dep in reads if real_names.get(dep.name, dep.name) in names and dep.name not in made_inside}
        written = {dep for dep in writes if real_names.get(dep.name, dep.name) == last}
        for reached in (read, written):
            elements = minimum(numel, sum(map(_reached_elements, reached), 0 * numel))
            total += elements * graph.get_dtype(last).itemsize
    total = graph.sizevars.remove_precomputed_replacements(graph.sizevars.simplify(total))
    return str(private("torch._inductor.codegen.wrapper.pexpr")(total))


_REMOVED: Final = "REMOVED"
"""The pointer of a buffer that lives inside one kernel (torch 2.13: _inductor/codegen/common.py, `RemovedArg`)."""


def _reached_elements(dep: Any) -> Any:
    """The number of elements that a kernel's loops read or write, a sympy expression.

    Args:
        dep: a buffer, the index into it and the ranges of the loops (inductor's `MemoryDep`); others only order nodes.
    """
    if not hasattr(dep, "var_names"):
        return 0
    if dep.is_indirect():  # the index is read from a tensor, as in a lookup
        return math.prod(dep.size)
    return dep.get_numel()


def _patch_wrapper_functions() -> None:
    """Replaces what the wrapper calls in C++ without the dispatcher, and what needs a generator of the GPU."""

    def empty_strided(device: str, size: Any, stride: Any, dtype: Any, module: str = "") -> torch.Tensor:
        for notify in on_allocation:
            notify(module)
        return torch.empty_strided(size, stride, dtype=dtype, device=device)

    def reinterpret_tensor(tensor: torch.Tensor, size: Any, stride: Any, offset: int = 0) -> torch.Tensor:
        return torch.as_strided(tensor, size, stride, offset + int(tensor.storage_offset()))

    guards = private("torch._C._dynamo.guards")
    guards._empty_strided_cuda = functools.partial(empty_strided, "cuda:0")
    guards._empty_strided_cpu = functools.partial(empty_strided, "cpu")
    guards._reinterpret_tensor = reinterpret_tensor
    path = "torch._inductor.fx_passes.fuse_attention._get_sfdp_patterns"
    attention_patterns = private(path)
    replace_private(path, lambda input_device=None: attention_patterns(torch.device("cpu")))


def _repeat_random_operations() -> None:
    """Runs what checkpointing repeats with the same random numbers, such as attention, without a generator's state.

    Inductor plans such an operation like any other that it does not generate itself, and the wrapper calls
    `graphsafe_run_with_rng_state(operation, …)` on a GPU (torch 2.13: _functorch/partitioners.py,
    `functionalize_rng_ops`; _prims/rng_prims.py).
    """
    run: dict[str, Callable[..., Any]] = {
        "run_and_save_rng_state": lambda operation, *args, **kwargs: (
            torch.get_rng_state(),
            operation(*args, **kwargs),
        ),
        "run_with_rng_state": lambda state, operation, *args, **kwargs: operation(*args, **kwargs),
        "graphsafe_run_with_rng_state": lambda operation, *args, rng_state, **kwargs: operation(*args, **kwargs),
    }
    mode_stack = private("torch.utils._python_dispatch._get_current_dispatch_mode_stack")
    for name, run_here in run.items():
        kind = type(private(f"torch._prims.rng_prims.{name}"))

        def call(
            self: Any, *args: Any, run_here: Any = run_here, compile_here: Any = kind.__call__, **kwargs: Any
        ) -> Any:
            runs = any(isinstance(mode, StorageTracer) for mode in mode_stack())
            return run_here(*args, **kwargs) if runs else compile_here(self, *args, **kwargs)

        kind.__call__ = call


def _name_modules() -> None:
    """Makes the wrapper pass the name of the module that an allocation is for.

    Inductor knows it relative to the `self` of the function that dynamo compiles: the compiled module, or a module in
    it if a graph break ended the graph there. Modules alike share a graph, which then has the name of the first one.
    """
    virtualized = private("torch._inductor.virtualized.V")
    compile_context = private("torch._guards.CompileContext")
    prefixes: dict[Any, str] = {}  # by the id of a compilation, which its forward and backward pass share

    def compile_graph(self: Any, *args: Any, **kwargs: Any) -> Any:
        prefixes[compile_context.current_compile_id()] = _name_within_compiled(self.root_tx.f_locals.get("self"))
        return compile_here(self, *args, **kwargs)

    def make_allocation(self: Any, name: str, *args: Any, **kwargs: Any) -> str:
        line: str = original(self, name, *args, **kwargs)
        buffer = virtualized.graph.try_get_buffer(name)
        if buffer is None:
            return line
        prefix = prefixes.get(compile_context.current_compile_id(), "")
        module = ".".join(filter(None, (prefix, module_of(buffer.get_origins()))))
        # The view that may follow is of another size: "empty_strided_cuda(…).as_strided(…)".
        return re.sub(r"(empty_strided_(?:cuda|cpu)\(.*?)\)(?=$|\.as_strided)", rf"\1, {module!r})", line)

    compile_here = replace_private("torch._dynamo.output_graph.OutputGraph.compile_and_call_fx_graph", compile_graph)
    original = replace_private("torch._inductor.codegen.wrapper.PythonWrapperCodegen.make_allocation", make_allocation)


def _name_within_compiled(module: Any) -> str:
    """The dotted name of the module in the compiled module that contains it; empty if none does."""
    for compiled in compiled_modules:
        for name, part in compiled.named_modules():
            if part is module:
                return str(name)
    return ""


def module_of(origins: Iterable[Any]) -> str:
    """The dotted name of the module that a buffer belongs to, relative to the compiled one.

    Args:
        origins: the nodes of the FX graph that the buffer is computed from; the last one is its own operation.
    """
    for node in sorted(origins, reverse=True):
        stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
        if stack:
            path, _ = list(stack.values())[-1]  # such as L['self'].model.layers.0
            path = re.sub(r"\._modules\['(\w+)'\]", r".\1", str(path))  # as torch 2.9 writes some
            return path.rpartition("]")[2].removeprefix(".")
    return ""


class _OnHost(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Creates tensors on the CPU that were to be created on the GPU."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def on_host(value: Any) -> Any:
            return torch.device("cpu") if isinstance(value, torch.device) and value.type == "cuda" else value

        return func(*map(on_host, args), **{name: on_host(value) for name, value in (kwargs or {}).items()})


def _fold_constants_on_host() -> None:
    """Computes constants on the CPU: AOTAutograd and inductor compute them with real tensors."""

    def on_host(method: Any) -> Any:
        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            with _OnHost():  # type: ignore[no-untyped-call]
                return method(*args, **kwargs)

        return call

    for path in (
        "torch._inductor.fx_passes.joint_graph.UniformValueConstantFolder.__init__",
        "torch._inductor.constant_folding.ConstantFolder.run",
    ):
        replace_private(path, on_host(private(path)))

    unset_fake = private("torch.fx.experimental.proxy_tensor.unset_fake_temporarily")

    @contextlib.contextmanager
    def unset_fake_on_host() -> Iterator[Any]:
        with unset_fake() as outer, _OnHost():  # type: ignore[no-untyped-call]
            yield outer

    replace_private("torch.fx.experimental.proxy_tensor.unset_fake_temporarily", unset_fake_on_host)


def _hide_from_dynamo() -> None:
    """Keeps dynamo out of the code of dispatch modes, which runs between two graphs."""
    disable = private("torch._disable_dynamo")
    modes: tuple[Any, ...] = (private("torch._subclasses.fake_tensor.FakeTensorMode"), StorageTracer)
    for mode in modes:
        mode.__torch_dispatch__ = disable(mode.__torch_dispatch__, recursive=True)


def split_graphs() -> None:
    """Splits graphs at the gradient buckets of `DistributedDataParallel`, by torch's own `DDPOptimizer`.

    Dynamo does so only within that wrapper, and the wrapper needs other ranks (torch 2.13: _dynamo/convert_frame.py,
    `CatchErrorsWrapper`).
    """

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if bucket_bytes and mode() == "ddp_optimizer":
            self.compiler_fn = optimizer(bucket_bytes[-1], self.compiler_fn).compile_fn

    mode = private("torch._dynamo.utils.get_optimize_ddp_mode")
    optimizer = private("torch._dynamo.backends.distributed.DDPOptimizer")
    original = replace_private("torch._dynamo.output_graph.OutputGraph.__init__", init)
