"""Bytes that the layers' activations take, by how they are checkpointed. Pure arithmetic: neither torch nor a model.

Per token, in bytes, with the hidden size as unit (a: query width, r: key and value width, f: feed-forward width, each
over the hidden size; e: bytes of a number):

| what backward keeps of one layer | norms, plain feed-forward | RMSNorm, gated feed-forward |
|---|---|---|
| norms: inputs and outputs | 4e | 2 (4 + 2e): the input once more in fp32 |
| query, key, value, attention's output | (2a + 2r) e | (2a + 2r) e |
| feed-forward: before and after the activation function | 2f e | 4f e |
| a composed tanh-GELU's intermediates | 3f e | |
| masks of two dropouts | 2 | |

For GPT-2 in 16 bits without its composed GELU that is 34 bytes a token and hidden unit: the formula of Korthikanti et
al. 2022 (arXiv 2205.05198, eq. 2) without attention scores, which SDPA does not keep. Softmax statistics of attention
take 4 bytes a head and token besides. tests/techniques/test_technique_checkpointing_memory.py compares all of this
with the storages that live in real models.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final, Literal

from hf_memkit.models import ModelFacts

__all__ = ["Held", "Layer", "Mode", "Numbers", "best_segment", "held", "layer_of", "numbers_in", "root_segment"]

Mode = Literal["none", "every-layer", "every-nth-layer", "segments", "selective", "offloaded"]

Numbers = Literal["16-bit", "32-bit", "autocast"]
"""`autocast`: 16-bit arithmetic over fp32 weights, where the hidden states between layers are fp32."""

_COMPOSED: Final = {"gelu_new", "gelu_fast"}  # transformers:activations.py, from separate operators
_PLAIN_SAVES: Final = {"relu": 1}  # its backward needs the output only, which the next product keeps anyway


@dataclass(frozen=True, slots=True)
class Layer:
    """Bytes of one layer for one forward pass.

    Attributes:
        input: its input, which a checkpoint keeps.
        kept: all that its backward pass needs.
        selective: outputs of its matrix products but the last, and of attention: what selective checkpointing keeps
            besides the input.
        gradients: gradients that live together at the highest point of its backward pass.
    """

    input: int
    kept: int
    selective: int
    gradients: int


@dataclass(frozen=True, slots=True)
class Held:
    """Bytes at the highest point of the backward pass; `pinned` is in host memory, the rest on the card.

    Attributes:
        inputs: inputs of the layers or segments that are checkpointed.
        kept: what layers keep that are not recomputed, or not wholly.
        recomputed: what one recomputation brings back.
        gradients: as in `Layer`.
        pinned: inputs in page-locked host memory.
    """

    inputs: int
    kept: int
    recomputed: int
    gradients: int
    pinned: int = 0

    @property
    def device(self) -> int:
        return self.inputs + self.kept + self.recomputed + self.gradients


def numbers_in(dtype: str, *, mixed: bool) -> Numbers:
    """What activations are kept in, of a model with weights of this dtype, with autocast (`mixed`) or without."""
    if dtype in ("bfloat16", "float16"):
        return "16-bit"
    return "autocast" if mixed else "32-bit"


def layer_of(model: ModelFacts, tokens: int, numbers: Numbers = "16-bit", *, fused_gelu: bool = False) -> Layer:
    """One layer of `model` for a forward pass of `tokens` tokens.

    Args:
        model: its config and linear layers; what they do not say is taken as in GPT-2 (feed-forward of 4 × width).
        tokens: sequences × length.
        numbers: which numbers activations are kept in.
        fused_gelu: a composed GELU was replaced by the fused one.
    """
    config, width = model.config, model.width
    heads = _first(config, "num_attention_heads", "n_head", default=max(1, width // 64))
    head_width = config.get("head_dim") or width // heads
    query = heads * head_width / width
    key = _first(config, "num_key_value_heads", default=heads) * head_width / width
    inner = _first(config, "intermediate_size", "n_inner", "ffn_dim", default=4 * width) / width
    function = _first(config, "activation_function", "hidden_act", default="gelu_new" if _is_gpt2(model) else "gelu")
    gated = any("gate" in linear.name.rpartition(".")[2] for linear in model.linears) or function == "silu"
    e = 4 if numbers == "32-bit" else 2
    autocast = numbers == "autocast"
    attention = (2 * query + 2 * key) * e
    products = (2 * query + 2 * key + 1) * e
    if gated:
        kept = 2 * (4 + 2 * e) + attention + 4 * inner * e
        if model.model_type.startswith("qwen3"):
            kept += (4 + e) * (query + key)  # norms of queries and keys
        kept += 10 * autocast  # measured: norms and rotated keys once more in fp32
        selective = products + 2 * inner * e
        gradients = (2 * inner - 1) * e
    else:
        saves = _PLAIN_SAVES.get(function, 2)
        composed = function in _COMPOSED and not fused_gelu
        kept = 4 * e + attention + saves * inner * e + 3 * inner * e * composed
        kept += 4 * autocast  # inputs of both norms are fp32
        kept += 2 * bool(_first(config, "resid_pdrop", "dropout", "hidden_dropout", default=0.0))
        selective = products + inner * e
        gradients = (2 if composed else 1) * inner * e
    statistics = 4 * heads * tokens
    unit = tokens * width
    return Layer(
        input=(4 if autocast else e) * unit,
        kept=round(kept * unit) + statistics,
        selective=round(selective * unit) + statistics,
        gradients=round(gradients * unit),
    )


def held(mode: Mode, layer: Layer, layers: int, every: int = 1) -> Held:
    """Bytes of `layers` layers, checkpointed in this way.

    Args:
        mode: how; `segments` of `every` layers, or one of `every` layers checkpointed.
        layer: one of them.
        layers: how many.
        every: layers in a segment, or from one checkpointed layer to the next.
    """
    if mode == "none":
        return Held(0, layers * layer.kept, 0, layer.gradients)
    if mode == "every-nth-layer":
        inputs = -(-layers // every)
        # Layers 0, n, 2n … are checkpointed. If the last layer is one of them, it is recomputed while all others still
        # hold what they kept; otherwise the highest point is before any recomputation.
        again = layer.kept if (layers - 1) % every == 0 else 0
        return Held(inputs * layer.input, (layers - inputs) * layer.kept, again, layer.gradients)
    if mode == "segments":
        whole, rest = divmod(layers, every)
        ends = [(whole, min(every, layers))] if whole else []
        if rest:
            ends.append((whole + 1, rest))
        inputs, again = max(ends, key=lambda end: end[0] * layer.input + end[1] * layer.kept)
        return Held(inputs * layer.input, 0, again * layer.kept, layer.gradients)
    if mode == "selective":
        rest = max(0, layer.kept - layer.selective)
        return Held(layers * layer.input, layers * layer.selective, rest, layer.gradients)
    if mode == "offloaded":
        # PyTorch's pinned allocator rounds each block up to a power of two (torch:aten/src/ATen/core/
        # CachingHostAllocator.h). One input is on the card at a time.
        pinned = layers * (1 << (layer.input - 1).bit_length())
        return Held(layer.input, 0, layer.kept, layer.gradients, pinned)
    return Held(layers * layer.input, 0, layer.kept, layer.gradients)


def best_segment(layer: Layer, layers: int) -> int:
    """Layers in a segment for which the fewest bytes are held; 1 if no segment is better than single layers."""
    return min(range(1, layers + 1), key=lambda length: held("segments", layer, layers, length).device)


def root_segment(layers: int) -> int:
    """√n, rounded: the length that Chen et al. 2016 (arXiv 1604.06174, section 4.1) take, for layers that keep no more
    than their input."""
    return max(1, round(math.sqrt(layers)))


def _first(config: Any, *names: str, default: Any) -> Any:
    return next((config[name] for name in names if config.get(name) is not None), default)


def _is_gpt2(model: ModelFacts) -> bool:
    return model.model_type == "gpt2"
