"""The optimizer that steps under DeepSpeed. With an offloaded optimizer accelerate silently replaces Trainer's by one
of DeepSpeed's for the CPU (accelerate 1.15: accelerator.py 2373, utils/deepspeed.py 29); with an optimizer in the JSON
Trainer's `optim` has no effect (transformers 5.23: integrations/deepspeed.py 576)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hf_memkit.catalog.optimizers import find_optimizer
from hf_memkit.deepspeed.settings import ZeroSettings


@dataclass(frozen=True, slots=True)
class SteppingOptimizer:
    """The optimizer that steps."""

    optimizer: str | None  # its class; None: Trainer's optimizer, as in `optim`
    same_algorithm: bool  # whether it computes the same as `optim`
    why: str  # the reason in one line


def stepping_optimizer(config: Mapping[str, Any], optim: str) -> SteppingOptimizer:
    """The optimizer that steps with this DeepSpeed JSON and Trainer's `optim`."""
    settings = ZeroSettings.from_config(config)
    offloaded = settings.optimizer.device != "none"
    if settings.optimizer_type is not None:
        return _optimizer_of_json(config, settings.optimizer_type, optim, offloaded=offloaded)
    kept = not offloaded or config.get("zero_force_ds_cpu_optimizer") is False
    if optim == "adagrad" and settings.stage and kept:
        # deepspeed 0.19.8: runtime/zero/stage3.py 1363, stage_1_and_2.py 947
        why = "ZeRO turns Trainer's Adagrad with two parameter groups into one with a single group: IndexError"
        return SteppingOptimizer(None, False, why)
    if not offloaded:
        return SteppingOptimizer(None, True, "nothing is offloaded: Trainer's own optimizer steps")
    if kept:
        return SteppingOptimizer(
            None, True, "zero_force_ds_cpu_optimizer is false: Trainer's own optimizer steps on the CPU"
        )
    if find_optimizer(optim).deepspeed == "lion":
        return SteppingOptimizer("DeepSpeedCPULion", True, "accelerate replaces it with DeepSpeed's Lion for the CPU")
    if optim == "adagrad":
        why = "accelerate replaces it with DeepSpeedCPUAdagrad and passes an argument it does not accept: TypeError"
        return SteppingOptimizer("DeepSpeedCPUAdagrad", False, why)
    if find_optimizer(optim).deepspeed == "adamw":
        return SteppingOptimizer("DeepSpeedCPUAdam", True, "accelerate replaces it with DeepSpeed's AdamW for the CPU")
    if "adafactor" in optim:
        why = f"accelerate replaces {optim} with DeepSpeedCPUAdam, which cannot read its learning rate: TypeError"
        return SteppingOptimizer("DeepSpeedCPUAdam", False, why)
    why = f"accelerate silently replaces {optim} with DeepSpeedCPUAdam, which uses L2 decay"
    return SteppingOptimizer("DeepSpeedCPUAdam", False, why)


def _optimizer_of_json(config: Mapping[str, Any], kind: str, optim: str, *, offloaded: bool) -> SteppingOptimizer:
    """An optimizer of the JSON (deepspeed 0.19.8: runtime/engine.py 2476)."""
    name = kind.lower()
    parameters = config["optimizer"].get("params")
    torch_adam = isinstance(parameters, Mapping) and parameters.get("torch_adam") is True
    if name in ("adam", "adamw"):
        optimizer = "DeepSpeedCPUAdam" if offloaded else "FusedAdam"
        same = find_optimizer(optim).deepspeed == "adamw"
        if torch_adam:
            optimizer = "AdamW"
    elif name == "lion":
        optimizer = "DeepSpeedCPULion" if offloaded else "FusedLion"
        same = find_optimizer(optim).deepspeed == "lion"
    elif name == "adagrad":
        optimizer = "DeepSpeedCPUAdagrad" if offloaded else "Adagrad"
        same = optim == "adagrad"
    else:
        optimizer = kind
        same = optim == name
    why = f"the DeepSpeed JSON has an optimizer, {kind}: optim has no effect; delete the section to use optim"
    return SteppingOptimizer(optimizer, same, why)
