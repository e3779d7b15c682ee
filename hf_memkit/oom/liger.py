"""Which models Liger's kernels know. A model that it does not know trains as before, without a word."""

from __future__ import annotations

from typing import Final

__all__ = ["LIGER_MODEL_TYPES"]

LIGER_MODEL_TYPES: Final = frozenset(
    """
    deepseek_v2 deepseek_v3 deepseek_v4 exaone4 falcon_h1 gemma gemma2 gemma3 gemma3_text gemma4 gemma4_text glm4 glm4v
    glm4v_moe gpt_oss granite hunyuan_v1_dense hunyuan_v1_moe internvl llama llama4 llama4_text llava ministral mistral
    mixtral mllama mllama_text_model muse_glimmer nemotron olmo2 olmo3 paligemma phi3 pixtral qwen2 qwen2_5_vl
    qwen2_5_vl_text qwen2_vl qwen2_vl_text qwen3 qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen3_moe qwen3_next
    qwen3_vl qwen3_vl_moe qwen3_vl_moe_text qwen3_vl_text smollm3 smolvlm
    """.split()  # noqa: SIM905
)
"""`model_type`s (liger-kernel 0.8.5: transformers/monkey_patch.py, `MODEL_TYPE_TO_APPLY_LIGER_FN`). GPT-2 is not among
them."""
