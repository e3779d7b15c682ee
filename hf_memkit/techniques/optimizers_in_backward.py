"""Optimizers that update each parameter as soon as its gradient is there, and drop the gradient."""

from __future__ import annotations

from hf_memkit.job import Job
from hf_memkit.setup import Setup
from hf_memkit.technique import technique

__all__ = ["adalomo", "lomo"]

_NO_CLIPPING = "the gradients are gone when Trainer would clip them: their norm is never known"
_NO_DECAY = "it does not reach this optimizer: Trainer builds it without its parameter groups"
_NOT_WHEN = "the batch needs accumulation, or several cards: each micro-batch and each rank would step by itself"


@technique(
    "lomo",
    family="optimizers",
    saves="all states, and all gradients but one or two at a time",
    costs="no momentum, no clipping, no accumulation; the curve is in the docs",
    not_when=_NOT_WHEN,
    proof="curve",
    packages=("lomo_optim",),
)
def lomo(setup: Setup, job: Job) -> Setup:
    """SGD inside the backward pass (Lv et al. 2023, arXiv 2306.09782): each gradient is used and dropped.

    Weight decay and clipping do not reach it through Trainer. Weights in 16 bits are rounded to nearest.
    """
    return setup.put_all(
        "arguments",
        {
            "optim": ("lomo", "no states, and no gradient lives longer than its own update"),
            "max_grad_norm": (0.0, _NO_CLIPPING),
            "weight_decay": (0.0, _NO_DECAY),
        },
    )


@technique(
    "adalomo",
    family="optimizers",
    saves="nearly all states (a number a row and a column), and all gradients but one or two at a time",
    costs="no clipping, no accumulation, and its states are in no checkpoint; the curve is in the docs",
    not_when=_NOT_WHEN + "; or a run that is to be resumed",
    proof="curve",
    packages=("lomo_optim",),
)
def adalomo(setup: Setup, job: Job) -> Setup:
    """LOMO with Adafactor's factored second moment (Lv et al. 2023, arXiv 2310.10195). CUDA only.

    The library keeps the states in dictionaries of its own, which no checkpoint has (lomo-optim 0.1.1: adalomo.py
    81-83), and puts them on CUDA without asking (92-101).
    """
    if job.machine.gpu is None:
        setup = setup.with_notes(
            "adalomo needs a CUDA card, and none is in sight here: lomo-optim puts its states there without asking, "
            "and on a CPU fails with torch's own AssertionError."
        )
    return setup.put_all(
        "arguments",
        {
            "optim": ("adalomo", "a number a row and a column, and no gradient lives longer than its own update"),
            "max_grad_norm": (0.0, _NO_CLIPPING),
            "weight_decay": (0.0, _NO_DECAY),
            "save_only_model": (True, "a checkpoint would lack the second moments: a resume starts them anew"),
        },
    )
