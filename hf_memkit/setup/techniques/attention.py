"""Which implementation of attention the model is loaded with."""

from __future__ import annotations

from hf_memkit.setup.setup import Setup
from hf_memkit.setup.techniques.registry import technique

_KEY = "model.attn_implementation"


@technique(
    "sdpa-attention",
    family="attention",
    saves="the attention scores: heads × length² numbers a sequence and layer",
    costs="nothing: it is transformers' default where the model has it",
    not_when="you need attention weights (output_attentions)",
)
def sdpa_attention(setup: Setup) -> Setup:
    """torch's scaled_dot_product_attention: its flash or memory-efficient kernel keeps no scores."""
    job = setup.resolved_for
    setup = setup.put(_KEY, "sdpa", "no attention scores are kept")
    named = "sdpa-attention" in (word.strip() for word in setup.preset.split("+"))
    if job.machine.gpu is None or not named:
        return setup  # a preset has it because it costs nothing: nothing to tell
    return setup.with_notes("Attention: a padding mask rules out torch's flash kernel, and is kept (length² numbers).")


@technique(
    "flash-attention",
    family="attention",
    saves="the attention scores, and with padding also the mask",
    costs="an extra package; 16-bit numbers only",
    not_when="the GPU is older than Ampere, the weights and the computation are fp32, or heads are wider than 256",
    proof="gpu",
    packages=("flash_attn",),
    gpu_only="its kernels run on GPUs only",
)
def flash_attention(setup: Setup) -> Setup:
    """The flash-attn package (Dao 2023, arXiv 2307.08691)."""
    job = setup.resolved_for
    setup = setup.put(_KEY, "flash_attention_2", "no attention scores and no mask are kept")
    if job.bf16:
        return setup
    return setup.with_problems([f"flash-attention needs a GPU of Ampere or later; {job.gpu_name} is older"])


@technique(
    "eager-attention",
    family="attention",
    saves="nothing: it keeps every attention score; for inspection and comparison",
    costs="heads × length² numbers a sequence and layer",
    not_when="memory matters",
)
def eager_attention(setup: Setup) -> Setup:
    """Attention written out in torch operations: weights can be returned (output_attentions)."""
    return setup.put(_KEY, "eager", "attention weights can be read")
