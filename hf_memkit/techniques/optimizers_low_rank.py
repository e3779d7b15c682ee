"""Optimizers whose states live in a subspace of low rank."""

from __future__ import annotations

from hf_memkit.job import Job
from hf_memkit.setup import Setup
from hf_memkit.technique import Bounds, technique

__all__ = ["IN_BLOCKS", "apollo", "apollo_layerwise", "galore", "galore_layerwise"]

IN_BLOCKS = r".*\.\d+\..*"
"""Modules inside a numbered block: every linear layer but the output layer, whose projection would be the largest of
all. Trainer reads a string as a regular expression that must match the whole name (transformers 5.23.0:
trainer_utils.py, `check_target_module_exists`)."""

_TRAINER_RANK = 128
"""transformers 5.23.0: trainer_optimizer.py 371, 398."""

_CHECKPOINT = "what Trainer would save cannot be loaded: torch.load refuses the projectors in it"
_LAYERWISE_CHECKPOINT = "a checkpoint would lack the states: Trainer saves those of an optimizer that has none"
_NO_CLIPPING = "the gradients are gone when Trainer would clip them: their norm is never known"
_NO_DECAY = "it does not reach this optimizer: Trainer builds it without its parameter groups"
_NOT_ON_CONV1D = "the linear layers are Conv1D (GPT-2): Trainer projects nn.Linear only"
_VALUES = {"projection_rank": int, "projection_interval": int}
_BOUNDS: Bounds = {"projection_rank": (1, None), "projection_interval": (1, None)}


def _options(job: Job, scale: float) -> tuple[str, str]:
    width = job.model.width if job.model is not None else 0
    rank = int(job.values.get("projection_rank", width // 4 or _TRAINER_RANK))
    interval = int(job.values.get("projection_interval", 200))
    chosen = "a quarter of the width" if width else "Trainer's default"
    why = "asked for" if "projection_rank" in job.values else chosen
    return f"rank={rank},update_proj_gap={interval},scale={scale}", f"rank {rank}: {why}"


def _put(setup: Setup, optim: str, saves: str, options: tuple[str, str]) -> Setup:
    layerwise = optim.endswith("layerwise")
    setup = setup.put_all(
        "arguments",
        {
            "optim": (optim, saves),
            "optim_target_modules": (IN_BLOCKS, "every nn.Linear inside a block"),
            "optim_args": options,
            "weight_decay": (0.0, _NO_DECAY),
            "save_only_model": (True, _LAYERWISE_CHECKPOINT if layerwise else _CHECKPOINT),
        },
    )
    return setup.put("arguments.max_grad_norm", 0.0, _NO_CLIPPING) if layerwise else setup


@technique(
    "galore",
    family="optimizers",
    saves="most of AdamW's states of linear layers: those of the gradient's projection to a low rank",
    costs="a singular value decomposition of every gradient each 200 steps; betas, epsilon and weight decay do not "
    "reach it; the curve is in the docs",
    not_when=_NOT_ON_CONV1D + "; or a run that is to be resumed",
    proof="curve",
    packages=("galore_torch",),
    values=_VALUES,
    bounds=_BOUNDS,
)
def galore(setup: Setup, job: Job) -> Setup:
    """AdamW in the space of the gradient's first singular vectors (Zhao et al. 2024, arXiv 2403.03507).

    Rank: a quarter of the width, as in most of the paper's table 2; scale 0.25 and a new projection each 200 steps,
    its defaults.
    """
    return _put(setup, "galore_adamw", "AdamW's two moments of the projected gradient", _options(job, 0.25))


@technique(
    "galore-layerwise",
    family="optimizers",
    saves="what galore saves, and all gradients but one at a time",
    costs="what galore costs, and clipping, accumulation and several cards besides",
    not_when=_NOT_ON_CONV1D + "; the batch needs accumulation; or a run that is to be resumed",
    packages=("galore_torch",),
    values=_VALUES,
    bounds=_BOUNDS,
)
def galore_layerwise(setup: Setup, job: Job) -> Setup:
    """GaLore that updates each parameter as soon as its gradient is there, and drops the gradient."""
    return _put(setup, "galore_adamw_layerwise", "as galore, one gradient at a time", _options(job, 0.25))


@technique(
    "apollo",
    family="optimizers",
    saves="most of AdamW's states of linear layers: those of a random projection of the gradient",
    costs="no decomposition, unlike galore; weight decay does not reach it; the curve is in the docs",
    not_when=_NOT_ON_CONV1D + "; or a run that is to be resumed",
    proof="curve",
    packages=("apollo_torch",),
    values=_VALUES,
    bounds=_BOUNDS,
)
def apollo(setup: Setup, job: Job) -> Setup:
    """The gradient, scaled by channels as AdamW of a random projection says (Zhu et al. 2024, arXiv 2412.05270).

    Rank: a quarter of the width, scale 1, as in the paper's section 5.
    """
    return _put(setup, "apollo_adamw", "AdamW's two moments of a random projection", _options(job, 1.0))


@technique(
    "apollo-layerwise",
    family="optimizers",
    saves="what apollo saves, and all gradients but one at a time",
    costs="what apollo costs, and clipping, accumulation and several cards besides",
    not_when=_NOT_ON_CONV1D + "; the batch needs accumulation; or a run that is to be resumed",
    packages=("apollo_torch",),
    values=_VALUES,
    bounds=_BOUNDS,
)
def apollo_layerwise(setup: Setup, job: Job) -> Setup:
    """APOLLO that updates each parameter as soon as its gradient is there, and drops the gradient."""
    return _put(setup, "apollo_adamw_layerwise", "as apollo, one gradient at a time", _options(job, 1.0))
