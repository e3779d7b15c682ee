"""Model types that Liger patches, and the keys of `liger_kernel_config` that each accepts. liger-kernel 0.8.5:
transformers/monkey_patch.py 3904-3958, and the signatures of the functions named there. It silently ignores other
models and keys. tests/checks compares these tables with the installed package."""

from __future__ import annotations

from typing import Final

_LOSSES: Final = ("cross_entropy", "fused_linear_cross_entropy")
_DECODER: Final = (*_LOSSES, "rms_norm", "rope", "swiglu")
_GEMMA: Final = (*_LOSSES, "geglu", "rms_norm", "rope")

_BY_OPTIONS: Final[dict[tuple[str, ...], str]] = {
    _DECODER: "deepseek_v2 deepseek_v3 deepseek_v4 exaone4 falcon_h1 glm4 glm4v glm4v_moe gpt_oss granite "
    "hunyuan_v1_dense hunyuan_v1_moe llama ministral mistral mixtral olmo2 olmo3 phi3 qwen2 qwen2_5_vl "
    "qwen2_5_vl_text qwen3 qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen3_moe qwen3_next qwen3_vl "
    "qwen3_vl_moe qwen3_vl_moe_text qwen3_vl_text smollm3",
    (*_DECODER, "layer_norm"): "llama4 llama4_text mllama mllama_text_model muse_glimmer qwen2_vl qwen2_vl_text",
    _GEMMA: "gemma gemma2 gemma3_text gemma4_text",
    (*_GEMMA, "layer_norm"): "gemma3 gemma4 paligemma",
    (*_LOSSES, "layer_norm", "rms_norm"): "internvl smolvlm",
    _LOSSES: "llava",
    (*_LOSSES, "relu_squared"): "nemotron",
    ("rms_norm", "rope", "swiglu"): "pixtral",
}

LIGER_OPTIONS: Final[dict[str, frozenset[str]]] = {
    model_type: frozenset(options) for options, types in _BY_OPTIONS.items() for model_type in types.split()
}
"""Model type → the keys of `liger_kernel_config` that its patch reads."""

LIGER_WITH_LOGITS: Final = frozenset({"granite", "pixtral"})
"""Model types that Liger patches without its fused loss by default, so that all logits are computed
(apply_liger_kernel_to_granite: Granite scales them; Pixtral's function has no loss)."""
