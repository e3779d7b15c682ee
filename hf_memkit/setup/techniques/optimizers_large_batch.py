"""Optimizers for batches of thousands of sequences, for which AdamW and SGD need another learning rate."""

from __future__ import annotations

from math import sqrt

from hf_memkit.setup.setup import Setup
from hf_memkit.setup.techniques.registry import Bounds, technique

_PART = "hf_memkit.components.large_batch_optimizers"
_VALUES = {"reference_batch_size": int, "reference_learning_rate": float}
_BOUNDS: Bounds = {"reference_batch_size": (1, None), "reference_learning_rate": (1e-12, None)}
"""Bounds are inclusive: 1e-12 stands for "above 0"."""

_WHY_WARM_UP = "a large batch needs a warm-up"
_WARM_UP = 0.1
"""Warm-up as a share of the steps, if no reference batch is given. Assumed, not from a paper."""

_LARS_WARM_UP = 0.05
"""Warm-up of LARS, as a share of the steps: 5 of 90 epochs (Goyal et al. 2017, arXiv 1706.02677, section 2.2)."""

_LAMB_WARM_UP = 1 / 320
"""Warm-up of LAMB at the reference batch, as a share of the steps; it grows in proportion to the batch (You et al.
2019, arXiv 1904.00962, the table of untuned LAMB on BERT)."""

_LAMB_LONGEST = 1 / 5
"""Maximum warm-up of LAMB: the same table has it at 64 times the reference batch."""


def _sequences(setup: Setup) -> int:
    job = setup.resolved_for
    micro = int(setup.get("arguments.per_device_train_batch_size", job.micro_batch_size))
    accumulation = int(setup.get("arguments.gradient_accumulation_steps", job.accumulation))
    return micro * accumulation * job.processes


def _put_rate(setup: Setup, factor: float, law: str) -> Setup:
    rate = setup.resolved_for.values.get("reference_learning_rate")
    return setup if rate is None else setup.put("arguments.learning_rate", float(rate) * factor, law)


@technique(
    "lars",
    saves="LARS keeps one moment a parameter, AdamW two; a larger batch also needs fewer steps",
    costs="you must find its learning rate, and each step reads every weight twice (learning curve in the docs)",
    not_when="the batch has less than a thousand sequences, or the model is a transformer: use LAMB or AdamW",
    proof="curve",
    packages=("bitsandbytes",),
    values={**_VALUES, "momentum": float},
    bounds={**_BOUNDS, "momentum": (0, 1)},
)
def lars(setup: Setup) -> Setup:
    """SGD with momentum whose step is limited by each matrix's norm (You et al. 2017, arXiv 1708.03888).

    With `reference_learning_rate` and `reference_batch_size` the learning rate grows in proportion to the batch and is
    warmed up (Goyal et al. 2017, arXiv 1706.02677, sections 2.1 and 2.2). memkit's class also trains parameters that
    start at zero; bitsandbytes' never moves them (`hf_memkit.components.large_batch_optimizers`).
    """
    values = setup.resolved_for.values
    setup = setup.put_all(
        "optimizer",
        {
            "class": (f"{_PART}:LARS", "one fp32 moment, and a trust ratio for each matrix"),
            "takes": (["lr"], "LARS has no betas and no epsilon"),
            "momentum": (float(values.get("momentum", 0.9)), "bitsandbytes refuses LARS without momentum"),
        },
    )
    if "reference_batch_size" not in values:
        return setup.put("arguments.warmup_steps", _WARM_UP, _WHY_WARM_UP)
    reference = int(values["reference_batch_size"])
    sequences = _sequences(setup)
    law = f"in proportion to the batch: {sequences} sequences against {reference} (Goyal et al. 2017, section 2.1)"
    setup = _put_rate(setup, sequences / reference, law)
    why = "five epochs of ninety (Goyal et al. 2017, section 2.2)"
    return setup.put("arguments.warmup_steps", _LARS_WARM_UP, why)


@technique(
    "lamb",
    saves="no memory, as LAMB keeps two fp32 moments; but a larger batch needs fewer steps",
    costs="each step reads every weight twice (learning curve in the docs)",
    not_when="the batch has less than a thousand sequences; AdamW does as well with equal tuning (Nado et al. 2021)",
    proof="curve",
    packages=("bitsandbytes",),
    values=_VALUES,
    bounds=_BOUNDS,
)
def lamb(setup: Setup) -> Setup:
    """Adam whose step is limited by each matrix's norm (You et al. 2019, arXiv 1904.00962).

    With `reference_learning_rate` and `reference_batch_size` the learning rate grows with the square root of the
    batch and the warm-up in proportion to it, as in the paper's table of untuned LAMB on BERT. memkit's class also
    trains parameters that start at zero; bitsandbytes' never moves them.
    """
    values = setup.resolved_for.values
    setup = setup.put("optimizer.class", f"{_PART}:LAMB", "two fp32 moments, and a trust ratio for each matrix")
    if "reference_batch_size" not in values:
        return setup.put("arguments.warmup_steps", _WARM_UP, _WHY_WARM_UP)
    reference = int(values["reference_batch_size"])
    sequences = _sequences(setup)
    law = f"with the square root of the batch: {sequences} sequences against {reference} (You et al. 2019)"
    setup = _put_rate(setup, sqrt(sequences / reference), law)
    warm_up = min(_LAMB_LONGEST, sequences / reference * _LAMB_WARM_UP)
    return setup.put("arguments.warmup_steps", warm_up, "in proportion to the batch (You et al. 2019, untuned LAMB)")
