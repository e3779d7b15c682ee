"""Optimizers that keep their states in the weights' precision, or keep fewer of them: none, for gradients that are
used within the backward pass and dropped."""

from __future__ import annotations

from typing import Final

from hf_memkit.setup.setup import Setup
from hf_memkit.setup.techniques.registry import InPlans, technique

NO_CLIPPING: Final = "gradients are freed before Trainer could clip them"
NO_DECAY: Final = "it does not reach this optimizer: Trainer builds it without its parameter groups"


@technique(
    "adamw-fused",
    saves="adamw_torch allocates temporaries as large as the trained parameters (torch: torch/optim/adam.py, "
    "foreach); the fused kernel needs none",
    costs="nothing: no slower, and the same result up to rounding",
    not_when="two moments a parameter are too much: use one of the 8-bit optimizers",
    settings={"arguments.optim": "adamw_torch_fused"},
    offered={"optimizer": 1},
    unless=("fused optimizer", "DeepSpeed"),
    planned=InPlans("optimizer", "fused AdamW"),
)
def adamw_fused(setup: Setup) -> Setup:
    """Trainer's default AdamW in one fused kernel, without the foreach form's whole copy of the parameters at the
    peak."""
    return setup.put(
        "arguments.optim", "adamw_torch_fused", "one kernel, and no parameter-sized temporaries as foreach has"
    )


@technique(
    "adamw-foreach",
    saves="nothing: it holds one more copy of the parameters at its peak",
    costs="that copy, while the optimizer steps",
    not_when="the fused form runs, which is faster and holds no such copy",
)
def adamw_foreach(setup: Setup) -> Setup:
    """AdamW over lists of tensors, a handful of kernels for all parameters: for what the fused kernel does not take.

    torch takes this form by default for parameters on CUDA, unless the fused form or the loop is requested,
    and the loop on a CPU (torch 2.13: optim/optimizer.py, `_default_to_fused_or_foreach`).
    """
    return setup.put("arguments.optim", "adamw_torch", "torch's own choice on CUDA is then the foreach form")


@technique(
    "adamw-loop",
    saves="the foreach form's copy of the parameters: its temporaries are as large as the largest parameter",
    costs="a kernel launch for each operation and parameter, which takes longer than the arithmetic",
    not_when="the fused form runs, which is faster and has no temporaries at all",
)
def adamw_loop(setup: Setup) -> Setup:
    """AdamW parameter by parameter.

    No argument of Trainer can say this: it drops `optim_args` for AdamW (transformers 5.23.0: trainer_optimizer.py
    201-208), so the optimizer is given to it.
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
    saves="one of AdamW's two moments",
    costs="accuracy: transformers learn far slower under it than under AdamW; the curve is in the docs",
    not_when="a transformer is trained from scratch, or there is no time to find its learning rate",
    proof="curve",
    values={"momentum": float},
    bounds={"momentum": (0, 1)},
)
def sgd_momentum(setup: Setup) -> Setup:
    """SGD with momentum: one state a parameter, in the weights' dtype. Trainer's `optim: sgd` alone has none."""
    momentum = float(setup.resolved_for.values.get("momentum", 0.9))
    return setup.put_all(
        "arguments",
        optim=("sgd", "one state a parameter instead of two"),
        optim_args=(f"momentum={momentum}", "without this Trainer's SGD has none"),
    )


@technique(
    "adafactor",
    saves="nearly all states: a matrix keeps one number for each row and column",
    costs="two temporaries of the largest parameter in fp32, and no momentum; the curve is in the docs",
    not_when="the weights are 16-bit: it rounds them to nearest, and small updates are lost",
    proof="curve",
)
def adafactor(setup: Setup) -> Setup:
    """Adafactor with the learning rate of the arguments (Shazeer & Stern 2018, arXiv 1804.04235).

    Trainer switches its own relative step and parameter scaling off, so that `learning_rate` means what it says, and
    gives it no momentum (transformers 5.23.0: trainer_optimizer.py 195-198).
    """
    return setup.put("arguments.optim", "adafactor", "a number a row and a column, instead of two a parameter")


@technique(
    "adafactor-stochastic",
    saves="nearly all states, and the fp32 weights too: 4 bytes a parameter of bf16 weights and gradients",
    costs="four temporaries of the largest parameter in fp32, one parameter at a time, and no momentum",
    not_when="the weights are fp32: adafactor is the same there",
)
def adafactor_stochastic(setup: Setup) -> Setup:
    """Adafactor over bf16 weights that are rounded stochastically (`hf_memkit.components.stochastic_adafactor`).

    On fp32 weights its numbers are those of transformers' Adafactor, as Trainer sets it up.
    """
    return setup.put_all(
        "optimizer",
        {
            "class": ("hf_memkit.components.stochastic_adafactor:Adafactor", "transformers' own rounds to nearest"),
            "bf16_stochastic_round": (True, "updates below 1/256 of a weight add up instead of being lost"),
            "takes": (["lr"], "it has neither momentum nor Adam's epsilon"),
        },
    )


_STEPS_AT_ONCE = "the batch needs accumulation, or several GPUs: each micro-batch and each rank would step separately"


@technique(
    "lomo",
    saves="all states, and all gradients except one or two at a time",
    costs="no momentum, no clipping, no accumulation; the curve is in the docs",
    not_when=_STEPS_AT_ONCE,
    proof="curve",
    packages=("lomo_optim",),
)
def lomo(setup: Setup) -> Setup:
    """SGD inside the backward pass (Lv et al. 2023, arXiv 2306.09782): each gradient is used and dropped.

    Weight decay and clipping do not reach it through Trainer. Weights in 16 bits are rounded to nearest.
    """
    return setup.put_all(
        "arguments",
        optim=("lomo", "no states, and no gradient lives longer than its own update"),
        max_grad_norm=(0.0, NO_CLIPPING),
        weight_decay=(0.0, NO_DECAY),
    )


@technique(
    "adalomo",
    saves="nearly all states (a number a row and a column), and all gradients except one or two at a time",
    costs="no clipping, no accumulation, and no checkpoint holds its states; the curve is in the docs",
    not_when=_STEPS_AT_ONCE + "; or the run must be resumable",
    proof="curve",
    packages=("lomo_optim",),
)
def adalomo(setup: Setup) -> Setup:
    """LOMO with Adafactor's factored second moment (Lv et al. 2023, arXiv 2310.10195). CUDA only.

    The library keeps the states in its own dictionaries, which no checkpoint has (lomo-optim 0.1.1: adalomo.py
    81-83), and puts them on CUDA without asking (92-101).
    """
    if setup.resolved_for.machine.gpu is None:
        setup = setup.with_notes(
            "adalomo needs a CUDA GPU, and torch sees none here. lomo-optim puts its states on CUDA, and fails on a "
            "CPU with torch's AssertionError."
        )
    return setup.put_all(
        "arguments",
        optim=("adalomo", "a number a row and a column, and no gradient lives longer than its own update"),
        max_grad_norm=(0.0, NO_CLIPPING),
        weight_decay=(0.0, NO_DECAY),
        save_only_model=(True, "a checkpoint would lack the second moments: a resume resets them"),
    )
