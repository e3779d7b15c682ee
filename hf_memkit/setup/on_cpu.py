"""What a CPU cannot run of a setup, and what it runs instead: for rehearsals, and where the user says `use_cpu`."""

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
"""Settings that are left out, and why."""

_REFUSED: Final = ("arguments.use_liger_kernel", _ATTENTION)
"""Those of them that are all of a technique: where the user says `use_cpu`, a rule refuses the two together."""

_SLOW: Final = (
    "arguments.torch_compile",
    "arguments.torch_compile_backend",
    "arguments.torch_compile_mode",
    "trainer_parts.recompilation_guard",
)
"""Those of them that a CPU can run, but not within a rehearsal."""


def without_gpu(
    setup: Setup, *, rehearsal: bool = False, keep: Container[str] = ()
) -> tuple[Setup, tuple[Setting, ...]]:
    """`setup` as a CPU can run it, and what is left out of it: each setting with its value there, and the reason.

    Args:
        rehearsal: what is left out is to be rehearsed as far as a CPU goes (activations are offloaded to plain
            memory), and within minutes (nothing is compiled).
        keep: fields of TrainingArguments that stay as they are, because the user gave them.
    """
    left_out: list[Setting] = []

    def found(key: str) -> bool:
        return key in setup and key.removeprefix("arguments.") not in keep

    def leave_out(key: str, value: Any, reason: str) -> str:
        left_out.append(Setting(key, value, reason))
        return reason

    if found(_ALLOCATOR):
        leave_out(_ALLOCATOR, setup[_ALLOCATOR], "a setting of the CUDA allocator")
        setup = setup.drop(_ALLOCATOR)
    if rehearsal and find_optimizer(str(setup.get("optimizer.class") or "")).compiled:
        why = "the step runs as written: compiling it for a CPU takes longer than the rehearsal"
        setup = setup.put("optimizer.compiled", False, leave_out("optimizer.compiled", True, why))
    if found(_CHECKPOINTING) and setup[_CHECKPOINTING].get("offload"):
        options = setup[_CHECKPOINTING]
        if rehearsal:
            # Trainer offloads checkpointed activations to page-locked memory only: a part that keeps them in plain
            # memory stands in (transformers 5.23.0: `save_on_cpu(pin_memory=True)`).
            why = leave_out(_CHECKPOINTING, options, f"{PAGE_LOCKED}; the activations go to plain memory")
            setup = setup.put("arguments.activation_checkpointing", False, why)
            setup = setup.drop(_CHECKPOINTING)  # options of what is switched off
            setup = setup.put("model_parts.checkpoint_offload", {"pin_memory": False}, why)
        else:
            why = leave_out(f"{_CHECKPOINTING}.offload", True, PAGE_LOCKED)
            setup = setup.put(_CHECKPOINTING, {k: v for k, v in options.items() if k != "offload"}, why)
    unpaged = find_optimizer(str(setup.get("arguments.optim") or "")).unpaged
    if found("arguments.optim") and unpaged:
        why = "paged states lie in CUDA's unified memory; the same optimizer runs without paging"
        setup = setup.put("arguments.optim", unpaged, leave_out("arguments.optim", setup["arguments.optim"], why))
    for key, why in _CUDA_ONLY.items():
        stays = key in (*_SLOW, *_REFUSED) and not rehearsal
        stays = stays or (key == _ATTENTION and setup.get(key) in ("sdpa", "eager"))
        if found(key) and not stays:
            leave_out(key, setup[key], why)
            setup = setup.drop(key)
    if found(_OFFLOAD):
        options = setup[_OFFLOAD]
        why = "no GPU to offload from: plain AdamW steps, and Trainer clips"
        setup = setup.drop(_OFFLOAD)
        leave_out(_OFFLOAD, options, why)
        if "max_grad_norm" not in keep:
            setup = setup.put("arguments.max_grad_norm", options.get("max_grad_norm", 1.0), why)
    return setup, tuple(left_out)


def unpin_optimizer(config: dict[str, Any]) -> bool:
    """Takes page-locking of an optimizer in RAM out of a DeepSpeed JSON; whether there was any."""
    offload = config.get("zero_optimization", {}).get("offload_optimizer", {})
    if offload.get("device") != "cpu" or not offload.get("pin_memory"):
        return False
    offload["pin_memory"] = False
    return True
