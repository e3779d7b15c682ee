"""Causal language models of a few thousand parameters, each with what is special about its output embedding."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

VOCABULARY = 97
_SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_GPT2 = {
    "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}  # fmt: skip
_LLAMA = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
_SHAPES: dict[str, dict[str, Any]] = {
    "gpt2": _GPT2,  # tied to the word embedding
    "llama": _LLAMA,
    "gemma2": {**_LLAMA, "head_dim": 8, "final_logit_softcapping": 0.05},
    "cohere": {**_LLAMA, "logit_scale": 0.25},
    "granite": {**_LLAMA, "logits_scaling": 3.0},
    "phi": {**_LLAMA, "num_key_value_heads": 4, "attention_dropout": 0.0, "resid_pdrop": 0.0},  # a bias
    "mixtral": {**_LLAMA, "num_local_experts": 2, "output_router_logits": True},  # a second loss beside the first
}


def causal_model(model_type: str = "gpt2", *, seed: int = 0, **changes: Any) -> Any:
    torch.manual_seed(seed)
    config = AutoConfig.for_model(
        model_type, **{"vocab_size": VOCABULARY, **_SPECIAL, **_SHAPES[model_type], **changes}
    )
    return AutoModelForCausalLM.from_config(config).train()


def batch(rows: int = 3, length: int = 17, *, ignored: bool = True, vocabulary: int = VOCABULARY) -> dict[str, Any]:
    """Tokens and labels; some labels are ignored, so that lengths differ."""
    tokens = torch.randint(3, vocabulary, (rows, length), generator=torch.Generator().manual_seed(1))
    labels = tokens.clone()
    if ignored:
        labels[0, : length // 3] = -100
        labels[-1, length // 2 :] = -100
    return {"input_ids": tokens, "labels": labels}


@contextmanager
def summed_in_fp64() -> Iterator[None]:
    """A model's own loss without the rounding of its sum.

    That sum is about 200 here: in fp32, AVX-512 kernels of torch 2.13 put the loss 1.3e-6 beside the exact one.
    """
    own = torch.nn.functional.cross_entropy

    def exact(logits: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
        return own(logits.double(), *arguments, **options)

    torch.nn.functional.cross_entropy = exact
    try:
        yield
    finally:
        torch.nn.functional.cross_entropy = own


def part(module: Any, model: Any = None, **options: Any) -> dict[str, Any]:
    """What a part gives Trainer."""
    made: dict[str, Any] = module.trainer_options(
        model=model if model is not None else causal_model(),
        processing_class=None,
        arguments=SimpleNamespace(use_cache=False),
        **options,
    )
    return made
