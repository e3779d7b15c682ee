"""When a setup of a plan can have torch.compile."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from hf_memkit.catalog.hardware import Gpu
from hf_memkit.plan.candidate import Choice
from hf_memkit.prediction.traced_training import TracedTraining
from hf_memkit.setup.techniques.compiling import LEAST_CAPABILITY

COMPILE: Final = "compile"
"""The slot of the choice."""

WITH_PARALLELISM: Final = "memkit does not plan it together with context or tensor parallelism"

GATHERS: Final = "ZeRO-3 gathers weights in a hook of every module, and each hook ends the compiled graph"


def compile_choice(
    own: TracedTraining, gpu: Gpu | None, environment: Mapping[str, str], compiled: Choice
) -> Choice | str:
    """How a setup can differ from the script: compiled; uncompiled, if the script compiles; or why not compiled, which
    is empty if there is no reason to print.

    Args:
        compiled: the choice of the catalogue.
    """
    arguments = own.arguments
    if arguments.torch_compile:
        settings: dict[str, Any] = dict.fromkeys(compiled.settings, False)
        for name in ("torch_compile_backend", "torch_compile_mode"):  # each turns torch.compile on
            if getattr(arguments, name) is not None:
                settings[f"arguments.{name}"] = None
        result = "each operation rounds its result"
        return replace(compiled, name=f"no {compiled.name}", settings=settings, result=result)

    by_launcher = environment.get("ACCELERATE_DYNAMO_BACKEND", "no").lower() != "no"
    if by_launcher or own.device != "cuda":
        return ""
    if why := too_old_for_triton(gpu):
        return why
    if own.ranks_per_batch > 1:
        return WITH_PARALLELISM
    if own.engine is not None and own.engine.stage == 3:
        return GATHERS
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed here: pip install triton"
    if own.facts.batch.dropout:
        return replace(compiled, result=f"{compiled.result}; dropout draws other numbers")
    return compiled


def too_old_for_triton(gpu: Gpu | None) -> str:
    """Why Triton has no kernels for this GPU; empty if it has, or if the GPU is unknown."""
    if gpu is None or gpu.capability is None or gpu.capability >= LEAST_CAPABILITY:
        return ""
    return f"Triton needs compute capability {LEAST_CAPABILITY}; {gpu.name} has {gpu.capability}"
