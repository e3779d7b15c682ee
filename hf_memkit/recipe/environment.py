"""What must be so before a setup trains: its environment variables, and a card that torch can use."""

from __future__ import annotations

import os
from collections.abc import Callable

from hf_memkit.errors import MissingPackageError, RunError
from hf_memkit.hardware import has_kernels
from hf_memkit.recipe.ranks import Ranks
from hf_memkit.setup import Setup
from hf_memkit.techniques.allocator import VARIABLE, set_allocator
from hf_memkit.zero import ops
from hf_memkit.zero.process_group import single_process_environment

__all__ = ["has_kernels", "set_environment"]


def set_environment(setup: Setup, say: Callable[[str], None], ranks: Ranks) -> None:
    """Sets the setup's variables where the user has not, and makes sure that the card can be used.

    Raises:
        RunError: accelerate's launcher brings an engine of its own, or torch cannot use the card.
        MissingPackageError: the optimizer has to be compiled, and cannot.
    """
    _leave_accelerate_aside(say)
    variables = {name: str(value) for name, value in setup.section("environment").items()}
    if "deepspeed.config" in setup:
        variables |= single_process_environment()
    if VARIABLE in variables:
        set_allocator(variables.pop(VARIABLE), say)
    for name, value in variables.items():
        os.environ.setdefault(name, value)
    if not setup.get("arguments.use_cpu"):
        _check_card(setup, ranks)


def _leave_accelerate_aside(say: Callable[[str], None]) -> None:
    """`accelerate launch` also hands its config to Trainer (accelerate:utils/launch.py): where that would change the
    setup, it must not.

    Raises:
        RunError: its config asks for an engine of its own.
    """
    for name, engine in (("ACCELERATE_USE_DEEPSPEED", "DeepSpeed"), ("ACCELERATE_USE_FSDP", "FSDP")):
        if os.environ.get(name, "").lower() in ("1", "true", "yes"):
            raise RunError(
                f"accelerate's config asks for {engine}, and the recipe brings its own engine; start it with memkit "
                f"--gpus N, torchrun, or accelerate launch --multi_gpu"
            )
    # TrainingArguments without bf16 or fp16 take this for the precision (transformers:training_args.py, "Mixed
    # Precision"), and weights that are bf16 already would be autocast again.
    precision = os.environ.pop("ACCELERATE_MIXED_PRECISION", "no")
    if precision != "no":
        say(f"The precision is the setup's; accelerate's mixed_precision={precision} is left aside.")


def _check_card(setup: Setup, ranks: Ranks) -> None:
    """Raises what `set_environment` says of the card: otherwise Trainer goes to the CPU, or to several cards."""
    import torch

    if not torch.cuda.is_available():
        raise RunError(
            f"this setup is for a GPU, and torch {torch.__version__} cannot use one here: the driver is too old for "
            f"it, it is a CPU build, or there is no card"
        )
    cards = torch.cuda.device_count()
    if cards > 1 and not ranks.launched:
        raise RunError(f"one process sees {cards} cards; give --gpus {cards}, or set CUDA_VISIBLE_DEVICES to one")
    if cards < ranks.local_world_size:
        raise RunError(
            f"{ranks.local_world_size} processes were started on this machine, and each may use {cards} of its cards "
            f"(CUDA_VISIBLE_DEVICES); each needs one of its own"
        )
    capability = torch.cuda.get_device_capability(ranks.local_rank)
    if not has_kernels(capability, torch.cuda.get_arch_list()):
        raise RunError(
            f"torch {torch.__version__} has no kernels for this card (compute capability {capability[0]}."
            f"{capability[1]}); install a build of torch for an older CUDA"
        )
    if str(setup.get("optimizer.class", "")).endswith((":AdamW8bit", ":AdamW4bit")):
        missing = ops.missing_tools(("compiled optimizer",), cpu=True)
        if missing:
            raise MissingPackageError(
                f"the optimizer's step has to be compiled: missing {', '.join(missing)}; "
                f"run: sudo apt-get install {' '.join(missing)}"
            )
