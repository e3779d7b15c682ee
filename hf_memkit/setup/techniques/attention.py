"""Implementations of attention with which a model can be loaded."""

from __future__ import annotations

from hf_memkit.setup.setup import Setup
from hf_memkit.setup.techniques.registry import InPlans, advice, technique

_KEY = "model.attn_implementation"


@technique(
    "sdpa-attention",
    saves="eager attention stores its scores, heads × length² numbers a sequence and layer; SDPA stores none",
    costs="rounding differences, and no attention weights in the output; a model that does not support SDPA fails to "
    "load",
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
        return setup  # a preset includes SDPA because it is free: no note
    return setup.with_notes("Attention: a padding mask rules out torch's flash kernel, and takes length² numbers.")


@technique(
    "flash-attention",
    saves="flash attention stores no scores and needs no padding mask; SDPA stores all scores when no fused kernel "
    "supports the mask or the dtype",
    costs="needs the package flash-attn, an Ampere GPU or later, and 16-bit computation",
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
    saves="nothing: use it only to inspect attention weights or to compare",
    costs="it stores all attention scores, heads × length² numbers a sequence and layer",
    not_when="memory is short",
)
def eager_attention(setup: Setup) -> Setup:
    """Attention in separate torch operations, which can return its weights (output_attentions)."""
    return setup.put(_KEY, "eager", "attention weights can be read")


advice(
    "xformers-attention", "attention", {"arguments.enable_xformers_memory_efficient_attention": True},
    saves="xformers' attention stores no scores, which are heads × pixels² numbers a layer",
    costs="needs the package xformers; PyTorch 2 and a recent diffusers do the same without it",
    offered={"attention": 1, "larger than the GPU": 3, "one large tensor": 4}, only_with=("diffusers",),
    unless=("flash attention", "enable_xformers_memory_efficient_attention"),
)  # fmt: skip
