"""Which linear layers get an adapter, and the sizes of what is trained then.

In: a model's shapes and the fields of a `LoraConfig`. Out: layers and elements, computed without PEFT.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from hf_memkit.catalog.models import Linear, ModelFacts

ALL_LINEAR: Final = "all-linear"
"""PEFT's word for every linear layer but the one that makes the logits (peft: tuners/tuners_utils.py)."""


def adapted(model: ModelFacts, adapter: Mapping[str, Any]) -> tuple[Linear, ...]:
    """The linear layers that get an adapter.

    `target_modules` is read as PEFT reads it (peft 0.21.2: tuners/tuners_utils.py, `check_target_module_exists`): a
    list holds whole names or their ends, a string is "all-linear" or a regular expression. Without it PEFT takes a few
    layers by model type; all are counted here, from above.
    """
    targets = adapter.get("target_modules") or ALL_LINEAR
    excluded = adapter.get("exclude_modules") or ()
    if isinstance(targets, str) and targets.lower() == ALL_LINEAR:
        chosen = [layer for layer in model.linears if not layer.head]
    else:
        chosen = [layer for layer in model.linears if named(layer.name, targets)]
    return tuple(layer for layer in chosen if not named(layer.name, excluded))


def adapter_tensors(model: ModelFacts, adapter: Mapping[str, Any]) -> tuple[int, ...]:
    """Elements of each adapter parameter, in the order of the modules: rank × inputs, then outputs × rank (Hu et al.
    2021, arXiv 2106.09685, section 4). Empty without adapters."""
    if not adapter:
        return ()
    rank = int(adapter.get("r", 8))
    return tuple(size for layer in adapted(model, adapter) for size in (rank * layer.inputs, layer.outputs * rank))


def named(name: str, patterns: Any) -> bool:
    """Whether a module's name is, or ends with, one of `patterns`; a string is a regular expression."""
    if isinstance(patterns, str):
        return re.fullmatch(patterns, name) is not None
    return any(name == pattern or name.endswith(f".{pattern}") for pattern in patterns)
