"""Which architectures transformers saves under other names of weights than the model has."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


def saved_under_other_names(config: Mapping[str, Any]) -> bool | None:
    """Whether the installed transformers renames or splits weights when it saves a model with this config; None if it
    does not tell: transformers 4, or none. Imports torch.

    A prefix alone does not count: it is written only if the model was read with it (transformers 5.23.0:
    core_model_loading.py 1896-1903).
    """
    try:
        from transformers.conversion_mapping import get_checkpoint_conversion_mapping
        from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES
    except ImportError:
        return None
    for name in {*_names(config, MODEL_MAPPING_NAMES)}:
        changes = get_checkpoint_conversion_mapping(name) or ()
        if any(type(change).__name__ != "PrefixChange" for change in changes):
            return True
    return False


def _names(config: Mapping[str, Any], classes: Mapping[str, Any]) -> Iterator[str]:
    """Names under which transformers may list changes: types and classes of the model, and of the models in it."""
    if isinstance(kind := config.get("model_type"), str):
        own = classes.get(kind, ())
        yield from (kind, *((own,) if isinstance(own, str) else own), *(config.get("architectures") or ()))
    for part in config.values():
        if isinstance(part, Mapping):
            yield from _names(part, classes)
