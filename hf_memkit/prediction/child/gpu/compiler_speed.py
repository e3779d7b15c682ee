"""What makes compiling faster and changes nothing that compiled code allocates, frees or launches."""

from __future__ import annotations

import functools
import gc
from typing import Any

import torch

from hf_memkit.prediction.child.gpu.compiler_patches import private, replace_private


@functools.cache
def save_time() -> None:
    """Turns off work of dynamo, AOTAutograd and inductor whose results a prediction does not use.

    Raises:
        Unmodelled: a private name that this needs is missing in the installed torch.
    """
    _skip_output_for_people()
    _collect_once()
    break_at_hook()
    _keep_no_recomputed_outputs()


def _skip_output_for_people() -> None:
    """Turns off checks, logs and comments, and what only kernels need that run."""
    replace_private("torch._inductor.config.graph_partition", False)  # into parts for CUDA graphs
    replace_private("torch._inductor.config.triton.coalesce_tiling_analysis", False)  # of loops in a kernel
    replace_private("torch.fx.Graph.lint", lambda self: None)
    replace_private("torch.fx.GraphModule.print_readable", lambda *args, **kwargs: "")  # for logs
    replace_private("torch._dynamo.output_graph.OutputGraph.get_graph_sizes_structured", lambda self: {})  # for logs
    replace_private("torch._inductor.codegen.triton.get_kernel_metadata", lambda *args: ("", ""))  # for comments
    # Else a C++ compiler runs, to see which instructions of this CPU it supports.
    replace_private("torch._inductor.cpu_vec_isa.VecISA.check_build", lambda self, code: True)
    no_system = staticmethod(lambda: {"hash": ""})
    replace_private("torch._inductor.codecache.CacheBase.get_system", no_system)  # reads all files of Triton
    # It fills the one object that there is, each time it is asked for.
    path = "torch._inductor.dtype_propagation.DtypePropagationOpsHandler.__init__"
    replace_private(path, functools.cache(private(path)))


def _collect_once() -> None:
    """Collects garbage once, at the end of the backward pass's compilation, instead of tens of times before. It frees
    tensors in cycles, too."""

    def collect_new(compiled: Any) -> None:
        backward = compiled.callback_trigger is lazy_backward
        if backward or not torch.is_grad_enabled():
            gc.enable()
            gc.collect(1)

    lazy_backward = private("torch._dynamo.callback.CallbackTrigger.LAZY_BACKWARD")
    private("torch._dynamo.on_compile_start")(lambda _: gc.disable())
    private("torch._dynamo.on_compile_end")(collect_new)


def break_at_hook() -> None:
    """Lets dynamo break a graph at checkpointing's hook at once.

    With LoRA and checkpointing, a hook of transformers or PEFT calls `requires_grad_()` on the embedding's output.
    Dynamo breaks the graph there, but first it traces the whole function, and sees that an output with a gradient
    depends on it. It does so for each of about ten functions that are called within one another around the embedding
    (torch 2.13: _dynamo/output_graph.py, `_check_requires_grad_intermediate_outputs`; torch 2.11 breaks at once).
    """

    def requires_grad_(self: Any, tx: Any, *args: Any) -> Any:
        if tx.f_code.co_name.startswith("make_inputs_require_grad") and torch.is_grad_enabled():
            tx.speculation_log.graph_break_on_requires_grad_ = True
        return original(self, tx, *args)

    original = replace_private("torch._dynamo.variables.tensor.TensorVariable.method_requires_grad_", requires_grad_)


def _keep_no_recomputed_outputs() -> None:
    """Lets checkpointing keep no copies of outputs while AOTAutograd traces it: the partitioner chooses what is
    recomputed, and nobody reads them (torch 2.13: utils/checkpoint.py, `_CachingTorchDispatchMode`). Earlier versions
    keep none.
    """
    checkpoint = private("torch.utils.checkpoint")
    if not hasattr(checkpoint, "_detach_helper"):
        return

    def detach(output: Any) -> Any:
        return original(output) if dispatch_mode(tracing) is None else None

    dispatch_mode = private("torch._C._get_dispatch_mode")
    tracing = private("torch._C._TorchDispatchModeKey.PROXY")
    original = replace_private("torch.utils.checkpoint._detach_helper", detach)
