"""Bytes of the loss over the vocabulary, by how it is computed. No torch: plain arithmetic for the ledger."""

from __future__ import annotations

from typing import Final

from hf_memkit.job import Job
from hf_memkit.training_setup import TrainingSetup

__all__ = [
    "PEAK_BYTES",
    "chunk_tokens_for",
    "chunked_loss_bytes",
    "full_loss_bytes",
    "liger_loss_bytes",
    "loss_bytes",
    "sft_loss_bytes",
]

PEAK_BYTES: Final = 12
"""Bytes of one logit at the highest point of the backward pass, whatever the model's dtype: the fp32 log-probabilities
that log_softmax kept, the fp32 gradient that nll_loss gives them, and the fp32 gradient that becomes of it
(transformers:loss/loss_utils.py makes the logits fp32; torch:aten/src/ATen/native/SoftMax.cpp). Measured on a CPU
by tests/techniques/test_technique_loss_memory.py. In forward it is 10: 16-bit logits, their fp32 copy, the
log-probabilities."""

_CHUNK_BYTES: Final = 256 * 2**20
_MOST_TOKENS: Final = 1024


def chunk_tokens_for(vocabulary: int) -> int:
    """Tokens in a chunk: the largest power of two, at most 1024, whose fp32 logits take at most 256 MiB.

    Larger chunks make no matrix product faster; smaller ones add to the gradient of the output embedding more often.
    The part has the same rule (`hf_memkit/components/chunked_loss.py`), for those who install it by itself.
    """
    fitting = max(1, _CHUNK_BYTES // (4 * max(1, vocabulary)))
    return min(_MOST_TOKENS, 1 << (fitting.bit_length() - 1))


def full_loss_bytes(tokens: int, vocabulary: int) -> int:
    """The loss over all logits of one micro-batch, at its peak."""
    return PEAK_BYTES * tokens * vocabulary


def chunked_loss_bytes(
    tokens: int, vocabulary: int, width: int, *, weight_bytes: int, chunk_tokens: int | None = None
) -> int:
    """The loss in checkpointed chunks, at its peak: one chunk, and the output embedding's gradient summed over chunks.

    Independent of `tokens` as soon as there is more than one chunk.
    """
    chunk = min(tokens, chunk_tokens or chunk_tokens_for(vocabulary))
    return PEAK_BYTES * chunk * vocabulary + weight_bytes * vocabulary * width


def liger_loss_bytes(tokens: int, vocabulary: int, width: int, *, weight_bytes: int) -> int:
    """Liger's kernel: one chunk's logits, overwritten by their gradients, and the gradients of both its inputs.

    Its chunk has the next power of two of tokens × width / vocabulary tokens, about as many logits as there are
    hidden states (liger_kernel 0.8.5: ops/fused_linear_cross_entropy.py 102-107). Not measured: it needs a card.
    """
    chunk = min(tokens, _next_power_of_two(-(-tokens // -(-vocabulary // width))))
    return weight_bytes * (chunk * vocabulary + tokens * width + vocabulary * width)


def sft_loss_bytes(
    tokens: int, vocabulary: int, width: int, *, weight_bytes: int, compute_bytes: int, head_is_trained: bool
) -> int:
    """TRL's SFTTrainer on a card, in backward: one tile of logits, the inputs of the scored tokens and their fp32
    gradient, and the head's fp32 gradient beside its copy in the weights' dtype.

    A tile has at most 4096 tokens × 32768 words. All tokens are taken for scored; those without a label are not
    (trl 1.16.0: kernels/chunked_logprob.py, trainer/utils.py 1506 and 1645).
    """
    tile = min(tokens, _SFT_TILE_TOKENS) * _SFT_TILE_WORDS * compute_bytes
    copy = weight_bytes if weight_bytes < 4 else 0
    head = (4 + copy) * vocabulary * width if head_is_trained else 0
    return tile + (compute_bytes + 4) * tokens * width + head


_SFT_TILE_TOKENS: Final = 4096
_SFT_TILE_WORDS: Final = 32768


def loss_bytes(setup: TrainingSetup, job: Job) -> tuple[int, str, str]:
    """(bytes, what they are, formula) of the loss that `setup` computes, at its peak. Zero if no model is known."""
    model = job.model
    if model is None:
        return 0, "no model is known", "none"
    weight = 2 if setup.get("model.dtype", "float32") in ("bfloat16", "float16") else 4
    if setup.get("trainer.class") == "trl:SFTTrainer":
        half = weight == 2 or setup.get("arguments.bf16") is True or setup.get("arguments.fp16") is True
        size = sft_loss_bytes(
            job.tokens, model.vocabulary, model.width, weight_bytes=weight, compute_bytes=2 if half else 4,
            head_is_trained=not setup.section("adapter"),
        )  # fmt: skip
        return size, "SFTTrainer's tile of logits, gradients of its inputs", "trl 1.16.0: kernels/chunked_logprob.py"
    options = setup.get("model_parts.chunked_loss")
    if options is not None:
        chunk = options.get("chunk_tokens") or chunk_tokens_for(model.vocabulary)
        return (
            chunked_loss_bytes(job.tokens, model.vocabulary, model.width, weight_bytes=weight, chunk_tokens=chunk),
            f"logits of {min(chunk, job.tokens)} tokens, gradient of the output embedding",
            f"12 bytes × {min(chunk, job.tokens)} tokens × vocabulary + {weight} bytes × vocabulary × width, measured "
            f"on a CPU",
        )
    if setup.get("arguments.use_liger_kernel") is True:
        return (
            liger_loss_bytes(job.tokens, model.vocabulary, model.width, weight_bytes=weight),
            "Liger's chunk of logits, gradients of its inputs",
            "liger_kernel 0.8.5: ops/fused_linear_cross_entropy.py 102-130",
        )
    return (
        full_loss_bytes(job.tokens, model.vocabulary),
        "logits: fp32 log-probabilities and two gradients",
        "12 bytes × tokens × vocabulary, measured on a CPU (transformers:loss/loss_utils.py, logits.float())",
    )


def _next_power_of_two(value: int) -> int:
    return 1 << (value - 1).bit_length()
