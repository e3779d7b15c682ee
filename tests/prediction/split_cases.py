"""Trainings under DeepSpeed, for live and predicted runs."""

from __future__ import annotations

from typing import Any, Final

from hf_memkit.setup.setup import Setup
from tests.prediction.cases import small_setup

LENGTH: Final = 64

MODEL: Final[dict[str, Any]] = {
    "model_type": "gpt2", "vocab_size": 2048, "n_positions": 128, "n_embd": 256, "n_layer": 3, "n_head": 4,
    "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip

LLAMA: Final[dict[str, Any]] = {
    "model_type": "llama", "vocab_size": 2048, "hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
}  # fmt: skip

_STAGE_3: Final = {
    "stage3_max_live_parameters": 1_200_000, "stage3_max_reuse_distance": 1_200_000, "sub_group_size": 700_000,
    "stage3_prefetch_bucket_size": 200_000, "stage3_param_persistence_threshold": 1_000,
}  # fmt: skip


def config(stage: int, *, bf16: bool, **zero: Any) -> dict[str, Any]:
    """A DeepSpeed JSON with buffers much smaller than the model."""
    own = {**(_STAGE_3 if stage == 3 else {}), **zero}
    return {
        **{f"{key}": "auto" for key in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_clipping")},
        "gradient_accumulation_steps": "auto",
        "bf16": {"enabled": bf16},
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 300_000, "overlap_comm": False, **own},
    }


def case(stage: int, *, bf16: bool, accumulation: int = 1, batch: int = 32, checkpointing: bool = False) -> Setup:
    """With a batch of 32 activations decide the peak, with one of 2 what the engine holds."""
    setup = small_setup(
        MODEL, bf16=bf16, gradient_accumulation_steps=accumulation, per_device_train_batch_size=batch,
        gradient_checkpointing=checkpointing, max_grad_norm=1.0,
    )  # fmt: skip
    return setup.put("deepspeed.config", config(stage, bf16=bf16), "a test's")


def compiled(stage: int) -> Setup:
    """A Llama that is compiled. Its compiled norms keep less for backward, unless a hook ends the graph there."""
    setup = case(stage, bf16=True).put("model.architecture", LLAMA, "a test's")
    setup = setup.put("arguments.torch_compile", True, "a test's")
    return setup.put("arguments.torch_compile_backend", "aot_eager", "a test's: compiles no C++")


ONE: Final = {
    **{f"stage {stage}": case(stage, bf16=True) for stage in (1, 2, 3)},
    **{f"stage {stage}, few samples": case(stage, bf16=True, batch=2) for stage in (2, 3)},
    "stage 1, fp32": case(1, bf16=False),
    "stage 2, accumulation": case(2, bf16=True, accumulation=2),
    "stage 2, few samples, accumulation": case(2, bf16=True, accumulation=2, batch=2),
    "stage 3, checkpointing": case(3, bf16=True, checkpointing=True),
    "stage 2, compiled": compiled(2),
    "stage 3, compiled": compiled(3),
}
"""Of one process."""

TWO: Final = {
    name: ONE[name]
    for name in (
        "stage 1", "stage 2", "stage 2, few samples", "stage 2, few samples, accumulation", "stage 3",
        "stage 3, few samples",
    )
}  # fmt: skip
"""Of two."""
