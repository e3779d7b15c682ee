"""Bytes that grow with the batch, by formula: layers' activations, attention scores, the loss, a generation's cache.

For a causal language model they are the first guess of a search and what `--no-trace` shows; of other models a trace
tells. Arithmetic: no torch and no model.

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
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from hf_memkit.ledger import Row
from hf_memkit.models import ModelFacts
from hf_memkit.setup import Setup

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
class BackwardBytes:
    """Bytes at the highest point of the backward pass; `pinned` is in host memory, the rest on the GPU.

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
    function = _first(
        config, "activation_function", "hidden_act", default="gelu_new" if model.model_type == "gpt2" else "gelu"
    )
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


def backward_bytes(mode: Mode, layer: Layer, layers: int, every: int = 1) -> BackwardBytes:
    """Bytes of `layers` layers, checkpointed in this way.

    Args:
        mode: how; `segments` of `every` layers, or one of `every` layers checkpointed.
        layer: one of them.
        layers: how many.
        every: layers in a segment, or from one checkpointed layer to the next.
    """
    if mode == "none":
        return BackwardBytes(0, layers * layer.kept, 0, layer.gradients)
    if mode == "every-nth-layer":
        inputs = -(-layers // every)
        # Layers 0, n, 2n … are checkpointed. If the last layer is one of them, it is recomputed while all others still
        # hold what they kept; otherwise the highest point is before any recomputation.
        again = layer.kept if (layers - 1) % every == 0 else 0
        return BackwardBytes(inputs * layer.input, (layers - inputs) * layer.kept, again, layer.gradients)
    if mode == "segments":
        whole, rest = divmod(layers, every)
        ends = [(whole, min(every, layers))] if whole else []
        if rest:
            ends.append((whole + 1, rest))
        inputs, again = max(ends, key=lambda end: end[0] * layer.input + end[1] * layer.kept)
        return BackwardBytes(inputs * layer.input, 0, again * layer.kept, layer.gradients)
    if mode == "selective":
        rest = max(0, layer.kept - layer.selective)
        return BackwardBytes(layers * layer.input, layers * layer.selective, rest, layer.gradients)
    if mode == "offloaded":
        # PyTorch's pinned allocator rounds each block up to a power of two (torch:aten/src/ATen/core/
        # CachingHostAllocator.h). One input is on the GPU at a time.
        pinned = layers * (1 << (layer.input - 1).bit_length())
        return BackwardBytes(layer.input, 0, layer.kept, layer.gradients, pinned)
    return BackwardBytes(layers * layer.input, 0, layer.kept, layer.gradients)


def best_segment(layer: Layer, layers: int) -> int:
    """Layers in a segment for which the fewest bytes are held; 1 if no segment is better than single layers."""
    return min(range(1, layers + 1), key=lambda length: backward_bytes("segments", layer, layers, length).device)


def root_segment(layers: int) -> int:
    """√n, rounded: the length that Chen et al. 2016 (arXiv 1604.06174, section 4.1) take, for layers that keep no more
    than their input."""
    return max(1, round(math.sqrt(layers)))


def checkpoint_mode(setup: Setup) -> tuple[Mode, int]:
    """How the setup checkpoints, and every how many layers: as `backward_bytes` takes them."""
    parts = setup.section("model_parts")
    if "checkpoint_segments" in parts:
        length = int(parts["checkpoint_segments"]["segment_layers"])
        return ("segments", length) if length > 1 else ("every-layer", 1)
    if "checkpoint_selective" in parts:
        return "selective", 1
    if "checkpoint_offload" in parts:
        return "offloaded", 1
    if setup.get("arguments.activation_checkpointing") is not True:
        return "none", 1
    options = setup.get("arguments.activation_checkpointing_kwargs") or {}
    if options.get("offload"):
        return "offloaded", 1
    every = int(options.get("every_n_layers", 1))
    return ("every-nth-layer", every) if every > 1 else ("every-layer", 1)


def _mixed(setup: Setup) -> bool:
    return setup.get("arguments.bf16") is True or setup.get("arguments.fp16") is True


def numbers_of(setup: Setup) -> Numbers:
    """Which numbers the activations are kept in."""
    return numbers_in(str(setup.get("model.dtype", "float32")), mixed=_mixed(setup))


_FORMULA = "formulas of hf_memkit/techniques/activation_bytes.py (Korthikanti et al. 2022, arXiv 2205.05198)"
_CHEN = "Chen et al. 2016, arXiv 1604.06174"


def rows(setup: Setup, model: ModelFacts) -> tuple[Row, ...]:
    """Activations as they are checkpointed, attention scores if they are kept, and the loss."""
    found = list(activation_rows(setup, model))
    if scores := kept_scores_bytes(setup, model):
        one_at_a_time = checkpoint_mode(setup)[0] in ("every-layer", "offloaded")
        size = scores // model.layers if one_at_a_time else scores
        source = "micro-batch × heads × length² a layer (hf_memkit/techniques/activation_bytes.py)"
        found.append(Row("device", "activations", "attention scores of eager attention", size, source, "backward"))
    size, term, source = loss_bytes(setup, model)
    return (*found, Row("device", "loss", term, size, source, "backward"))


def activation_rows(setup: Setup, model: ModelFacts) -> tuple[Row, ...]:
    """What the layers hold at the highest point of the backward pass."""
    job = setup.resolved_for
    mode, every = checkpoint_mode(setup)
    layer = layer_of(model, job.tokens, numbers_of(setup), fused_gelu="model_parts.fused_gelu" in setup)
    held = backward_bytes(mode, layer, model.layers, every)
    inputs = {
        "segments": f"inputs of the segments of {every} layers",
        "offloaded": "the one input that is on the GPU",
    }.get(mode, "inputs of the checkpointed layers")
    kept = {
        "none": "all layers",
        "selective": "matrix products and attention of all layers",
    }.get(mode, "layers that are not checkpointed")
    again = {
        "segments": f"{every} layers recomputed together",
        "selective": "the rest of one layer, recomputed",
    }.get(mode, "one layer recomputed")
    source = f"{_CHEN}; rounded up to powers of two (torch:aten/src/ATen/core/CachingHostAllocator.h)"
    found = (
        Row("device", "activations", inputs, held.inputs, f"tokens × width × bytes of a number, each ({_CHEN})"),
        Row("device", "activations", kept, held.kept, _FORMULA),
        Row("device", "activations", again, held.recomputed, _FORMULA),
        Row("device", "activations", "gradients inside a layer", held.gradients, _FORMULA),
        Row("pinned", "activations", "inputs of the checkpointed layers", held.pinned * job.gpus, source),
    )
    return tuple(replace(row, phase="backward") for row in found if row.size_bytes)


_SOFTMAX_IN_OWN_DTYPE = frozenset({"gpt2", "gpt_neo", "gptj", "codegen", "opt", "bloom", "gpt_bigcode"})
"""Model types whose eager attention takes the softmax in the dtype of the scores; the others, Llama first, take it in
fp32 and keep that too (transformers:models/llama/modeling_llama.py, eager_attention_forward)."""


def eager_bytes_of_score(dtype_bytes: int, *, softmax_fp32: bool, dropout: bool) -> int:
    """Bytes that eager attention keeps of one score: after softmax, after the cast and after dropout, with its mask.

    `dropout` adds the dropped scores and a mask of one byte, as on a GPU; a CPU keeps the mask in the scores' dtype.
    """
    kept = 4 + dtype_bytes if softmax_fp32 and dtype_bytes == 2 else dtype_bytes
    return kept + (dtype_bytes + 1 if dropout else 0)


def score_bytes(micro_batch: int, heads: int, sequence_length: int, layers: int, *, bytes_of_score: int) -> int:
    """Bytes of the scores of `layers` layers: they grow with the square of the sequence length."""
    return bytes_of_score * micro_batch * heads * sequence_length**2 * layers


def attention_heads(model: ModelFacts) -> int | None:
    """Attention heads of each layer, under whichever name this architecture has them; None if under none known."""
    heads = _first(model.config, "num_attention_heads", "n_head", "num_heads", default=None)
    return heads if isinstance(heads, int) else None


def attention_dropout(model: ModelFacts) -> float:
    """Dropout on attention scores, under whichever name this architecture has it."""
    default = 0.1 if model.model_type == "gpt2" else 0.0  # transformers' defaults, where the config says nothing
    names = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob")
    return float(_first(model.config, *names, default=default))


def kept_scores_bytes(setup: Setup, model: ModelFacts) -> int:
    """What the setup's attention keeps of scores in all layers: nothing unless it is eager.

    With every layer checkpointed only one layer's scores are there at a time: divide by the number of layers.
    """
    job = setup.resolved_for
    heads = attention_heads(model)
    if heads is None or setup.get("model.attn_implementation") != "eager":
        return 0
    each = eager_bytes_of_score(
        4 if numbers_of(setup) == "32-bit" else 2,
        softmax_fp32=_mixed(setup) or model.model_type not in _SOFTMAX_IN_OWN_DTYPE,
        dropout=attention_dropout(model) > 0,
    )
    return score_bytes(job.micro_batch_size, heads, job.sequence_length, model.layers, bytes_of_score=each)


PEAK_BYTES: Final = 12
"""Bytes of one logit at the highest point of the backward pass, whatever the model's dtype: the fp32 log-probabilities
that log_softmax kept, the fp32 gradient that nll_loss gives them, and the fp32 gradient that becomes of it
(transformers:loss/loss_utils.py makes the logits fp32; torch:aten/src/ATen/native/SoftMax.cpp). Measured on a CPU
by tests/techniques/test_technique_loss_memory.py. In forward it is 10: 16-bit logits, their fp32 copy, the
log-probabilities."""

_CHUNK_BYTES: Final = 256 * 2**20
_MOST_TOKENS: Final = 1024
_SFT_TILE_TOKENS: Final = 4096
_SFT_TILE_WORDS: Final = 32768


def chunk_tokens_for(vocabulary: int) -> int:
    """Tokens in a chunk: the largest power of two, at most 1024, whose fp32 logits take at most 256 MiB.

    Larger chunks make no matrix product faster; smaller ones add to the gradient of the output embedding more often.
    The part has the same rule (`hf_memkit/components/chunked_loss.py`), for those who install it alone.
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
    hidden states (liger_kernel 0.8.5: ops/fused_linear_cross_entropy.py 102-107). Not measured: it needs a GPU.
    """
    chunk = min(tokens, 1 << (-(-tokens // -(-vocabulary // width)) - 1).bit_length())
    return weight_bytes * (chunk * vocabulary + tokens * width + vocabulary * width)


def sft_loss_bytes(
    tokens: int, vocabulary: int, width: int, *, weight_bytes: int, compute_bytes: int, head_is_trained: bool
) -> int:
    """TRL's SFTTrainer on a GPU, in backward: one tile of logits, the inputs of the scored tokens and their fp32
    gradient, and the head's fp32 gradient beside its copy in the weights' dtype.

    A tile has at most 4096 tokens × 32768 words. All tokens are taken for scored; those without a label are not
    (trl 1.16.0: kernels/chunked_logprob.py, trainer/utils.py 1506 and 1645).
    """
    tile = min(tokens, _SFT_TILE_TOKENS) * _SFT_TILE_WORDS * compute_bytes
    copy = weight_bytes if weight_bytes < 4 else 0
    head = (4 + copy) * vocabulary * width if head_is_trained else 0
    return tile + (compute_bytes + 4) * tokens * width + head


def loss_bytes(setup: Setup, model: ModelFacts) -> tuple[int, str, str]:
    """(bytes, what they are, formula) of the loss that `setup` computes, at its peak."""
    job = setup.resolved_for
    tokens, vocabulary, width = job.tokens, model.vocabulary, model.width
    weight = 2 if setup.get("model.dtype", "float32") in ("bfloat16", "float16") else 4
    if setup.get("trainer.class") == "trl:SFTTrainer":
        size = sft_loss_bytes(
            tokens, vocabulary, width, weight_bytes=weight, compute_bytes=4 if numbers_of(setup) == "32-bit" else 2,
            head_is_trained=not setup.section("adapter"),
        )  # fmt: skip
        return size, "SFTTrainer's tile of logits, gradients of its inputs", "trl 1.16.0: kernels/chunked_logprob.py"
    options = setup.get("model_parts.chunked_loss")
    if options is not None:
        chunk = options.get("chunk_tokens") or chunk_tokens_for(vocabulary)
        return (
            chunked_loss_bytes(tokens, vocabulary, width, weight_bytes=weight, chunk_tokens=chunk),
            f"logits of {min(chunk, tokens)} tokens, gradient of the output embedding",
            f"12 bytes × {min(chunk, tokens)} tokens × vocabulary + {weight} bytes × vocabulary × width, measured "
            f"on a CPU",
        )
    if setup.get("arguments.use_liger_kernel") is True:
        return (
            liger_loss_bytes(tokens, vocabulary, width, weight_bytes=weight),
            "Liger's chunk of logits, gradients of its inputs",
            "liger_kernel 0.8.5: ops/fused_linear_cross_entropy.py 102-130",
        )
    return (
        full_loss_bytes(tokens, vocabulary),
        "logits: fp32 log-probabilities and two gradients",
        "12 bytes × tokens × vocabulary, measured on a CPU (transformers:loss/loss_utils.py, logits.float())",
    )


def cache_bytes(
    *, batch: int, beams: int, tokens: int, layers: int, heads: int, head_width: int, bytes_per_number: int = 2
) -> int:
    """Bytes of the keys and values that generation keeps, at its last token.

    2 × bytes × batch × beams × tokens × layers × heads × head_width: each beam has its own cache (transformers
    5.23.0: generation/utils.py, `expand_size=generation_config.num_beams`). Reordering beams copies one layer's share
    on top.

    Args:
        batch: samples at once (`per_device_eval_batch_size`).
        beams: `generation_num_beams`.
        tokens: of prompt and answer together.
        layers, heads, head_width: of keys and values (grouped-query models have fewer of those heads).
        bytes_per_number: of the model's dtype.
    """
    return 2 * bytes_per_number * batch * beams * tokens * layers * heads * head_width


def cache_bytes_of(config: Mapping[str, Any], *, batch: int, beams: int, tokens: int, layers: int, width: int) -> int:
    """`cache_bytes` in 16 bits by a model's config values; without head counts in them all of `width` is kept."""
    heads = int(config.get("num_attention_heads") or config.get("n_head") or 1)
    return cache_bytes(
        batch=batch, beams=beams, tokens=tokens, layers=layers, bytes_per_number=2,
        heads=int(config.get("num_key_value_heads") or heads),
        head_width=int(config.get("head_dim") or width // heads),
    )  # fmt: skip


def _first(config: Any, *names: str, default: Any) -> Any:
    return next((config[name] for name in names if config.get(name) is not None), default)
