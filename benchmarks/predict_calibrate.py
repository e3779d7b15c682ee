"""What a GPU's libraries take beside the tensors that torch's dispatcher sees, measured directly.

Beside each figure stands what `hf_memkit/prediction/gpu_memory.py` says of it.
"""

from __future__ import annotations

import json
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from benchmarks.children import take_gpu
from hf_memkit.prediction import gpu_memory
from hf_memkit.units import MIB

_SHAPES: Final = ((4, 16, 16, 2048, 64), (2, 32, 8, 4096, 128), (8, 12, 12, 1024, 64))
"""(batch, query heads, key heads, length, head size)."""


def run(folder: Path) -> int:
    """Writes `result.json`: a figure, or why it could not be taken, for each question."""
    take_gpu()
    found: dict[str, Any] = {}
    for name, question in _QUESTIONS.items():  # the context first: it must be the first thing on the GPU
        try:
            found[name] = question()
        except Exception:
            found[name] = {"error": traceback.format_exc(limit=-2)[-500:]}
    (folder / "result.json").write_text(json.dumps({"calibration": found}))
    return 0


def _context() -> dict[str, Any]:
    """MiB that the process takes of the GPU outside the allocator: when CUDA starts, and after the first product."""
    import pynvml
    import torch

    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    before = pynvml.nvmlDeviceGetMemoryInfo(handle).used
    held = torch.ones(1, device="cuda")
    torch.cuda.synchronize()

    def outside() -> float:
        used = pynvml.nvmlDeviceGetMemoryInfo(handle).used
        return float(used - before - torch.cuda.memory_reserved()) / MIB

    found = {"started_mib": outside()}
    left = torch.ones(1024, 1024, device="cuda", dtype=torch.bfloat16)
    (left @ left).sum().item()
    found["after_a_product_mib"] = outside()
    found["assumed_mib"] = _assumed_context() / MIB
    del held, left
    return found


def _assumed_context() -> float:
    from hf_memkit.hardware import CONTEXT_BYTES

    return float(CONTEXT_BYTES)


def _workspaces() -> dict[str, Any]:
    """MiB that stay allocated after the first product of a thread, beside its result."""
    import torch

    torch._C._cuda_clearCublasWorkspaces()
    found: dict[str, Any] = {}
    left = torch.ones(512, 512, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    bias = torch.ones(512, device="cuda", dtype=torch.bfloat16)

    def kept(work: Callable[[], Any]) -> float:
        before = torch.cuda.memory_allocated()
        result = work()
        torch.cuda.synchronize()
        size = sum(each.untyped_storage().nbytes() for each in result)
        return float(torch.cuda.memory_allocated() - before - size) / MIB

    found["forward_mib"] = kept(lambda: [left @ left])
    found["forward_with_bias_mib"] = kept(lambda: [torch.addmm(bias, left, left).detach()])
    loss = (left @ left).float().sum()
    found["backward_mib"] = kept(lambda: torch.autograd.grad(loss, [left]))

    def elsewhere() -> list[Any]:
        results: list[Any] = []
        thread = threading.Thread(target=lambda: results.append(left.detach() @ left.detach()))
        thread.start()
        thread.join()
        return results

    found["another_thread_mib"] = kept(elsewhere)
    found["assumed_mib"] = gpu_memory.cublas_workspace_bytes(torch.cuda.get_device_capability()) / MIB
    return found


def _attention() -> list[dict[str, Any]]:
    """MiB of each kernel's backward beside the gradients, and which kernel torch takes by itself."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    rows = []
    kernels = (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION)
    for batch, heads, key_heads, length, size in _SHAPES:
        for dtype in (torch.bfloat16, torch.float32):
            query = torch.randn(batch, heads, length, size, device="cuda", dtype=dtype, requires_grad=True)
            key, value = (
                torch.randn(batch, key_heads, length, size, device="cuda", dtype=dtype, requires_grad=True)
                for _ in range(2)
            )
            shape: dict[str, Any] = {"shape": [batch, heads, key_heads, length, size], "dtype": str(dtype)}
            grouped = key_heads != heads
            with torch.no_grad():
                chosen = torch._fused_sdp_choice(query, key, value, is_causal=True, enable_gqa=grouped)
            rows.append({**shape, "chosen": SDPBackend(chosen).name if chosen >= 0 else chosen})
            for kernel in kernels:
                row: dict[str, Any] = {**shape, "kernel": kernel.name}
                try:
                    with sdpa_kernel([kernel]):
                        row |= _one_attention(query, key, value, grouped=grouped)
                except RuntimeError as error:
                    row["refused"] = str(error).splitlines()[0][:200]
                    rows.append(row)
                    continue
                shapes = tuple(query.shape), tuple(key.shape), tuple(value.shape)
                element = query.element_size()
                assumed = (
                    gpu_memory.efficient_backward_bytes(*shapes, element)
                    if kernel is SDPBackend.EFFICIENT_ATTENTION
                    else gpu_memory.flash_backward_bytes(*shapes[:2], element)
                )
                rows.append({**row, "assumed_backward_mib": assumed / MIB})
    return rows


def _one_attention(query: Any, key: Any, value: Any, *, grouped: bool) -> dict[str, Any]:
    import torch
    import torch.nn.functional as F

    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    output = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=grouped)
    torch.cuda.synchronize()
    kept = torch.cuda.memory_allocated() - before - output.untyped_storage().nbytes()
    forward = torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()
    gradient = torch.ones_like(output)
    start = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    gradients = torch.autograd.grad(output, [query, key, value], gradient, retain_graph=True)
    torch.cuda.synchronize()
    made = sum(each.untyped_storage().nbytes() for each in gradients)
    scratch = torch.cuda.max_memory_allocated() - start - made
    return {"kept_mib": kept / MIB, "forward_scratch_mib": forward / MIB, "backward_scratch_mib": scratch / MIB}


def _embedding() -> dict[str, Any]:
    """MiB of an embedding's backward beside the gradient, of 8 192 and 65 536 tokens."""
    import torch

    found: dict[str, Any] = {}
    weight = torch.ones(50257, 768, device="cuda", requires_grad=True)
    for tokens in (8192, 65536):
        where = torch.randint(0, 50257, (tokens,), device="cuda")
        output = torch.nn.functional.embedding(where, weight)
        gradient = torch.ones_like(output)
        start = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        (made,) = torch.autograd.grad(output, [weight], gradient)
        torch.cuda.synchronize()
        extra = torch.cuda.max_memory_allocated() - start - made.untyped_storage().nbytes()
        found[f"{tokens}_tokens_mib"] = extra / MIB
        del made, output, gradient
    return found


_QUESTIONS: Final[dict[str, Callable[[], Any]]] = {
    "context": _context,
    "cublas_workspaces": _workspaces,
    "attention": _attention,
    "embedding_backward": _embedding,
}
