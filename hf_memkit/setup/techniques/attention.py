"""Which implementation of attention the model is loaded with."""

from __future__ import annotations

from hf_memkit.setup.setup import Setup
from hf_memkit.setup.techniques.registry import InPlans, advice, technique

_KEY = "model.attn_implementation"


@technique(
    "sdpa-attention",
    saves="eager attention stores its scores, heads × length² numbers a sequence and layer; SDPA does not",
    costs="rounding differences; no attention weights in the output; a model without SDPA fails to load",
    not_when="you need attention weights (output_attentions)",
    settings={_KEY: "sdpa"},
    frees={"activations": 0.9},
    offered={"attention": 1, "larger than the GPU": 3, "one large tensor": 4},
    unless=("flash attention", "diffusers", "SDPA"),
    planned=InPlans("attention", "sdpa attention"),
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
    saves="flash attention has no score matrices and needs no padding mask; SDPA falls back to full score "
    "matrices when no fused kernel supports the mask or the types",
    costs="the package flash-attn, an Ampere GPU or later, and 16-bit computation",
    not_when="the GPU is older than Ampere, the weights and the computation are fp32, or heads are wider than 256",
    proof="gpu",
    packages=("flash_attn",),
    gpu_only="its kernels run on GPUs only",
    settings={_KEY: "flash_attention_2"},
    offered={"attention": 1, "larger than the GPU": 3, "one large tensor": 4},
    devices=("cuda", "rocm"),
    only_with=("SDPA",),
    unless=("flash attention", "diffusers"),
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
    saves="nothing: it keeps every attention score; for inspection and comparison",
    costs="heads × length² numbers a sequence and layer",
    not_when="memory matters",
)
def eager_attention(setup: Setup) -> Setup:
    """Attention written out in torch operations: weights can be returned (output_attentions)."""
    return setup.put(_KEY, "eager", "attention weights can be read")


advice(
    "xformers-attention", "attention", {"arguments.enable_xformers_memory_efficient_attention": True},
    "attention then stores no scores, heads × pixels² numbers a layer",
    "the package xformers; PyTorch 2 and a recent diffusers do this without it",
    offered={"attention": 1, "larger than the GPU": 3, "one large tensor": 4}, only_with=("diffusers",),
    unless=("flash attention", "enable_xformers_memory_efficient_attention"),
)  # fmt: skip
