"""What a run is: the fields of a `run` record. In: Trainer's arguments, model, optimizer. Out: plain data."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from typing import Any

import psutil
import torch
from torch import nn

from hf_memkit._version import __version__
from hf_memkit.memory.categories import optimizer_chain
from hf_memkit.units import GIB

__all__ = ["arguments_that_matter", "hardware", "is_deepspeed", "model_facts", "optimizer_facts", "versions"]

_PACKAGES = ("torch", "transformers", "accelerate", "deepspeed", "peft")

_ARGUMENTS = (
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "max_steps",
    "num_train_epochs",
    "optim",
    "bf16",
    "fp16",
    "learning_rate",
    "seed",
    "torch_compile",
    "use_liger_kernel",
)


def versions() -> dict[str, str]:
    """memkit, python and the packages that are installed; none of them is imported for it."""
    found = {"hf_memkit": __version__, "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def hardware(device: torch.device | None) -> dict[str, Any]:
    """The machine, and the card that is trained on if there is one."""
    facts: dict[str, Any] = {"cpu_count": os.cpu_count(), "ram_gib": psutil.virtual_memory().total / GIB}
    if device is None or device.type != "cuda":
        return {"device_name": platform.processor() or platform.machine(), "device_type": "cpu", **facts}
    facts["device_name"] = torch.cuda.get_device_name(device)
    facts["device_type"] = "cuda"
    facts["device_count"] = torch.cuda.device_count()
    # Below 1 somebody (a test on a bigger card, say) has capped the allocator: it fails before the card is full.
    facts["allocator_cap_fraction"] = torch.cuda.get_per_process_memory_fraction(device)
    return facts


def arguments_that_matter(args: Any) -> dict[str, Any]:
    """The training arguments that decide memory, under the names of today's transformers."""
    facts: dict[str, Any] = {}
    for name in _ARGUMENTS:
        value = getattr(args, name, None)
        if value is not None:
            facts[name] = getattr(value, "value", value)  # `optim` is an enum
    # transformers 5.23 renamed gradient_checkpointing; either name may have been used, and either may be None.
    both = (getattr(args, "activation_checkpointing", None), getattr(args, "gradient_checkpointing", None))
    facts["activation_checkpointing"] = any(both)
    stage = _deepspeed_stage(args)
    if stage is not None:
        facts["deepspeed_stage"] = stage
    return facts


def is_deepspeed(args: Any, optimizer: Any = None) -> bool:
    """Whether DeepSpeed runs the optimizer, inside backward."""
    return getattr(args, "deepspeed_plugin", None) is not None or any(
        name.startswith("DeepSpeed") for name in optimizer_chain(optimizer)
    )


def model_facts(model: nn.Module) -> dict[str, Any]:
    """Class and size; a parameter that ZeRO-3 has partitioned counts whole."""
    sizes = [(int(getattr(p, "ds_numel", p.numel())), p.requires_grad) for p in model.parameters()]
    return {
        "model_class": type(model).__name__,
        "parameters": sum(size for size, _ in sizes),
        "trainable_parameters": sum(size for size, trainable in sizes if trainable),
    }


def optimizer_facts(optimizer: Any) -> dict[str, Any]:
    """The classes from the outer wrapper to the optimizer that does the work."""
    chain = optimizer_chain(optimizer)
    return {"optimizer_classes": chain} if chain else {}


def _deepspeed_stage(args: Any) -> int | None:
    plugin = getattr(args, "deepspeed_plugin", None)
    config = getattr(getattr(plugin, "hf_ds_config", None), "config", None)
    if not isinstance(config, dict):
        return None
    stage = config.get("zero_optimization", {}).get("stage", 0)
    return stage if isinstance(stage, int) else None
