"""bf16 on a GPU without it, which torch emulates: the one place that decides whether a training does that, and what to
do instead. Every verb shows the line under its verdict."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hf_memkit.hardware import Gpu
    from hf_memkit.setup import Setup

__all__ = ["emulated_bf16", "emulated_by_setup"]


def emulated_bf16(
    gpu: Gpu | None,
    arguments: Mapping[str, Any],
    *,
    dtypes: Collection[str] = (),
    trained: Collection[str] = (),
    config: Mapping[str, Any] | None = None,
) -> str:
    """What it costs and what to do instead, as a sentence without its full stop; empty: bf16 is not emulated.

    torch 2.13.0: cuda/__init__.py, `is_bf16_supported(including_emulation=True)`.

    Args:
        gpu: the GPU; None: none is known.
        arguments: fields of TrainingArguments.
        dtypes: of the model's weights, such as `"float32"`.
        trained: of those that are trained.
        config: the DeepSpeed JSON; None: there is none.
    """
    if gpu is None or gpu.bf16:
        return ""
    section = (config or {}).get("bf16", {})
    enabled = section.get("enabled") if isinstance(section, Mapping) else None
    if config is not None:
        computes = enabled is True or (enabled == "auto" and arguments.get("bf16") is True)
    elif arguments.get("fp16") is True:
        computes = False  # autocast casts what its products take
    else:
        computes = arguments.get("bf16") is True or "bfloat16" in dtypes
    if not computes:
        return ""
    instead = "train with fp16=True instead of bf16=True"
    if config is not None and "bf16_master_weights_and_grads" in section:
        instead = "use the preset zero2 or zero2-offload (memkit ds copy), and train with fp16=True"
    elif config is not None and enabled is True:
        instead = 'write "bf16": {"enabled": "auto"} and "fp16": {"enabled": "auto"}, and train with fp16=True'
    elif config is None and "bfloat16" in trained:  # GradScaler cannot unscale their gradients
        instead = 'load the weights with dtype="float32", and train with fp16=True'
    return f"{gpu.name} emulates bf16, slower than fp32; {instead}"


def emulated_by_setup(setup: Setup) -> str:
    """As `emulated_bf16`."""
    job = setup.job
    stored = str(setup.get("model.architecture", {}).get("dtype") or "").removeprefix("torch.")
    dtype = str(setup.get("model.dtype") or stored or "float32")
    quantised = "model.quantization" in setup
    return emulated_bf16(
        job.machine.gpu if job is not None else None,
        setup.arguments,
        dtypes=() if quantised else (dtype,),
        trained=() if quantised or setup.section("adapter") else (dtype,),
        config=setup.get("deepspeed.config"),
    )
