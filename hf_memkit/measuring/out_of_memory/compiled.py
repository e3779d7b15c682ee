"""Why a job needs more memory because torch compiles it."""

from __future__ import annotations

from collections.abc import Iterator

from hf_memkit.measuring.out_of_memory.failed_job import FailedJob
from hf_memkit.measuring.out_of_memory.message import show
from hf_memkit.measuring.out_of_memory.run_view import mapping
from hf_memkit.setup.techniques.compiling import GRAPH_MODES


def compiling_needs(failed: FailedJob) -> str:
    """What torch.compile needs in addition, in sentences; empty without evidence."""
    if not failed.uses("torch.compile") or failed.message.memory != "device":
        return ""
    return " ".join(_sentences(failed))


def _sentences(failed: FailedJob) -> Iterator[str]:
    if failed.zeros_for_logits is not None:
        yield (
            "The model returns its logits, so compiled code makes zeros for their absent gradient when backward "
            f"begins: {show(failed.zeros_for_logits)}, tokens × vocabulary (pytorch#131794). A loss that returns no "
            "logits (technique chunked-loss) needs none; nor does uncompiled code."
        )

    compilation = mapping(failed.job.moment.get("compilation"))
    if compilation.get("given_up"):
        yield (
            "torch gave up compiling a function after too many recompilations: it runs uncompiled since, and keeps "
            "the activations of uncompiled code. Fewer shapes need fewer graphs (technique pad-to-multiple)."
        )
        if reasons := compilation.get("recompile_reasons"):
            yield f"The first reason to recompile: {reasons[0]}."

    settings = {name: failed.argument(name) for name in ("torch_compile_mode", "torch_compile_backend")}
    graphs = [f"{name}: {value}" for name, value in settings.items() if value in (*GRAPH_MODES, "cudagraphs")]
    if graphs:
        pools = failed.message.private_pools_bytes
        held = f"; such pools hold {show(pools)}" if pools is not None else ""
        yield (
            f"{graphs[0]} records a CUDA graph for each shape of a batch, each with a private pool of memory{held}. "
            "The backend inductor with torch_compile_mode: default records none."
        )
