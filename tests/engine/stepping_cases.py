"""Which optimizer the real engine steps with, for what `hf_memkit.deepspeed.optimizer` says of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from tests.engine.preset_cases import small_config
from tests.engine.tiny_training import LossTrainer, cpu_arguments, load_model

_KEEP: Final = {"zero_force_ds_cpu_optimizer": False}
_PARAMETERS: Final = {"lr": "auto", "weight_decay": "auto"}

CASES: Final[dict[str, tuple[str, str, dict[str, Any]]]] = {
    "AdamW, offloaded": ("zero2-offload", "adamw_torch", {}),
    "AdamW, offloaded, kept": ("zero2-offload", "adamw_torch", _KEEP),
    "SGD, offloaded": ("zero2-offload", "sgd", {}),
    "SGD, offloaded, kept": ("zero2-offload", "sgd", _KEEP),
    "SGD, on the GPU": ("zero2", "sgd", {}),
    "Adagrad, offloaded": ("zero2-offload", "adagrad", {}),
    "Adagrad, offloaded, kept": ("zero2-offload", "adagrad", _KEEP),
    "Adagrad, ZeRO-3": ("zero3", "adagrad", {}),
    "AdamW of the JSON, offloaded": ("zero2-offload", "sgd", {"optimizer": {"type": "AdamW", "params": _PARAMETERS}}),
    "torch's AdamW of the JSON": (
        "zero2",
        "sgd",
        {"optimizer": {"type": "AdamW", "params": {**_PARAMETERS, "torch_adam": True}}},
    ),
    "Adagrad of the JSON": ("zero3", "adagrad", {"optimizer": {"type": "Adagrad", "params": _PARAMETERS}}),
}
"""Name → preset, `optim`, what is added to the JSON."""


def config_of(name: str) -> tuple[dict[str, Any], str]:
    preset, optim, added = CASES[name]
    return {**small_config(preset, "/nowhere"), **added}, optim


def stepping_class(name: str, initial: Path, output: Path) -> str:
    """Class of the optimizer that makes one step, or the error that ends it."""
    config, optim = config_of(name)
    arguments = cpu_arguments(output, deepspeed=config, optim=optim, max_steps=1)
    trainer = LossTrainer(load_model(initial, bf16_weights=False, lora=False), arguments)
    try:
        trainer.train()
    except (TypeError, IndexError) as error:
        return type(error).__name__
    finally:
        if trainer.deepspeed is not None:
            trainer.deepspeed.destroy()
    return type(trainer.deepspeed.basic_optimizer).__name__
