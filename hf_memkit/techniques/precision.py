"""Which numbers weights and gradients are kept in."""

from __future__ import annotations

from hf_memkit.job import Job
from hf_memkit.training_setup import TrainingSetup

__all__ = ["autocast_over_half_weights", "half_weights_in_deepspeed", "pure_bf16"]


def pure_bf16(setup: TrainingSetup, job: Job) -> TrainingSetup:
    """Weights and gradients in bf16, and no fp32 copy of either.

    Saves 4 bytes a parameter of weights and 2 of gradients against bf16 autocast over fp32 weights (12 bytes become
    4, without the optimizer). Costs accuracy of the update: a step smaller than 1/256 of a weight is lost in rounding,
    so use it with an optimizer that rounds stochastically. Not for cards without bf16 (compute capability under 8.0).
    """
    if not job.bf16:
        card = job.machine.gpu.name if job.machine.gpu else "this machine"
        setup = setup.with_problems(
            [f"needs a card that computes in bf16; {card} does not (compute capability < 8.0)"]
        )
    return setup.put(
        "model.dtype", "bfloat16", "2 bytes a weight and 2 a gradient; the optimizer rounds stochastically"
    ).put_all(
        "arguments",
        {
            "bf16": (
                False,
                "the weights are bf16 already; autocast would add fp32 copies in norms and softmax",
            ),
            "fp16": (False, "bf16 needs no loss scaling"),
        },
    )


def half_weights_in_deepspeed(setup: TrainingSetup, job: Job) -> TrainingSetup:
    """16-bit weights on the card; DeepSpeed keeps the fp32 master copy where its preset says.

    bf16 where the card computes in it, otherwise fp16 with dynamic loss scaling. Costs nothing against DeepSpeed in
    fp32; fp16 may skip steps while the loss scale settles.
    """
    return _sixteen_bit(setup, job, "DeepSpeed casts the weights to this, and keeps its own fp32 master copy")


def autocast_over_half_weights(setup: TrainingSetup, job: Job) -> TrainingSetup:
    """Frozen weights in 16 bits, with autocast for the few that train in fp32.

    For adapters: the frozen model takes 2 bytes a parameter, the adapters keep fp32 weights. Not for full training:
    fp16 weights cannot be trained without a master copy.
    """
    return _sixteen_bit(setup, job, "the frozen weights are only read: 16 bits do; PEFT keeps the adapters in fp32")


def _sixteen_bit(setup: TrainingSetup, job: Job, why: str) -> TrainingSetup:
    card = job.machine.gpu.name if job.machine.gpu else "this machine"
    if job.bf16:
        reason = f"{card} computes in bf16, which needs no loss scaling"
        dtype, bf16, fp16 = "bfloat16", True, False
    else:
        reason = f"{card} has no bf16 of its own (compute capability < 8.0): fp16 with dynamic loss scaling"
        dtype, bf16, fp16 = "float16", False, True
    return setup.put("model.dtype", dtype, why).put_all("arguments", {"bf16": (bf16, reason), "fp16": (fp16, reason)})
