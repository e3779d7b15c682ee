"""Linear layers that get an adapter, and the sizes of the adapter's parameters, computed without PEFT."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from hf_memkit.catalog.models import Linear, ModelFacts

ALL_LINEAR: Final = "all-linear"
"""PEFT's name for all linear layers except the one that computes the logits (peft: tuners/tuners_utils.py)."""


def adapted_layers(model: ModelFacts, adapter: Mapping[str, Any]) -> tuple[Linear, ...]:
    """The linear layers that get an adapter. `target_modules` is read as in PEFT (peft 0.21.2: tuners/tuners_utils.py,
    `check_target_module_exists`): a list holds whole names or their ends, a string is "all-linear" or a regular
    expression. Without it PEFT chooses a few layers by model type; here all are counted, an upper bound."""
    targets = adapter.get("target_modules") or ALL_LINEAR
    excluded = adapter.get("exclude_modules") or ()
    if isinstance(targets, str) and targets.lower() == ALL_LINEAR:
        chosen = [layer for layer in model.linears if not layer.head]
    else:
        chosen = [layer for layer in model.linears if matches_any(layer.name, targets)]
    return tuple(layer for layer in chosen if not matches_any(layer.name, excluded))


def adapter_tensors(model: ModelFacts, adapter: Mapping[str, Any]) -> tuple[int, ...]:
    """Elements of each adapter parameter in module order: rank × inputs, then outputs × rank (Hu et al. 2021, arXiv
    2106.09685, section 4). Empty without adapters."""
    if not adapter:
        return ()
    rank = int(adapter.get("r", 8))
    layers = adapted_layers(model, adapter)
    return tuple(size for layer in layers for size in (rank * layer.inputs, layer.outputs * rank))


def matches_any(name: str, patterns: Any) -> bool:
    """Whether a module's name is, or ends with, one of `patterns`; a string is a regular expression."""
    if isinstance(patterns, str):
        return re.fullmatch(patterns, name) is not None
    return any(name == pattern or name.endswith(f".{pattern}") for pattern in patterns)
