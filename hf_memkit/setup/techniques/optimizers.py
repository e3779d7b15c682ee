"""Optimizers whose states have the weights' dtype, and optimizers with fewer states or with none."""

from __future__ import annotations

from typing import Final

from hf_memkit.setup.setup import Setup
from hf_memkit.setup.techniques.registry import InPlans, technique

NO_CLIPPING: Final = "the backward pass frees each gradient before Trainer can clip it"
NO_DECAY: Final = "Trainer builds this optimizer without the parameter groups that carry the weight decay"


@technique(
    "adamw-fused",
    saves="one fused kernel needs no temporaries; the foreach form of adamw_torch allocates a copy of all trained "
    "parameters (torch: torch/optim/adam.py)",
    costs="nothing: it is no slower, and the result is the same up to rounding",
    not_when="two moments a parameter do not fit: use an 8-bit optimizer",
    settings={"arguments.optim": "adamw_torch_fused"},
    offered={"optimizer": 1},
    unless=("fused optimizer", "DeepSpeed"),
    planned=InPlans("optimizer", "fused AdamW"),
)
def adamw_fused(setup: Setup) -> Setup:
    """Trainer's default AdamW: one kernel, with no copy of the parameters at the peak."""
    return setup.put(
        "arguments.optim", "adamw_torch_fused", "one kernel; the foreach form would allocate a copy of all parameters"
    )


@technique(
    "adamw-foreach",
    saves="nothing: while it steps, it holds one more copy of all trained parameters",
    costs="memory for that copy at each optimizer step",
    not_when="the fused form runs: it is faster and holds no copy",
)
def adamw_foreach(setup: Setup) -> Setup:
    """AdamW over lists of tensors: one kernel per operation for all parameters.

    torch's default on CUDA; on a CPU it is the loop (torch 2.13: optim/optimizer.py, `_default_to_fused_or_foreach`).
    """
    return setup.put("arguments.optim", "adamw_torch", "torch then uses the foreach form on CUDA")


@technique(
    "adamw-loop",
    saves="it updates one parameter at a time, so that its temporaries are as large as the largest parameter; the "
    "foreach form's are as large as all",
    costs="time: it launches several kernels for each parameter, which takes longer than the arithmetic",
    not_when="the fused form runs: it is faster and needs no temporaries",
)
def adamw_loop(setup: Setup) -> Setup:
    """AdamW, one parameter after the other.

    No argument of Trainer selects this form: Trainer ignores `optim_args` for AdamW (transformers 5.23.0:
    trainer_optimizer.py 201-208). Therefore memkit passes it the optimizer.
    """
    return setup.put_all(
        "optimizer",
        {
            "class": ("torch.optim:AdamW", "Trainer's own optim cannot switch foreach off"),
            "foreach": (False, "one parameter at a time: temporaries of one parameter, not of all"),
        },
    )


@technique(
    "sgd-momentum",
    saves="SGD keeps one state a parameter; AdamW keeps two",
    costs="accuracy: transformers learn much more slowly than with AdamW (learning curve in the docs)",
    not_when="you train a transformer from scratch, or have no time to find its learning rate",
    proof="curve",
    values={"momentum": float},
    bounds={"momentum": (0, 1)},
)
def sgd_momentum(setup: Setup) -> Setup:
    """SGD with momentum: one state a parameter, in the weights' dtype. Value: `momentum` (default 0.9).

    Trainer's `optim: sgd` alone has no momentum.
    """
    momentum = float(setup.resolved_for.values.get("momentum", 0.9))
    return setup.put_all(
        "arguments",
        optim=("sgd", "one state a parameter instead of two"),
        optim_args=(f"momentum={momentum}", "Trainer's SGD has no momentum by default"),
    )


@technique(
    "adafactor",
    saves="a matrix has one state for each row and each column; AdamW keeps two for each element",
    costs="no momentum, and two fp32 temporaries of the largest parameter (learning curve in the docs)",
    not_when="the weights are 16-bit: it rounds them to nearest, so that small updates are lost",
    proof="curve",
)
def adafactor(setup: Setup) -> Setup:
    """Adafactor with the learning rate of the arguments (Shazeer & Stern 2018, arXiv 1804.04235).

    Trainer switches off its relative step and its parameter scaling, so that `learning_rate` is the step size, and
    gives it no momentum (transformers 5.23.0: trainer_optimizer.py 195-198).
    """
    return setup.put("arguments.optim", "adafactor", "one state a row and a column, instead of two a parameter")


@technique(
    "adafactor-stochastic",
    saves="bf16 weights and gradients take 4 bytes a parameter together, and the states almost nothing",
    costs="no momentum, and four fp32 temporaries of the largest parameter",
    not_when="the weights are fp32: adafactor then computes the same",
)
def adafactor_stochastic(setup: Setup) -> Setup:
    """Adafactor that rounds bf16 weights stochastically (`hf_memkit.components.stochastic_adafactor`).

    On fp32 weights it computes the same as transformers' Adafactor with Trainer's settings.
    """
    return setup.put_all(
        "optimizer",
        {
            "class": ("hf_memkit.components.stochastic_adafactor:Adafactor", "transformers' own rounds to nearest"),
            "bf16_stochastic_round": (True, "updates below 1/256 of a weight add up instead of being lost"),
            "takes": (["lr"], "it has neither momentum nor Adam's epsilon"),
        },
    )


_STEPS_AT_ONCE = "the batch needs accumulation or several GPUs: each micro-batch and each GPU would step separately"


@technique(
    "lomo",
    saves="LOMO keeps no states, and only one or two gradients at a time",
    costs="no momentum, gradient clipping, weight decay or accumulation (learning curve in the docs)",
    not_when=_STEPS_AT_ONCE,
    proof="curve",
    packages=("lomo_optim",),
)
def lomo(setup: Setup) -> Setup:
    """SGD inside the backward pass: each gradient is used and freed (Lv et al. 2023, arXiv 2306.09782).

    Trainer passes it no weight decay and cannot clip its gradients. It rounds 16-bit weights to nearest.
    """
    return setup.put_all(
        "arguments",
        optim=("lomo", "no states, and each gradient is freed after its update"),
        max_grad_norm=(0.0, NO_CLIPPING),
        weight_decay=(0.0, NO_DECAY),
    )


@technique(
    "adalomo",
    saves="AdaLomo keeps one state for each row and column of a matrix, and only one or two gradients at a time",
    costs="no gradient clipping, weight decay or accumulation, and no states in checkpoints (learning curve in the "
    "docs)",
    not_when=_STEPS_AT_ONCE + "; or you must be able to resume the run",
    proof="curve",
    packages=("lomo_optim",),
)
def adalomo(setup: Setup) -> Setup:
    """LOMO with Adafactor's factored second moment (Lv et al. 2023, arXiv 2310.10195). CUDA only.

    No checkpoint has its states (lomo-optim 0.1.1: adalomo.py 81-83), which are always on CUDA (92-101).
    """
    if setup.resolved_for.machine.gpu is None:
        setup = setup.with_notes(
            "adalomo needs a CUDA GPU, and torch sees none here. lomo-optim puts its states on CUDA, and fails on a "
            "CPU with torch's AssertionError."
        )
    return setup.put_all(
        "arguments",
        optim=("adalomo", "one state a row and a column, and each gradient is freed after its update"),
        max_grad_norm=(0.0, NO_CLIPPING),
        weight_decay=(0.0, NO_DECAY),
        save_only_model=(True, "a checkpoint would lack the second moments: a resume resets them"),
    )
