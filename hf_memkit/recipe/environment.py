"""What must be so before a setup trains: its environment variables, and a card that torch can use."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from hf_memkit.errors import MissingPackageError, RunError
from hf_memkit.training_setup import TrainingSetup
from hf_memkit.zero import ops
from hf_memkit.zero.launch import single_process_environment

__all__ = ["has_kernels", "set_environment"]


def set_environment(setup: TrainingSetup, say: Callable[[str], None]) -> None:
    """Sets the setup's variables where the user has not, and makes sure that the card can be used.

    Raises:
        RunError: a launcher started several processes, or torch cannot use the card.
        MissingPackageError: the optimizer has to be compiled, and cannot.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise RunError("recipes run on one card so far; start memkit without torchrun, accelerate or deepspeed")
    variables = {name: str(value) for name, value in setup.section("environment").items()}
    if "deepspeed.config" in setup:
        variables |= single_process_environment()
    old = os.environ.get("PYTORCH_CUDA_ALLOC_CONF", os.environ.get("PYTORCH_ALLOC_CONF"))
    if "PYTORCH_ALLOC_CONF" in variables and old not in (None, variables["PYTORCH_ALLOC_CONF"]):
        say(f"The allocator keeps your own setting, {old}, instead of {variables.pop('PYTORCH_ALLOC_CONF')}.")
    for name, value in variables.items():
        os.environ.setdefault(name, value)
    if not setup.get("arguments.use_cpu"):
        _check_card(setup)


def _check_card(setup: TrainingSetup) -> None:
    """Raises what `set_environment` says of the card: otherwise Trainer goes to the CPU, or to several cards."""
    import torch

    if not torch.cuda.is_available():
        raise RunError(
            f"this setup is for a GPU, and torch {torch.__version__} cannot use one here: the driver is too old for "
            f"it, it is a CPU build, or there is no card"
        )
    if torch.cuda.device_count() > 1:
        raise RunError("recipes run on one card so far; set CUDA_VISIBLE_DEVICES to one")
    capability = torch.cuda.get_device_capability()
    if not has_kernels(capability, torch.cuda.get_arch_list()):
        raise RunError(
            f"torch {torch.__version__} has no kernels for this card (compute capability {capability[0]}."
            f"{capability[1]}); install a build of torch for an older CUDA"
        )
    if "optimizer.class" in setup:
        missing = ops.missing_tools(("compiled optimizer",), cpu=True)
        if missing:
            raise MissingPackageError(
                f"the optimizer's step has to be compiled: missing {', '.join(missing)}; "
                f"run: sudo apt-get install {' '.join(missing)}"
            )


def has_kernels(capability: tuple[int, int], architectures: Sequence[str]) -> bool:
    """Whether a torch built for `architectures` (`sm_80`, `compute_90` …) runs on a card of this compute capability:
    binaries run on the same major version from their minor version on, PTX on anything newer."""
    have = capability[0] * 10 + capability[1]
    for architecture in architectures:
        kind, _, number = architecture.partition("_")
        made_for = int("".join(filter(str.isdigit, number)) or 0)
        if made_for <= have and (kind == "compute" or made_for // 10 == capability[0]):
            return True
    return False
