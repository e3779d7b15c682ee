"""Bytes of attention scores that eager attention keeps for backward. No torch: plain arithmetic for the ledger."""

from __future__ import annotations

from hf_memkit.job import Job
from hf_memkit.models import ModelFacts
from hf_memkit.training_setup import TrainingSetup

__all__ = ["attention_dropout", "attention_heads", "eager_bytes_of_score", "kept_scores_bytes", "score_bytes"]

_SOFTMAX_IN_OWN_DTYPE = frozenset({"gpt2", "gpt_neo", "gptj", "codegen", "opt", "bloom", "gpt_bigcode"})
"""Model types whose eager attention takes the softmax in the dtype of the scores; the others, Llama first, take it in
fp32 and keep that too (transformers:models/llama/modeling_llama.py, eager_attention_forward)."""


def eager_bytes_of_score(dtype_bytes: int, *, softmax_fp32: bool, dropout: bool) -> int:
    """Bytes that eager attention keeps of one score: after softmax, after the cast and after dropout, with its mask.

    `dropout` adds the dropped scores and a mask of one byte, as on a card; a CPU keeps the mask in the scores' dtype.
    """
    kept = 4 + dtype_bytes if softmax_fp32 and dtype_bytes == 2 else dtype_bytes
    return kept + (dtype_bytes + 1 if dropout else 0)


def score_bytes(micro_batch: int, heads: int, sequence_length: int, layers: int, *, bytes_of_score: int) -> int:
    """Bytes of the scores of `layers` layers: they grow with the square of the sequence length."""
    return bytes_of_score * micro_batch * heads * sequence_length**2 * layers


def attention_heads(model: ModelFacts) -> int | None:
    """Attention heads of each layer, under whichever name this architecture has them; None if under none known."""
    for name in ("num_attention_heads", "n_head", "num_heads"):
        value = model.config.get(name)
        if isinstance(value, int):
            return value
    return None


def attention_dropout(model: ModelFacts) -> float:
    """Dropout on attention scores, under whichever name this architecture has it."""
    for name in ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob"):
        value = model.config.get(name)
        if isinstance(value, int | float):
            return float(value)
    return 0.1 if model.model_type == "gpt2" else 0.0  # transformers' defaults, where the config says nothing


def kept_scores_bytes(setup: TrainingSetup, job: Job) -> int:
    """What the setup's attention keeps of scores in all layers: nothing unless it is eager.

    With every layer checkpointed only one layer's scores are there at a time: divide by the number of layers.
    """
    model = job.model
    heads = attention_heads(model) if model is not None else None
    if model is None or heads is None or setup.get("model.attn_implementation") != "eager":
        return 0
    mixed = setup.get("arguments.bf16") is True or setup.get("arguments.fp16") is True
    half = mixed or setup.get("model.dtype", "float32") in ("bfloat16", "float16")
    each = eager_bytes_of_score(
        2 if half else 4,
        softmax_fp32=mixed or model.model_type not in _SOFTMAX_IN_OWN_DTYPE,
        dropout=attention_dropout(model) > 0,
    )
    return score_bytes(job.micro_batch_size, heads, job.sequence_length, model.layers, bytes_of_score=each)
