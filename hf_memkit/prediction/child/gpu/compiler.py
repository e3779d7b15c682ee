"""Runs torch.compile as a GPU would, without compiling and launching kernels.

Dynamo, AOTAutograd, the partitioner and inductor run as they are. Inductor writes a wrapper: Python code that
allocates buffers, launches kernels and frees buffers. Here the wrapper runs on fake tensors, and its kernels do
nothing. So what it allocates, reuses and frees is what it does on a GPU.

The dispatch modes of a prediction are inactive while dynamo and inductor compile, and active when compiled code runs:
`TorchDispatchMode.ignore_compile_internals` (torch 2.13: utils/_python_dispatch.py; _dynamo/convert_frame.py,
`compile_lock`).
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from typing import Any, Final

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from hf_memkit.common.errors import NoKernel, SettingError, Unmodelled, did_you_mean
from hf_memkit.prediction.child.gpu.compiler_earlier import IS_EARLIER, patch_earlier_compiler, refuse_tf32
from hf_memkit.prediction.child.gpu.compiler_patches import (
    TESTED_WITH,
    compiled_modules,
    graph_calls,
    patch_compiler,
    undisturbed,
)
from hf_memkit.prediction.child.gpu.compiler_speed import save_time
from hf_memkit.prediction.child.output import say
from hf_memkit.prediction.child.tracer.tracer import StorageTracer
from hf_memkit.prediction.time.compile_time import trace_seconds
from hf_memkit.prediction.traced_training import Compilation
from hf_memkit.setup.techniques.compiling import BACKENDS, GRAPH_MODES, LEAST_CAPABILITY, MODES

TRACED_BACKENDS: Final = tuple(name for name in BACKENDS if name != "cudagraphs")


def compile_module(compile_: Callable[..., Any], model: Callable[..., Any], **options: Any) -> Any:
    """Compiles a module, its `forward` or flex attention with `compile_`, the original `torch.compile`. Raises
    Unmodelled for what cannot be traced."""
    module = model if isinstance(model, torch.nn.Module) else getattr(model, "__self__", None)
    if module is not None:
        _refuse(options)
        refuse_modules(module)
    else:
        _refuse(options, "attn_implementation=flex_attention", "use sdpa")
    _prepare()
    verify(compile_, options.get("backend") or "inductor")
    if module is not None:
        if not compiled_modules:
            seconds = trace_seconds(sum(1 for _ in module.parameters()))
            say(f"compiling on this machine, about {seconds:.0f} s")
        compiled_modules.append(module)
    return compile_(model, **options)


@functools.cache
def _prepare() -> None:
    """Prepares the installed torch. Raises Unmodelled if it is one that cannot be traced."""
    if IS_EARLIER:
        patch_earlier_compiler()
    patch_compiler()
    save_time()


def refuse_modules(model: torch.nn.Module) -> None:
    """Raises Unmodelled for a model with modules whose compiled code is not traced."""
    if any(_is_of_liger(module) for module in model.modules()):
        raise Unmodelled(
            "torch_compile with Liger: Triton kernels that compiled code launches are not traced. Omit "
            "torch_compile or use_liger_kernel"
        )
    if any(type(module).__module__.startswith("bitsandbytes.nn.") for module in model.modules()):
        raise Unmodelled(
            "torch_compile with bitsandbytes' 4-bit or 8-bit weights: a real run compiles them with the model, and "
            "a trace does not. Omit torch_compile, or measure with memkit run"
        )


def _is_of_liger(module: torch.nn.Module) -> bool:
    """Whether Liger has replaced the class of the module or its forward pass."""
    return any(str(part.__module__).startswith("liger_kernel.") for part in (type(module), module.forward))


def _refuse(options: dict[str, Any], setting: str = "torch_compile", instead: str = "omit torch_compile") -> None:
    """Raises Unmodelled for torch.compile with `options`, if it cannot be traced here.

    Args:
        setting: what the user wrote, as the message names it.
        instead: what the user can do instead.
    """
    if not hasattr(TorchDispatchMode, "ignore_compile_internals"):
        raise Unmodelled(
            f"{setting}: the trace needs torch 2.9 or later; this is {torch.__version__}. Install torch "
            f"{TESTED_WITH[-1]}, or {instead}"
        )
    backend = options.get("backend") or "inductor"
    if backend not in TRACED_BACKENDS:
        name = backend if isinstance(backend, str) else getattr(backend, "__name__", type(backend).__name__)
        raise Unmodelled(
            f"torch_compile_backend={name}: not traced. Traced: {', '.join(TRACED_BACKENDS)}; use one of them"
        )
    mode = options.get("mode") or "default"
    if backend == "inductor" and mode not in MODES:
        raise SettingError(f"torch_compile_mode={mode}: unknown{did_you_mean(mode, MODES)}; known: {', '.join(MODES)}")
    if mode in GRAPH_MODES or (options.get("options") or {}).get("triton.cudagraphs"):
        raise Unmodelled(
            f"torch_compile_mode={mode}: CUDA graphs hold memory that is not traced. Use torch_compile_mode=default, "
            "or measure with memkit run"
        )
    if backend != "inductor":
        return
    if importlib.util.find_spec("triton") is None:
        raise Unmodelled(f"{setting}: the trace needs triton; run: pip install triton")
    if not torch.cuda.is_available():
        return
    if IS_EARLIER:
        refuse_tf32()
    capability = float("{}.{}".format(*torch.cuda.get_device_capability()))
    if capability < LEAST_CAPABILITY:
        if setting == "torch_compile":
            instead += ", or use torch_compile_backend=aot_eager"
        raise NoKernel(
            f"{setting}: {torch.cuda.get_device_name()} has compute capability {capability}; Triton needs "
            f"{LEAST_CAPABILITY} or later. {instead.capitalize()}"
        )


def compilation() -> Compilation | None:
    """What inductor has compiled in this process and then run; None: nothing."""
    return Compilation(len(graph_calls), sum(graph_calls)) if graph_calls else None


class _SmallModule(torch.nn.Module):
    """What `verify` compiles."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.activation = torch.nn.Tanh()
        self.product = torch.nn.Linear(32, 16, bias=False, device=device)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.product(self.activation(rows))
        return result


@functools.cache
def verify(compile_: Callable[..., Any], backend: str) -> None:
    """Compiles a module, runs it on fake tensors, and compares what the trace records with what it must.

    torch's private names can stay and mean something else in its next version. The test leaves no mark in the
    prediction's trace, and takes less than half a second.

    Raises:
        Unmodelled: in the installed torch, compiled code fails, allocates something else or is not recorded.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with undisturbed() as names, FakeTensorMode(), torch.enable_grad(), torch.autocast(device, enabled=False):
        tracer = StorageTracer(device, work=True)
        model = _SmallModule(device)
        rows = torch.empty(64, 32, device=device)
        try:
            with tracer:
                tracer.adopt(model.parameters())
                loss = compile_(model, backend=backend)(rows).sum()
                tracer.end_phase("forward")
                loss.backward()
                del loss
        except Exception as error:
            raise _of_another_torch(f"compiled code fails ({type(error).__name__})") from error
        left_bytes, _ = tracer.live_bytes()
    assert tracer.recorder is not None
    trace, work = tracer.finish("backward"), tracer.recorder.work

    end_of_forward, _ = trace.marks[0]
    allocated = [trace.sizes_bytes[event - 1] for event in trace.events[:end_of_forward] if event > 0]
    weight, activation, product, total = (4 * elements for elements in (32 * 16, 64 * 32, 64 * 16, 1))
    if allocated != [weight, activation, product, total] or left_bytes != 2 * weight:
        raise _of_another_torch(f"compiled code allocates {allocated} bytes and keeps {left_bytes}")

    if backend == "inductor":
        calls = [work.operations[call] for call in work.calls]
        moved = [call.moved_bytes for call in calls if call.called_by == "compiled"]
        if names[:2] != ["activation", "product"] or moved[:1] != [2 * activation]:
            raise _of_another_torch(f"kernels move {moved} bytes, for the modules {names}")


def _of_another_torch(difference: str) -> Unmodelled:
    return Unmodelled(
        f"torch_compile: with torch {torch.__version__}, {difference}, which the trace does not know. Install torch "
        f"{TESTED_WITH[-1]}, omit torch_compile, or measure with memkit run"
    )
