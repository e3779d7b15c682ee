"""Every difference between supported versions of transformers, torch, accelerate and deepspeed. Here only.

Supported: transformers 5.17 to 5.x, torch 2.11 and later, deepspeed 0.19 and later.
"""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any

__all__ = ["argument_names", "to_installed_arguments"]

# transformers 5.23 renamed these fields; the old names are deprecated there, and the new ones unknown before.
# Source: transformers/training_args.py, 5.22.0 and 5.23.0.
_RENAMED = {
    "activation_checkpointing": "gradient_checkpointing",
    "activation_checkpointing_kwargs": "gradient_checkpointing_kwargs",
}


@cache
def argument_names() -> frozenset[str]:
    """The fields of the installed `transformers.TrainingArguments`."""
    from transformers import TrainingArguments

    return frozenset(field.name for field in dataclasses.fields(TrainingArguments))


def to_installed_arguments(arguments: dict[str, Any]) -> dict[str, Any]:
    """`arguments`, written with today's names, under the names that the installed transformers knows.

    >>> to_installed_arguments({"activation_checkpointing": True})  # on transformers 5.22
    {'gradient_checkpointing': True}
    """
    known = argument_names()
    return {
        _RENAMED[name] if name in _RENAMED and name not in known else name: value
        for name, value in arguments.items()
    }
