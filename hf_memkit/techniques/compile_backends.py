"""Backends and modes of torch.compile that can train, and what took the place of those that are gone."""

from __future__ import annotations

from typing import Final

__all__ = ["BACKENDS", "GONE_ARGUMENTS", "GRAPH_MODES", "MODES", "RETIRED"]

BACKENDS: Final[dict[str, str]] = {
    "inductor": "fused kernels (Triton on a card, C++ on a CPU), and fewer activations kept",
    "cudagraphs": "PyTorch's own kernels, recorded once a shape and replayed",
    "aot_eager": "PyTorch's own kernels with fewer activations kept: for finding faults, and where no compiler is",
    "eager": "PyTorch's own kernels in traced order: for finding faults; saves nothing",
}
"""Those that train. Source: torch 2.13.0, _dynamo/backends/ (debugging.py, inductor.py, cudagraphs.py), and of these
the ones that accelerate lets through: accelerate 1.15.0, utils/dataclasses.py, DynamoBackend."""

MODES: Final[dict[str, str]] = {
    "default": "compiles fastest",
    "reduce-overhead": "CUDA graphs: less work for the CPU, more memory",
    "max-autotune": "tries several kernels for each product, with CUDA graphs: compiles for minutes",
    "max-autotune-no-cudagraphs": "as max-autotune, without CUDA graphs",
}
"""Modes of the backend inductor that train. Source: torch 2.13.0, _inductor/__init__.py, list_mode_options."""

GRAPH_MODES: Final = ("reduce-overhead", "max-autotune")
"""Modes that record CUDA graphs: one for each shape, each with memory of its own pool."""

_INDUCTOR = "backend 'inductor' took its place"
RETIRED: Final[dict[str, str]] = {
    "nvfuser": f"nvFuser is no part of PyTorch any more; {_INDUCTOR}",
    "aot_nvfuser": f"nvFuser is no part of PyTorch any more; {_INDUCTOR}",
    "aot_ts_nvfuser": f"nvFuser and TorchScript's fusion are gone; {_INDUCTOR}",
    "nvprims_nvfuser": f"nvFuser is no part of PyTorch any more; {_INDUCTOR}",
    "ts": f"TorchScript's fusion is for inference; {_INDUCTOR}",
    "nnc": f"TorchScript's fuser NNC is for inference; {_INDUCTOR}",
    "ipex": f"Intel's extension was merged into PyTorch; {_INDUCTOR}, on Intel's devices too",
    "ofi": "TorchScript's optimize_for_inference cannot train; take 'inductor'",
    "fx2trt": "TensorRT cannot train; take 'inductor'",
    "tensorrt": "TensorRT cannot train; take 'inductor'",
    "onnxrt": "ONNX Runtime's backend is for inference; take 'inductor'",
    "tvm": "TVM's backend is for inference; take 'inductor'",
    "aot_torchxla_trace_once": "for TPUs, under the name 'openxla' today",
    "torchxla_trace_once": "for TPUs, under the name 'openxla' today",
}
"""Backends of older guides. Some pass accelerate and fail at the first forward; see the rule compile-backend."""

GONE_ARGUMENTS: Final[dict[str, str]] = {
    "torchdynamo": "write torch_compile_backend",
    "jit_mode_eval": "TorchScript's tracing for evaluation is gone; write torch_compile, which evaluation uses too",
    "use_ipex": "Intel's extension was merged into PyTorch; delete the key, and write torch_compile",
    "group_by_length": 'write train_sampling_strategy: "group_by_length"',
    "include_inputs_for_metrics": 'write include_for_metrics: ["inputs"]',
}
"""Arguments of these families that guides for transformers 4 name and transformers 5 has no more, and what took their
place."""
