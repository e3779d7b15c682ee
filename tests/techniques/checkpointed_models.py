"""Small models of several layers, and what one forward and backward pass of them holds and gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from hf_memkit.components import checkpoint_offload, checkpoint_selective
from tests.measuring.memory.live_storages import LiveStorages

LAYERS, WIDTH, LENGTH, ROWS = 6, 64, 96, 2

SHAPES: dict[str, dict[str, Any]] = {
    "gpt2": {"model_type": "gpt2", "n_layer": LAYERS, "n_embd": WIDTH, "n_head": 2, "n_positions": LENGTH},
    "llama": {
        "model_type": "llama", "num_hidden_layers": LAYERS, "hidden_size": WIDTH, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 3 * WIDTH, "max_position_embeddings": LENGTH,
    },
    "qwen3": {
        "model_type": "qwen3", "num_hidden_layers": LAYERS, "hidden_size": WIDTH, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 3 * WIDTH, "max_position_embeddings": LENGTH,
    },
}  # fmt: skip

WAYS: dict[str, Callable[[Any], Callable[[], None]]] = {
    "none": lambda model: lambda: None,
    "activation-checkpointing": lambda model: _switch(model, 1),
    "every-nth-layer-checkpointing": lambda model: _switch(model, 2),
    "selective-checkpointing": checkpoint_selective.install,
    "offloaded-checkpointing": lambda model: checkpoint_offload.install(model, pin_memory=False),
}
"""Technique → what it does to a model; the result takes it back."""


def _switch(model: Any, every: int) -> Callable[[], None]:
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False}, every_n_layers=every)
    disable = getattr(model, "activation_checkpointing_disable", None) or model.gradient_checkpointing_disable
    return lambda: disable()


def config_of(kind: str, dropout: float = 0.0, **changes: Any) -> dict[str, Any]:
    drop = {"resid_pdrop": dropout, "embd_pdrop": dropout, "attn_pdrop": dropout} if kind == "gpt2" else {}
    tokens = {"vocab_size": 64, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    return {**SHAPES[kind], **tokens, **drop, **changes}


def model_of(kind: str, dropout: float = 0.0, *, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    torch.manual_seed(0)
    config = config_of(kind, dropout, **changes)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(config.pop("model_type"), **config)).to(dtype).train()


def with_lora(model: Any) -> Any:
    torch.manual_seed(3)
    return get_peft_model(model, LoraConfig(r=4, lora_dropout=0.1, target_modules="all-linear")).train()


class Pass(NamedTuple):
    """Hidden states and gradients of a pass; bytes held between forward and backward, and at the highest point."""

    hidden: Tensor
    gradients: dict[str, Tensor]
    held: int
    peak: int


def one_pass(model: Any, *, measure: bool = False) -> Pass:
    """A pass through the layers, without logits and loss, from a fixed seed. Gradients' buffers are not counted."""
    base: nn.Module = model.get_base_model() if hasattr(model, "get_base_model") else model
    trunk = getattr(base, "model", None) or base.transformer
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    torch.manual_seed(5)
    tokens = torch.randint(0, 64, (ROWS, LENGTH))
    live = LiveStorages()
    with live if measure else torch.enable_grad():
        for tensor in (*model.parameters(), *model.buffers(), tokens):
            live.track(tensor)
            if tensor.grad is not None:
                live.track(tensor.grad)
        before = live.allocated
        hidden = trunk(tokens, use_cache=False)[0]
        held = live.allocated - before
        live.reset_peak()
        (hidden * torch.linspace(-1, 1, WIDTH).to(hidden.dtype)).sum().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return Pass(hidden.detach().clone(), gradients, held, live.high - before)
