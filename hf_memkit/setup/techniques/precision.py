"""The precision of weights, gradients, optimizer states and arithmetic."""

from __future__ import annotations

from typing import Final

from hf_memkit.setup.setup import Setup
from hf_memkit.setup.techniques.registry import InPlans, technique

_NO_BF16: Final = "does not (compute capability < 8.0)"


@technique(
    "fp32",
    saves="nothing: 16 bytes a parameter with AdamW (4 weight, 4 gradient, 8 states)",
    costs="the most memory and the most time",
    not_when="the GPU has 16-bit arithmetic and the result need not be compared digit by digit",
)
def fp32(setup: Setup) -> Setup:
    """Everything in fp32, matrix products too."""
    return setup.put("model.dtype", "float32", "not the dtype of the checkpoint").put_all(
        "arguments",
        bf16=(False, "fp32 throughout"),
        fp16=(False, "fp32 throughout"),
        # transformers 5.23.0: training_args.py, "TF32": left unset, torch_compile turns TF32 on.
        tf32=(False, "fp32 throughout: left open, torch_compile would turn TF32 on"),
    )


@technique(
    "tf32",
    saves="time, not memory: 16 bytes a parameter as with fp32",
    costs="10 bits of mantissa instead of 23 inside matrix products; sums stay in fp32",
    not_when="the GPU is older than Ampere, or there is none: Trainer refuses it",
    proof="gpu",
    gpu_only="a mode of the tensor cores that changes no size",
)
def tf32(setup: Setup) -> Setup:
    """fp32 weights, with matrix products on tensor cores in TF32."""
    setup = _needs_ampere(setup, "multiplies in TF32")
    return setup.put("model.dtype", "float32", "TF32 is a way to multiply fp32 numbers").put_all(
        "arguments",
        tf32=(True, "matrix products on tensor cores: 8 bits of exponent as fp32, 10 bits of mantissa as fp16"),
        bf16=(False, "under autocast the products would be in bf16"),
        fp16=(False, "under autocast the products would be in fp16"),
    )


@technique(
    "bf16-autocast",
    saves="16-bit matrix products halve most activations; 16-bit copies of the weights add 2 bytes a parameter",
    costs="16-bit rounding in forward and backward; weights and optimizer stay in fp32; faster",
    not_when="the GPU has no native bf16 (compute capability < 8.0): torch emulates it, slower than fp32",
    group="nearly the same",
    settings={"arguments.bf16": True},
    unless=("DeepSpeed", "FSDP", "bf16", "fp16"),
    planned=InPlans("precision", "bf16", "products in bf16 (autocast) instead of fp32"),
)
def bf16_autocast(setup: Setup) -> Setup:
    """fp32 weights, gradients and states; matrix products and most activations in bf16."""
    setup = _needs_ampere(setup, "computes in bf16")
    return setup.put("model.dtype", "float32", "autocast casts on the fly; updates are made in fp32").put_all(
        "arguments",
        bf16=(True, "matrix products and most activations in 2 bytes; bf16 needs no loss scaling"),
        fp16=(False, "the setup computes in bf16"),
    )


@technique(
    "fp16-autocast",
    saves="16-bit matrix products halve most activations on GPUs without bf16 (T4, V100); 16-bit copies of the "
    "weights add 2 bytes a parameter",
    costs="16-bit rounding in forward and backward, and steps that are skipped while the loss scale settles; "
    "weights and optimizer stay in fp32; faster",
    not_when="the GPU has bf16: the same memory without loss scaling",
    group="nearly the same",
    settings={"arguments.fp16": True},
    unless=("DeepSpeed", "FSDP", "bf16", "fp16"),
    planned=InPlans("precision", "fp16", "products in fp16 (autocast, gradients scaled) instead of fp32"),
)
def fp16_autocast(setup: Setup) -> Setup:
    """fp32 weights, gradients and states; matrix products and most activations in fp16, the loss scaled."""
    job = setup.resolved_for
    if job.bf16 and job.machine.gpu is not None:
        setup = setup.with_notes(
            f"{job.gpu_name} computes in bf16: bf16-autocast takes the same memory, and no loss scale."
        )
    return setup.put(
        "model.dtype", "float32", "fp16 weights cannot be trained: torch refuses to unscale fp16 gradients"
    ).put_all(
        "arguments",
        fp16=(True, "matrix products and most activations in 2 bytes, with dynamic loss scaling"),
        bf16=(False, "the setup computes in fp16"),
    )


@technique(
    "pure-bf16",
    saves="weights and gradients take 2 bytes a parameter each instead of 4; transformers 5 already loads a "
    "16-bit checkpoint in 16 bit",
    costs="bf16 rounding in forward and backward; weights that are trained lose updates below 1/256 of a weight "
    "without stochastic rounding, so train adapters",
    not_when="the optimizer neither rounds stochastically nor was tried in 16 bits, or the GPU has no bf16",
    group="nearly the same",
    settings={"model.dtype": "bfloat16"},
    offered={"load": 1, "host/load": 1},
    unless=("16-bit weights", "quantized weights"),
)
def pure_bf16(setup: Setup) -> Setup:
    """Weights and gradients in bf16, and no fp32 copy of either."""
    setup = _needs_ampere(setup, "computes in bf16")
    return setup.put("model.dtype", "bfloat16", "2 bytes a weight and 2 a gradient").put_all(
        "arguments",
        bf16=(False, "the weights are bf16 already; autocast would add fp32 copies in norms and softmax"),
        fp16=(False, "bf16 needs no loss scaling"),
    )


@technique(
    "half-weights-deepspeed",
    saves="2 bytes a parameter on the GPU: 16-bit weights there, DeepSpeed's fp32 master copy where its preset says",
    costs="nothing against DeepSpeed in fp32; fp16 may skip steps while the loss scale settles",
    not_when="the engine is not DeepSpeed: 16-bit weights need a master copy, or stochastic rounding",
)
def half_weights_in_deepspeed(setup: Setup) -> Setup:
    """16-bit weights on the GPU; DeepSpeed keeps the fp32 master copy where its preset says.

    bf16 where the GPU computes in it, otherwise fp16 with dynamic loss scaling.
    """
    return _sixteen_bit(setup, "DeepSpeed casts the weights to this, and keeps its own fp32 master copy")


@technique(
    "half-weights-frozen",
    saves="frozen weights take 2 bytes a parameter instead of 4: they are only read, and 16 bits are enough for that",
    costs="bf16 rounding in forward and backward; the adapters stay in fp32 (PEFT casts them up)",
    not_when="all weights are trained: fp16 weights cannot be, without a master copy",
    group="nearly the same",
    settings={"model.dtype": "bfloat16"},
    unless=("16-bit weights", "quantized weights"),
)
def autocast_over_half_weights(setup: Setup) -> Setup:
    """Frozen weights in 16 bits, with autocast for the few that train in fp32: adapters, which PEFT keeps in fp32."""
    return _sixteen_bit(
        setup, "the frozen weights are only read, for which 16 bits suffice; PEFT keeps the adapters in fp32"
    )


def _needs_ampere(setup: Setup, what: str) -> Setup:
    job = setup.resolved_for
    return setup if job.bf16 else setup.with_problems([f"needs a GPU that {what}; {job.gpu_name} {_NO_BF16}"])


def _sixteen_bit(setup: Setup, why: str) -> Setup:
    job = setup.resolved_for
    gpu = job.gpu_name
    if job.bf16:
        reason = f"{gpu} computes in bf16, which needs no loss scaling"
        dtype, bf16, fp16 = "bfloat16", True, False
    else:
        reason = f"{gpu} has no native bf16 (compute capability < 8.0): fp16 with dynamic loss scaling"
        dtype, bf16, fp16 = "float16", False, True
    return setup.put("model.dtype", dtype, why).put_all("arguments", bf16=(bf16, reason), fp16=(fp16, reason))
