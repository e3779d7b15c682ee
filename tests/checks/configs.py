"""Small DeepSpeed configs for tests, made without importing any library."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

AUTO = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
    "fp16": {"enabled": "auto"},
}
ADAMW = {
    "type": "AdamW",
    "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto", "torch_adam": True},
}
"""`torch_adam` keeps DeepSpeed from compiling its FusedAdam."""

GONE = object()


def ds(stage: int, changes: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """A DeepSpeed config of this stage with small buffers, changed at dotted paths; GONE deletes a key."""
    zero: dict[str, Any] = {"stage": stage, "reduce_bucket_size": 20000}
    if stage == 3:
        zero |= {"sub_group_size": 10_000_000, "stage3_gather_16bit_weights_on_model_save": True}
    config: dict[str, Any] = {**copy.deepcopy(AUTO), "zero_optimization": zero}
    for path, value in (changes or {}).items():
        *sections, name = path.split(".")
        node = config
        for section in sections:
            node = node.setdefault(section, {})
        if value is GONE:
            del node[name]
        else:
            node[name] = copy.deepcopy(value)
    return config
