"""How much goes through the model. In: the arguments of its forwards. Out: samples, tokens and the longest sequence.

Only `.shape` is read, which never waits for the device.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch

from hf_memkit.measuring.record_types import OomRecord, StepRecord

# The second dimension of these is the sequence. Of pictures and sound it is channels or features, and no tokens.
_TEXT = ("input_ids", "inputs_embeds", "decoder_input_ids")
_OTHER = ("pixel_values", "input_features", "input_values")


class InputCounter:
    """Adds up the training forwards of one accumulation window. Who counts its micro-batches sets `micro_batches`."""

    def __init__(self) -> None:
        self.micro_batches = 0
        self._samples = 0
        self._tokens = 0
        self._longest = 0
        self._last: tuple[int, int, int] = (0, 0, 0)
        self._shapes: dict[str, torch.Size] = {}

    def add(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
        """One forward; returns its tokens, or samples where there are no tokens."""
        self._shapes = {name: value.shape for name, value in kwargs.items() if isinstance(value, torch.Tensor)}
        self._last = (0, 0, 0)
        name, tensor = _main_input(args, kwargs)
        if tensor is None or tensor.dim() == 0:
            return 0
        samples, tokens, longest = tensor.shape[0], 0, 0
        if name in _TEXT and tensor.dim() >= 2:
            tokens, longest = samples * tensor.shape[1], tensor.shape[1]
        self._last = (samples, tokens, longest)
        self._samples += samples
        self._tokens += tokens
        self._longest = max(self._longest, longest)
        return tokens or samples

    def fields(self) -> StepRecord:
        """`samples`, `tokens`, `longest_sequence`, `micro_batches`: those that were seen."""
        found = _known(self._samples, self._tokens, self._longest, micro_batches=self.micro_batches)
        return cast(StepRecord, found)

    def last(self) -> OomRecord:
        """The same of the last forward, which micro-batch it belongs to (from 1), and its `inputs` as shapes."""
        found: dict[str, Any] = _known(*self._last, micro_batch=self.micro_batches)
        shapes = {name: list(shape) for name, shape in self._shapes.items()}
        return cast(OomRecord, {**found, "inputs": shapes} if shapes else found)


def _known(samples: int, tokens: int, longest: int, **counts: int) -> dict[str, int]:
    found = {"samples": samples, "tokens": tokens, "longest_sequence": longest, **counts}
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
