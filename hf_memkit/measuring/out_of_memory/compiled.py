"""Why a job needs more memory because torch compiles it."""

from __future__ import annotations

from collections.abc import Iterator

from hf_memkit.components.recompilation_guard_counts import MOST_LATE
from hf_memkit.measuring.out_of_memory.failed_job import FailedJob
from hf_memkit.measuring.out_of_memory.message import show
from hf_memkit.measuring.out_of_memory.run_view import mapping
from hf_memkit.setup.techniques.compiling import GRAPH_MODES


def compiling_needs(failed: FailedJob) -> str:
    """What torch.compile needs in addition, in sentences; empty without evidence."""
    if not failed.uses("torch.compile") or failed.message.memory != "device":
        return ""
    return " ".join([*_zeros(failed), *_recompilations(failed), *_cuda_graphs(failed)])


def _zeros(failed: FailedJob) -> Iterator[str]:
    zeros = failed.zeros_for_logits
    if zeros is not None:
        yield (
            "The model returns its logits, so compiled code makes zeros for their absent gradient when backward "
            f"begins: {show(zeros)}, tokens × vocabulary (pytorch#131794). A loss that returns no logits (technique "
            "chunked-loss) needs none; nor does uncompiled code."
        )


def _recompilations(failed: FailedJob) -> Iterator[str]:
    compilation = mapping(failed.job.moment.get("compilation"))
    recompilations = compilation.get("recompilations", 0)
    if compilation.get("given_up"):
        yield (
            "torch gave up compiling a function after too many recompilations: it runs uncompiled since, and keeps "
            "the activations of uncompiled code."
        )
    elif recompilations > MOST_LATE:
        yield (
            f"torch recompiled {recompilations} times: the kernels of each graph stay on the GPU, outside PyTorch's "
            "allocator."
        )
    else:
        return
    if reasons := compilation.get("recompile_reasons"):
        yield f"The first reason to recompile: {reasons[0]}."
    yield "Fewer shapes need fewer graphs (technique pad-to-multiple)."


def _cuda_graphs(failed: FailedJob) -> Iterator[str]:
    mode = failed.argument("torch_compile_mode")
    setting = f"torch_compile_mode: {mode}"
    if mode not in GRAPH_MODES:
        if failed.argument("torch_compile_backend") != "cudagraphs":
            return
        setting = "torch_compile_backend: cudagraphs"
    pools = failed.message.private_pools_bytes
    held = f"; such pools hold {show(pools)}" if pools is not None else ""
    yield (
        f"{setting} records a CUDA graph for each shape of a batch, each with a private pool of memory{held}. "
        "The backend inductor with torch_compile_mode: default records none."
    )
