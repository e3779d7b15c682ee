"""The loss over the vocabulary, without the logits of a whole batch."""

from __future__ import annotations

from typing import Any, Final

from hf_memkit.setup.setup import Setup
from hf_memkit.setup.techniques.registry import InPlans, advice, technique

_CHUNK_BYTES: Final = 256 * 2**20  # assumed, as is the next
_MOST_TOKENS: Final = 1024


def chunk_tokens_for(vocabulary: int) -> int:
    """Tokens in a chunk: the largest power of two, at most 1024, whose fp32 logits take at most 256 MiB.

    Larger chunks make no matrix product faster; smaller ones add to the gradient of the output embedding more often.
    `hf_memkit/components/chunked_loss_sum.py` has the same rule, because it must work without this package.
    """
    fitting = max(1, _CHUNK_BYTES // (4 * max(1, vocabulary)))
    return min(_MOST_TOKENS, 1 << (fitting.bit_length() - 1))


@technique(
    "chunked-loss",
    saves="logits and loss of a causal language model are computed for one chunk of tokens at a time; their peak of "
    "12 bytes × tokens × vocabulary then counts one chunk, not the batch",
    costs="no logits in the training output, and one more product with the output embedding (none with Liger's kernel "
    "on a GPU)",
    not_when="something needs the logits in training (distillation, compute_loss_func), or a batch is one chunk",
    values={"chunk_tokens": int, "label_smoothing": float},
    bounds={"chunk_tokens": (1, None), "label_smoothing": (0, 1)},
    settings={"loss.chunked": True},
    offered={"logits": 2},
    unless=("liger", "chunked loss", "trl"),
    planned=InPlans("loss with code", "chunked loss", "the logits of a batch are never whole in memory"),
)
def chunked_loss(setup: Setup) -> Setup:
    """Fused or chunked linear cross-entropy for any causal language model (`hf_memkit/components/chunked_loss.py`).

    Values: `chunk_tokens` (default: `chunk_tokens_for` the vocabulary), `label_smoothing` (default 0), which
    replaces Trainer's label_smoothing_factor.
    """
    job = setup.resolved_for
    options: dict[str, Any] = {}
    reason = "the loss is summed over chunks of tokens, so that the logits of a batch never exist"
    if "chunk_tokens" in job.values:
        options["chunk_tokens"] = int(job.values["chunk_tokens"])
    elif job.model is not None:
        options["chunk_tokens"] = chunk_tokens_for(job.model.vocabulary)
        mib = 4 * options["chunk_tokens"] * job.model.vocabulary / 2**20
        reason += f"; {options['chunk_tokens']} tokens of {job.model.vocabulary} words are {mib:.0f} MiB in fp32"
    if job.values.get("label_smoothing"):
        options["label_smoothing"] = float(job.values["label_smoothing"])
        reason += "; smoothed here, because label_smoothing_factor would make Trainer ask for all logits"
    return setup.put("model_parts.chunked_loss", options, reason)


@technique(
    "liger",
    saves="Liger's fused loss computes the logits, tokens × vocabulary numbers, in chunks (Llama, Qwen, Gemma, "
    "Mistral and others, not GPT-2)",
    costs="rounding differences, and no logits in the training output; needs the package liger-kernel",
    not_when="Liger does not support the model type: it then silently has no effect (GPT-2: use chunked-loss); or "
    "with torch_compile, where it fails or its loss is wrong",
    proof="gpu",
    packages=("liger_kernel",),
    gpu_only="its kernels are written in Triton, which runs on GPUs only",
    settings={"arguments.use_liger_kernel": True},
    frees={"loss": 1.0},
    offered={"logits": 1, "larger than the GPU": 2, "one large tensor": 2},
    devices=("cuda", "rocm", "xpu"),
    # torch 2.13 compiles its fused loss in 16 bits to an error, or to a wrong loss (Liger-Kernel#1327, #1338).
    unless=("liger", "chunked loss", "label smoothing", "diffusers", "torch.compile"),
    planned=InPlans("loss", "Liger kernels (fused loss)"),
)
def liger(setup: Setup) -> Setup:
    """Liger's kernels for the whole model, through Trainer's own switch (Hsu et al. 2024, arXiv 2410.10989)."""
    return setup.put(
        "arguments.use_liger_kernel",
        True,
        "Liger's kernels: loss without logits, norms, rotary embeddings and feed-forwards with fewer temporaries",
    )


advice(
    "newer-trl", "loss", {"command": "pip install -U trl"},
    saves="SFTTrainer of trl 1.16 and later does not compute the logits of a whole batch at once",
    costs="you change the version of trl; its other trainers (DPO, GRPO) need use_liger_kernel instead",
    offered={"logits": 2}, only_with=("trl",), unless=("liger", "chunked loss"),
)  # fmt: skip
