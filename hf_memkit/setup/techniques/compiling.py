"""torch.compile through Trainer's own arguments."""

from __future__ import annotations

from typing import Final

from hf_memkit.common.errors import SettingError, did_you_mean
from hf_memkit.setup.setup import Setup
from hf_memkit.setup.techniques.registry import InPlans, technique

BACKENDS: Final[dict[str, str]] = {
    "inductor": "fused kernels (Triton on a GPU, C++ on a CPU), and fewer activations kept",
    "cudagraphs": "PyTorch's own kernels, recorded once a shape and replayed",
    "aot_eager": "PyTorch's own kernels, and fewer activations kept: for debugging, or if there is no compiler",
    "eager": "PyTorch's own kernels in traced order: for debugging; saves nothing",
}
"""Backends that can train and that accelerate accepts. Sources: torch 2.13.0: _dynamo/backends/ (debugging.py,
inductor.py, cudagraphs.py); accelerate 1.15.0: utils/dataclasses.py, DynamoBackend."""

MODES: Final[dict[str, str]] = {
    "default": "compiles fastest",
    "reduce-overhead": "CUDA graphs: less work for the CPU, more memory",
    "max-autotune": "tries several kernels for each product, with CUDA graphs: compiles for minutes",
    "max-autotune-no-cudagraphs": "tries several kernels for each product, without CUDA graphs: compiles for minutes",
    "lite": "PyTorch's own kernels, but for code that is marked for inductor (torch 2.11 and later): saves little",
}
"""Modes of the backend inductor that train. Source: torch 2.13.0, _inductor/__init__.py, list_mode_options."""

GRAPH_MODES: Final = ("reduce-overhead", "max-autotune")
"""Modes that record CUDA graphs: one for each shape, each with its own memory pool."""

_INDUCTOR = "use backend 'inductor'"
RETIRED: Final[dict[str, str]] = {
    "nvfuser": f"PyTorch removed nvFuser; {_INDUCTOR}",
    "aot_nvfuser": f"PyTorch removed nvFuser; {_INDUCTOR}",
    "aot_ts_nvfuser": f"PyTorch removed nvFuser and TorchScript's fusion; {_INDUCTOR}",
    "nvprims_nvfuser": f"PyTorch removed nvFuser; {_INDUCTOR}",
    "ts": f"TorchScript's fusion is for inference; {_INDUCTOR}",
    "nnc": f"TorchScript's fuser NNC is for inference; {_INDUCTOR}",
    "ipex": f"Intel's extension was merged into PyTorch; {_INDUCTOR}, on Intel's devices too",
    "ofi": "TorchScript's optimize_for_inference cannot train; use 'inductor'",
    "fx2trt": "TensorRT cannot train; use 'inductor'",
    "tensorrt": "TensorRT cannot train; use 'inductor'",
    "onnxrt": "ONNX Runtime's backend is for inference; use 'inductor'",
    "tvm": "TVM's backend is for inference; use 'inductor'",
    "aot_torchxla_trace_once": "now named 'openxla', for TPUs",
    "torchxla_trace_once": "now named 'openxla', for TPUs",
}
"""Backends of older guides. Some pass accelerate and fail in the first forward pass (rule compile-backend)."""

LEAST_CAPABILITY: Final = 7.0
"""Minimum compute capability of Triton's kernels (torch 2.13.0: torch/_inductor/exc.py, GPUTooOldForTriton)."""


@technique(
    "compile",
    family="compile",
    saves="torch recomputes cheap activations in backward, and fused operations write no intermediate results",
    costs="the first steps take minutes, and so does each new kind of shape",
    not_when="the run has only a few hundred steps, or CUDA graphs are on and each batch has a new shape",
    group="nearly the same",
    settings={"arguments.torch_compile": True},
    values={"compile_backend": str, "compile_mode": str},
    planned=InPlans("compile", "torch.compile", "fused operations round their last result only"),
)
def compiled(setup: Setup) -> Setup:
    """`torch_compile` with a guard that stops the run if nothing is compiled.

    Values: `compile_backend` (in `BACKENDS`, default inductor), `compile_mode` (in `MODES`, default "default").

    Raises:
        SettingError: the backend or the mode is unknown or cannot train.
    """
    job = setup.resolved_for
    backend = str(job.values.get("compile_backend", "inductor"))
    mode = str(job.values.get("compile_mode", "default"))
    _refuse(backend, mode)
    gpu = job.machine.gpu
    if backend == "inductor" and gpu is not None and gpu.capability is not None and gpu.capability < LEAST_CAPABILITY:
        setup = setup.with_problems(
            [f"torch.compile makes kernels for compute capability 7.0 and later; {gpu.name} has {gpu.capability}"]
        )
    setup = setup.put_all(
        "arguments",
        torch_compile=(True, "the forward and backward pass become a few compiled graphs"),
        torch_compile_backend=(backend, BACKENDS[backend]),
    )
    if mode != "default":
        setup = setup.put("arguments.torch_compile_mode", mode, MODES[mode])
    if mode in GRAPH_MODES or backend == "cudagraphs":
        setup = setup.with_notes(
            "CUDA graphs hold memory for each shape of a batch: give all batches one shape (packing, or "
            "pad-to-multiple with pad_multiple as long as the longest sample)."
        )
    return setup.put(
        "trainer_parts.recompilation_guard", {},
        "stops the run if nothing was compiled, or torch gave up compiling after too many shapes",
    )  # fmt: skip


def _refuse(backend: str, mode: str) -> None:
    problems = []
    if backend in RETIRED:
        problems.append(f"compile_backend={backend}: {RETIRED[backend]}")
    elif backend not in BACKENDS:
        problems.append(
            f"compile_backend={backend}: unknown, or cannot train{did_you_mean(backend, BACKENDS)}; known: "
            f"{', '.join(BACKENDS)}"
        )
    if mode not in MODES:
        hint = "; for a backend: compile_backend" if mode in BACKENDS else did_you_mean(mode, MODES)
        problems.append(f"compile_mode={mode}: unknown{hint}; known: {', '.join(MODES)}")
    elif mode != "default" and backend in BACKENDS and backend != "inductor":
        problems.append(
            f"compile_mode={mode}: backend {backend!r} ignores modes. Remove it, or set compile_backend=inductor"
        )
    if problems:
        raise SettingError("\n".join(problems))
