"""Sums the losses of many tokens chunk by chunk with the fastest engine available (used by `chunked_loss.py`).

A chunk is computed by
- Liger's kernel (Hsu et al. 2024, arXiv 2410.10989) on a CUDA GPU, if liger-kernel is installed;
- `torch.nn.functional.linear_cross_entropy` in fp32, on a torch that has it (2.13). In 16 bits it returns a 16-bit
  loss, three digits of a sum over thousands of tokens (torch:torch/nn/modules/linear_cross_entropy.py, `output`);
- otherwise a checkpointed call (Chen et al. 2016, arXiv 1604.06174) of the output embedding itself, which also suits
  an output embedding that is quantised, has an adapter, or is gathered by DeepSpeed.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hf_memkit.components.chunked_loss_logits import Step, vocabulary_of

ENGINES = ("auto", "liger", "torch", "loop")

_CHUNK_BYTES = 256 * 2**20  # assumed, as is the next
_MOST_TOKENS = 1024


def chunk_tokens_for(vocabulary: int) -> int:
    """Tokens in a chunk: the largest power of two, at most 1024, whose fp32 logits take at most 256 MiB. Larger chunks
    make no matrix product faster; smaller ones add to the gradient of the output embedding more often."""
    fitting = max(1, _CHUNK_BYTES // (4 * vocabulary))
    return int(min(_MOST_TOKENS, 1 << (fitting.bit_length() - 1)))


class ChunkedSum:
    """Sum of the cross-entropies of the logits that an output embedding would make.

    Attributes:
        head: the output embedding.
        head_forward: its own forward.
        chunk: tokens in a chunk; None: `chunk_tokens_for`.
        smoothing: label smoothing.
        engine: "auto", or one of `ENGINES`.
        work: function that the next call of the output embedding runs instead of its forward.
    """

    def __init__(self, head: Any, chunk: int | None, smoothing: float, engine: str) -> None:
        self.head = head
        self.chunk = chunk
        self.smoothing = smoothing
        self.engine = engine
        self.head_forward: Callable[..., Any] = head.forward
        self.work: Callable[[Tensor], Tensor] | None = None

    def __call__(self, hidden: Tensor, targets: Tensor, steps: tuple[Step, ...], ignore_index: int) -> Tensor:
        """The sum in fp32 for `hidden` [tokens, width] and `targets` [tokens], with `steps` applied to the logits."""
        engine = self.engine_for(hidden, steps)
        if engine == "liger":
            fused: Tensor = _liger_sum(self.head, hidden, targets, ignore_index, self.smoothing)
            return fused
        chunk = self.chunk or chunk_tokens_for(vocabulary_of(self.head))
        if engine == "torch":
            options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=min(chunk, len(hidden)))
            value: Tensor = torch.nn.functional.linear_cross_entropy(
                hidden, self.head.weight, targets, linear_bias=getattr(self.head, "bias", None),
                reduction="sum", ignore_index=ignore_index, options=options,
            )  # fmt: skip
            return value
        if hasattr(self.head, "set_reshard_after_forward"):
            # FSDP2, whose hooks of a second call would free the weight in backward before the norm in its group has
            # used its own. accelerate keeps this group gathered from the first call on (utils/fsdp_utils.py, `tail`).
            return self._loop(hidden, targets=targets, steps=steps, ignore_index=ignore_index, chunk=chunk)
        # One call of the output embedding, with the loop inside, so that its hooks run once: DeepSpeed's stage 3
        # gathers the weight in them, equally often in all ranks, whose batches have different numbers of chunks.
        self.work = functools.partial(self._loop, targets=targets, steps=steps, ignore_index=ignore_index, chunk=chunk)
        try:
            total: Tensor = self.head(hidden)
        finally:
            self.work = None
        return total

    def _loop(
        self, hidden: Tensor, *, targets: Tensor, steps: tuple[Step, ...], ignore_index: int, chunk: int
    ) -> Tensor:
        def chunk_sum(part: Tensor, part_targets: Tensor) -> Tensor:
            logits = self.head_forward(part)
            for step in steps:
                logits = step(logits)
            return nn.functional.cross_entropy(
                logits.float(), part_targets, ignore_index=ignore_index, reduction="sum",
                label_smoothing=self.smoothing,
            )  # fmt: skip

        needed = torch.is_grad_enabled()
        # Recomputation must repeat the dropout of an adapter on the output embedding.
        random = type(self.head) is not nn.Linear
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        for part, part_targets in zip(torch.split(hidden, chunk), torch.split(targets, chunk), strict=True):
            if needed:
                total = total + checkpoint(
                    chunk_sum, part, part_targets, use_reentrant=False, preserve_rng_state=random
                )
            else:
                total = total + chunk_sum(part, part_targets)
        return total

    def engine_for(self, hidden: Tensor, steps: tuple[Step, ...]) -> str:
        """The requested engine, or the fastest that can handle these hidden states."""
        if self.engine == "loop":
            return "loop"
        reason = self._why_not_plain(hidden, steps)
        if not reason and self.engine in ("auto", "liger"):
            reason = _why_not_liger(hidden)
            if not reason:
                return "liger"
        if self.engine in ("auto", "torch"):
            reason = self._why_not_plain(hidden, steps) or self._why_not_torch(hidden)
            if not reason:
                return "torch"
        if self.engine != "auto":
            raise ValueError(f"chunked_loss: engine={self.engine!r}: {reason}. Write engine='auto'")
        return "loop"

    def _why_not_plain(self, hidden: Tensor, steps: tuple[Step, ...]) -> str:
        """Why the weight of the output embedding cannot be used without its forward; empty if it can."""
        head: Any = self.head
        if steps:
            return "the model scales or caps its logits"
        if type(head) is not nn.Linear:
            return f"the output embedding is a {type(head).__name__}, not an nn.Linear"
        # DeepSpeed's stage 3 gathers a weight in hooks of its module; other hooks expect that the module is called.
        if head._forward_hooks or head._forward_pre_hooks or head._backward_hooks or head._backward_pre_hooks:
            return "the output embedding has hooks, which would not run"
        if head.weight.dim() != 2 or head.weight.shape[1] != hidden.shape[1]:
            return f"the output embedding has a weight of shape {tuple(head.weight.shape)}, not (…, {hidden.shape[1]})"
        return ""

    def _why_not_torch(self, hidden: Tensor) -> str:
        if not hasattr(torch.nn.functional, "linear_cross_entropy"):
            return f"torch {torch.__version__} has no linear_cross_entropy"
        if self.smoothing:
            return "linear_cross_entropy makes all logits if label_smoothing is set"
        if hidden.dtype != torch.float32 or self.head.weight.dtype != torch.float32:
            return "linear_cross_entropy returns a 16-bit loss"
        if torch.is_autocast_enabled(hidden.device.type):
            return "linear_cross_entropy ignores autocast"
        return ""


# torch 2.13 compiles it to a wrong loss if labels are ignored, and to an error in 16 bits (Liger-Kernel#1338, #1327).
@torch.compiler.disable  # type: ignore[untyped-decorator]
def _liger_sum(head: Any, hidden: Tensor, targets: Tensor, ignore_index: int, smoothing: float) -> Tensor:
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    # "sum", divided afterwards: Liger computes the gradients in forward, before a loss scale is applied, and
    # gradients of a mean over thousands of tokens underflow in fp16.
    liger = LigerFusedLinearCrossEntropyLoss(ignore_index=ignore_index, label_smoothing=smoothing, reduction="sum")
    fused: Tensor = liger(head.weight, hidden, targets, getattr(head, "bias", None))
    return fused


def _why_not_liger(hidden: Tensor) -> str:
    if not hidden.is_cuda:
        return "Liger's kernel needs a CUDA GPU"
    missing = [name for name in ("liger_kernel", "triton") if importlib.util.find_spec(name) is None]
    return f"not installed: {', '.join(missing)}" if missing else ""
