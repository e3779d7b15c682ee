"""Settings that a CPU cannot use, and their replacements, for rehearsals and for `use_cpu`."""

from __future__ import annotations

from collections.abc import Container
from typing import Any, Final

from hf_memkit.catalog.optimizers import find_optimizer
from hf_memkit.setup.setup import Setting, Setup

PAGE_LOCKED: Final = "page-locked memory needs a CUDA driver"
_ALLOCATOR: Final = "environment.PYTORCH_ALLOC_CONF"
_CHECKPOINTING: Final = "arguments.activation_checkpointing_kwargs"
_ATTENTION: Final = "model.attn_implementation"
_OFFLOAD: Final = "trainer_parts.cpu_offload_optimizer"
_FSDP: Final = "arguments.fsdp_config"

_CUDA_ONLY: Final = {
    "arguments.tf32": "TrainingArguments rejects it without a GPU of Ampere or later",
    "arguments.torch_compile": "compiling for a CPU takes longer than a rehearsal",
    "arguments.torch_compile_backend": "nothing is compiled here",
    "arguments.torch_compile_mode": "nothing is compiled here",
    "trainer_parts.recompilation_guard": "nothing is compiled here",
    "arguments.use_liger_kernel": "Liger's kernels are for CUDA",
    _ATTENTION: "its kernels are for CUDA",
    "model.device_map": "no GPU to load the weights to",
}
"""Omitted setting → reason."""

_REFUSED: Final = ("arguments.use_liger_kernel", _ATTENTION)
"""Omitted settings that are a whole technique: a rule refuses them together with `use_cpu`."""

_SLOW: Final = (
    "arguments.torch_compile", "arguments.torch_compile_backend", "arguments.torch_compile_mode",
    "trainer_parts.recompilation_guard",
)  # fmt: skip
"""Omitted settings that a CPU can use, but too slowly for a rehearsal."""


def without_gpu(
    setup: Setup, *, rehearsal: bool = False, keep: Container[str] = ()
) -> tuple[Setup, tuple[Setting, ...]]:
    """Adapt `setup` to a CPU.

    Args:
        rehearsal: whether settings are imitated as far as a CPU can (activations are offloaded to plain memory), and
            slow ones omitted (nothing is compiled).
        keep: fields of TrainingArguments to keep, because the user set them.

    Returns:
        The setup, and the omitted settings, each with its value and the reason.
    """
    left_out: list[Setting] = []

    def is_changeable(key: str) -> bool:
        return key in setup and key.removeprefix("arguments.") not in keep

    def leave_out(key: str, value: Any, reason: str) -> str:
        left_out.append(Setting(key, value, reason))
        return reason

    if is_changeable(_ALLOCATOR):
        leave_out(_ALLOCATOR, setup[_ALLOCATOR], "a setting of the CUDA allocator")
        setup = setup.drop(_ALLOCATOR)
    if rehearsal and find_optimizer(str(setup.get("optimizer.class") or "")).compiled:
        why = "the step runs as written: compiling it for a CPU takes longer than the rehearsal"
        setup = setup.put("optimizer.compiled", False, leave_out("optimizer.compiled", True, why))
    if is_changeable(_CHECKPOINTING) and setup[_CHECKPOINTING].get("offload"):
        options = setup[_CHECKPOINTING]
        if rehearsal:
            # Trainer offloads checkpointed activations to page-locked memory only (transformers 5.23.0:
            # `save_on_cpu(pin_memory=True)`): a component keeps them in plain memory instead.
            why = leave_out(_CHECKPOINTING, options, f"{PAGE_LOCKED}; the activations go to plain memory")
            setup = setup.put("arguments.activation_checkpointing", False, why)
            setup = setup.drop(_CHECKPOINTING)
            setup = setup.put("model_parts.checkpoint_offload", {"pin_memory": False}, why)
        else:
            why = leave_out(f"{_CHECKPOINTING}.offload", True, PAGE_LOCKED)
            setup = setup.put(_CHECKPOINTING, {k: v for k, v in options.items() if k != "offload"}, why)

    if is_changeable(_FSDP) and rehearsal:
        config = setup[_FSDP]
        setup = setup.drop("arguments.ddp_backend")  # gloo alone
        if config.pop("cpu_offload", False):
            why = leave_out(_FSDP, {"cpu_offload": True}, f"{PAGE_LOCKED}; the shares stay where the CPU computes")
            setup = setup.put(_FSDP, config, why)
        why = "accelerate shards on GPUs only; this makes it shard on CPUs"
        setup = setup.put("trainer_parts.fsdp2_on_cpu", {}, why)
    elif is_changeable(_FSDP):
        why = "accelerate shards on GPUs only, and would silently copy the model to each process"
        for key in ("arguments.fsdp", _FSDP, "arguments.ddp_backend", "environment.ACCELERATE_USE_FSDP"):
            if is_changeable(key):
                leave_out(key, setup[key], why)
                setup = setup.drop(key)
        if setup.get("arguments.activation_checkpointing") is None:  # FSDP's checkpointing went with it
            setup = setup.drop("trainer_parts.verify_checkpointing")

    unpaged = find_optimizer(str(setup.get("arguments.optim") or "")).unpaged
    if is_changeable("arguments.optim") and unpaged:
        why = "paged states lie in CUDA's unified memory; the same optimizer runs without paging"
        setup = setup.put("arguments.optim", unpaged, leave_out("arguments.optim", setup["arguments.optim"], why))

    for key, why in _CUDA_ONLY.items():
        stays = key in (*_SLOW, *_REFUSED) and not rehearsal
        stays = stays or (key == _ATTENTION and setup.get(key) in ("sdpa", "eager"))
        if is_changeable(key) and not stays:
            leave_out(key, setup[key], why)
            setup = setup.drop(key)

    if is_changeable(_OFFLOAD):
        options = setup[_OFFLOAD]
        why = "no GPU to offload from: plain AdamW steps, and Trainer clips"
        setup = setup.drop(_OFFLOAD)
        leave_out(_OFFLOAD, options, why)
        if "max_grad_norm" not in keep:
            setup = setup.put("arguments.max_grad_norm", options.get("max_grad_norm", 1.0), why)
    return setup, tuple(left_out)


def unpin_optimizer(config: dict[str, Any]) -> bool:
    """Remove page-locking of an offloaded optimizer from a DeepSpeed JSON. Returns whether there was any."""
    offload = config.get("zero_optimization", {}).get("offload_optimizer", {})
    if offload.get("device") != "cpu" or not offload.get("pin_memory"):
        return False
    offload["pin_memory"] = False
    return True
