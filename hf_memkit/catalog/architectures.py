"""Config values of well-known causal language models, for machines without access to the hub. Only values that
determine the shapes, each from the model's config.json on the hub. `parameters` is the count on the model's page;
tests compare it with the model built from these values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final


@dataclass(frozen=True, slots=True)
class Architecture:
    """`config`: arguments of `AutoConfig.for_model`, with `model_type`. `parameters`: their number, tied ones once."""

    config: Mapping[str, Any]
    parameters: int


def _gpt2(layers: int, width: int, heads: int, parameters: int) -> Architecture:
    sizes = {"n_layer": layers, "n_embd": width, "n_head": heads, "n_positions": 1024, "vocab_size": 50257}
    return Architecture({"model_type": "gpt2", **sizes}, parameters)


def _architecture(
    model_type: str, layers: int, width: int, heads: int, vocabulary: int, parameters: int, **further: Any
) -> Architecture:
    sizes = {"num_hidden_layers": layers, "hidden_size": width, "num_attention_heads": heads}
    return Architecture({"model_type": model_type, **sizes, "vocab_size": vocabulary, **further}, parameters)


def _llama(  # the names that Llama, Mistral and Qwen share
    model_type: str, layers: int, width: int, heads: int, key_value_heads: int, feed_forward: int, vocabulary: int,
    parameters: int, *, positions: int, tied: bool = False, head_dim: int | None = None,
) -> Architecture:  # fmt: skip
    further = {"num_key_value_heads": key_value_heads, "intermediate_size": feed_forward, "tie_word_embeddings": tied}
    if head_dim is not None:
        further["head_dim"] = head_dim
    further["max_position_embeddings"] = positions
    return _architecture(model_type, layers, width, heads, vocabulary, parameters, **further)


def _neox(layers: int, width: int, heads: int, vocabulary: int, parameters: int) -> Architecture:
    further = {"intermediate_size": 4 * width, "tie_word_embeddings": False, "max_position_embeddings": 2048}
    return _architecture("gpt_neox", layers, width, heads, vocabulary, parameters, **further)


def _opt(layers: int, width: int, heads: int, parameters: int) -> Architecture:
    further = {"word_embed_proj_dim": width, "ffn_dim": 4 * width, "max_position_embeddings": 2048}
    return _architecture("opt", layers, width, heads, 50272, parameters, **further)


# fmt: off
ARCHITECTURES: Final[dict[str, Architecture]] = {
    "distilbert/distilgpt2": _gpt2(6, 768, 12, 81_912_576),
    "openai-community/gpt2": _gpt2(12, 768, 12, 124_439_808),
    "openai-community/gpt2-medium": _gpt2(24, 1024, 16, 354_823_168),
    "openai-community/gpt2-large": _gpt2(36, 1280, 20, 774_030_080),
    "openai-community/gpt2-xl": _gpt2(48, 1600, 25, 1_557_611_200),
    "meta-llama/Llama-3.2-1B": _llama(
        "llama", 16, 2048, 32, 8, 8192, 128256, 1_235_814_400, positions=131072, tied=True, head_dim=64),
    "meta-llama/Llama-3.2-3B": _llama(
        "llama", 28, 3072, 24, 8, 8192, 128256, 3_212_749_824, positions=131072, tied=True, head_dim=128),
    "meta-llama/Llama-3.1-8B": _llama("llama", 32, 4096, 32, 8, 14336, 128256, 8_030_261_248, positions=131072),
    "meta-llama/Llama-3.1-70B": _llama("llama", 80, 8192, 64, 8, 28672, 128256, 70_553_706_496, positions=131072),
    "meta-llama/Llama-2-7b-hf": _llama("llama", 32, 4096, 32, 32, 11008, 32000, 6_738_415_616, positions=4096),
    "meta-llama/Llama-2-13b-hf": _llama("llama", 40, 5120, 40, 40, 13824, 32000, 13_015_864_320, positions=4096),
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0": _llama(
        "llama", 22, 2048, 32, 4, 5632, 32000, 1_100_048_384, positions=2048),
    "HuggingFaceTB/SmolLM2-135M": _llama(
        "llama", 30, 576, 9, 3, 1536, 49152, 134_515_008, positions=8192, tied=True),
    "HuggingFaceTB/SmolLM2-360M": _llama(
        "llama", 32, 960, 15, 5, 2560, 49152, 361_821_120, positions=8192, tied=True),
    "HuggingFaceTB/SmolLM2-1.7B": _llama(
        "llama", 24, 2048, 32, 32, 8192, 49152, 1_711_376_384, positions=8192, tied=True),
    "mistralai/Mistral-7B-v0.1": _llama("mistral", 32, 4096, 32, 8, 14336, 32000, 7_241_732_096, positions=32768),
    "mistralai/Mistral-7B-v0.3": _llama("mistral", 32, 4096, 32, 8, 14336, 32768, 7_248_023_552, positions=32768),
    "Qwen/Qwen2.5-0.5B": _llama("qwen2", 24, 896, 14, 2, 4864, 151936, 494_032_768, positions=32768, tied=True),
    "Qwen/Qwen2.5-1.5B": _llama("qwen2", 28, 1536, 12, 2, 8960, 151936, 1_543_714_304, positions=131072, tied=True),
    "Qwen/Qwen2.5-7B": _llama("qwen2", 28, 3584, 28, 4, 18944, 152064, 7_615_616_512, positions=131072),
    "Qwen/Qwen3-0.6B": _llama(
        "qwen3", 28, 1024, 16, 8, 3072, 151936, 596_049_920, positions=40960, tied=True, head_dim=128),
    "Qwen/Qwen3-1.7B": _llama(
        "qwen3", 28, 2048, 16, 8, 6144, 151936, 1_720_574_976, positions=40960, tied=True, head_dim=128),
    "Qwen/Qwen3-4B": _llama(
        "qwen3", 36, 2560, 32, 8, 9728, 151936, 4_022_468_096, positions=40960, tied=True, head_dim=128),
    "Qwen/Qwen3-8B": _llama("qwen3", 36, 4096, 32, 8, 12288, 151936, 8_190_735_360, positions=40960, head_dim=128),
    "Qwen/Qwen3-14B": _llama("qwen3", 40, 5120, 40, 8, 17408, 151936, 14_768_307_200, positions=40960, head_dim=128),
    "Qwen/Qwen3-32B": _llama("qwen3", 64, 5120, 64, 8, 25600, 151936, 32_762_123_264, positions=40960, head_dim=128),
    "EleutherAI/pythia-160m": _neox(12, 768, 12, 50304, 162_322_944),
    "EleutherAI/pythia-410m": _neox(24, 1024, 16, 50304, 405_334_016),
    "EleutherAI/pythia-1.4b": _neox(24, 2048, 16, 50304, 1_414_647_808),
    "EleutherAI/pythia-2.8b": _neox(32, 2560, 32, 50304, 2_775_208_960),
    "EleutherAI/pythia-6.9b": _neox(32, 4096, 32, 50432, 6_857_302_016),
    "EleutherAI/pythia-12b": _neox(36, 5120, 40, 50688, 11_846_072_320),
    "facebook/opt-125m": _opt(12, 768, 12, 125_239_296),
    "facebook/opt-1.3b": _opt(24, 2048, 32, 1_315_758_080),
    "facebook/opt-6.7b": _opt(32, 4096, 32, 6_658_473_984),
}
# fmt: on


def built_in(name: str) -> tuple[str, Architecture] | None:
    """Hub ID and config of a well-known model, by its ID with or without the organisation, in any case.
    Instruction-tuned models have the shapes of their base model: `Llama-3.1-8B-Instruct` finds `Llama-3.1-8B`."""
    wanted = name.lower().rpartition("/")[2].removesuffix("-instruct").removesuffix("-base")
    for hub_id, architecture in ARCHITECTURES.items():
        if hub_id.lower() == name.lower() or hub_id.lower().rpartition("/")[2] == wanted:
            return hub_id, architecture
    return None
