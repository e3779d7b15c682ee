"""How much goes through the model. In: the arguments of its forwards. Out: samples, tokens and the longest sequence.

Only `.shape` is read, which never waits for the device.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

__all__ = ["InputCounter"]

# The second dimension of these is the sequence. Of pictures and sound it is channels or features, and no tokens.
_TEXT = ("input_ids", "inputs_embeds", "decoder_input_ids")
_OTHER = ("pixel_values", "input_features", "input_values")


class InputCounter:
    """Adds up the training forwards of one accumulation window."""

    def __init__(self) -> None:
        self.micro_batches = 0
        self._samples = 0
        self._tokens = 0
        self._longest = 0

    def add(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """One forward."""
        self.micro_batches += 1
        name, tensor = _main_input(args, kwargs)
        if tensor is None or tensor.dim() == 0:
            return
        self._samples += tensor.shape[0]
        if name in _TEXT and tensor.dim() >= 2:
            self._tokens += tensor.shape[0] * tensor.shape[1]
            self._longest = max(self._longest, tensor.shape[1])

    def fields(self) -> dict[str, int]:
        """`samples`, `tokens`, `longest_sequence`: those that were seen."""
        found = {"samples": self._samples, "tokens": self._tokens, "longest_sequence": self._longest}
        return {name: value for name, value in found.items() if value}


def _main_input(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[str, torch.Tensor | None]:
    for name in (*_TEXT, *_OTHER):
        if isinstance(kwargs.get(name), torch.Tensor):
            return name, kwargs[name]
    if args and isinstance(args[0], torch.Tensor):
        # The first argument of a language model's forward is input_ids: whole numbers, batch × sequence.
        is_text = args[0].dim() == 2 and not args[0].is_floating_point()
        return ("input_ids" if is_text else ""), args[0]
    return "", next((v for v in kwargs.values() if isinstance(v, torch.Tensor) and v.dim() >= 2), None)
