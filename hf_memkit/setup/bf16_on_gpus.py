"""Trainings that use bf16 on a GPU without it: emulation by torch, and gradients that fp16's loss scaling cannot
handle. Every verb shows a warning for the first under its verdict, and refuses the second."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hf_memkit.catalog.hardware import Gpu
    from hf_memkit.setup.setup import Setup


def emulated_bf16(
    gpu: Gpu | None, arguments: Mapping[str, Any], *, dtypes: Collection[str], trained: Collection[str],
    config: Mapping[str, Any] | None,
) -> str:  # fmt: skip
    """Warning that bf16 is emulated, with the fix and without its full stop; empty if it is not (torch 2.13.0:
    cuda/__init__.py, `is_bf16_supported(including_emulation=True)`).

    Args:
        gpu: the GPU; None: no warning.
        arguments: fields of TrainingArguments.
        dtypes: dtypes of the model's weights, such as `"float32"`.
        trained: dtypes of its trained weights.
        config: the DeepSpeed JSON.
    """
    if gpu is None or gpu.bf16:
        return ""
    section = (config or {}).get("bf16", {})
    enabled = section.get("enabled") if isinstance(section, Mapping) else None
    if config is not None:
        uses_bf16 = enabled is True or (enabled == "auto" and arguments.get("bf16") is True)
    elif arguments.get("fp16") is True:
        uses_bf16 = False  # autocast casts the inputs of products
    else:
        uses_bf16 = arguments.get("bf16") is True or "bfloat16" in dtypes
    if not uses_bf16:
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
    """`emulated_bf16` for a setup."""
    return emulated_bf16(
        setup.job.machine.gpu if setup.job is not None else None,
        setup.arguments,
        dtypes=() if "model.quantization" in setup else (_dtype(setup),),
        trained=_trained(setup),
        config=setup.get("deepspeed.config"),
    )


def unscaled_bf16(*, has_bf16: bool) -> str:
    """Message for bf16 weights under `fp16=True`, with both fixes; one needs a GPU that computes in bf16. torch:
    `"_amp_foreach_non_finite_check_and_unscale_cuda" not implemented for 'BFloat16'` (pytorch 2.13.0:
    aten/src/ATen/native/cuda/AmpKernels.cu)."""
    other = "write bf16=True instead of fp16=True" if has_bf16 else "use bf16=True on a GPU of compute capability 8.0"
    return (
        "fp16=True with weights in bfloat16: the run stops in its first optimizer step: CUDA has no kernel that "
        f'unscales bfloat16 gradients; load the weights with dtype="float32" in from_pretrained, or {other}'
    )


def unscaled_by_setup(setup: Setup) -> str:
    """`unscaled_bf16` for a setup; empty if it does not apply. DeepSpeed scales the loss itself."""
    if setup.arguments.get("fp16") is not True or "deepspeed.config" in setup or "bfloat16" not in _trained(setup):
        return ""
    return unscaled_bf16(has_bf16=setup.resolved_for.bf16)


def _dtype(setup: Setup) -> str:
    """Dtype of the weights: the setup's, otherwise the checkpoint's (transformers 5.23.0: `dtype="auto"`)."""
    stored = str(setup.get("model.architecture", {}).get("dtype") or "").removeprefix("torch.")
    return str(setup.get("model.dtype") or stored or "float32")


def _trained(setup: Setup) -> tuple[str, ...]:
    """Dtypes of the trained weights; PEFT keeps adapters in fp32."""
    return () if "model.quantization" in setup or setup.section("adapter") else (_dtype(setup),)
