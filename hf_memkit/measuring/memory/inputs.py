"""Samples, tokens and longest sequence in the arguments of forwards. Reading `.shape` never waits for the device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, cast

import torch

from hf_memkit.measuring.record_types import OomRecord, StepRecord

# The second dimension of these is the sequence. Of pictures and sound it is channels or features, and no tokens.
_TEXT = ("input_ids", "inputs_embeds", "decoder_input_ids")
_OTHER = ("pixel_values", "input_features", "input_values")


class InputSize(NamedTuple):
    """Size of the main input of one forward, or of several."""

    samples: int = 0
    tokens: int = 0
    longest_sequence: int = 0


class InputCounter:
    """Counts the training forwards of one accumulation window. The caller counts micro-batches in `micro_batches`."""

    def __init__(self) -> None:
        self.micro_batches = 0
        self._total = InputSize()
        self._last = InputSize()
        self._shapes: dict[str, torch.Size] = {}

    def add(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
        """Count one forward; returns its tokens, or samples if it has no tokens."""
        self._shapes = {name: value.shape for name, value in kwargs.items() if isinstance(value, torch.Tensor)}
        self._last = InputSize()
        name, tensor = _main_input(args, kwargs)
        if tensor is None or tensor.dim() == 0:
            return 0
        samples = tensor.shape[0]
        length = tensor.shape[1] if name in _TEXT and tensor.dim() >= 2 else 0
        total = self._total
        self._last = InputSize(samples, samples * length, length)
        self._total = InputSize(
            total.samples + samples, total.tokens + samples * length, max(total.longest_sequence, length)
        )
        return samples * length or samples

    def fields(self) -> StepRecord:
        """`samples`, `tokens`, `longest_sequence`, `micro_batches`, without zeros."""
        return cast(StepRecord, _nonzero(self._total, micro_batches=self.micro_batches))

    def last(self) -> OomRecord:
        """The same for the last forward, with its micro-batch (from 1), and its `inputs` as shapes."""
        counts: dict[str, Any] = _nonzero(self._last, micro_batch=self.micro_batches)
        shapes = {name: list(shape) for name, shape in self._shapes.items()}
        return cast(OomRecord, {**counts, "inputs": shapes} if shapes else counts)


def _nonzero(size: InputSize, **counts: int) -> dict[str, int]:
    return {name: value for name, value in {**size._asdict(), **counts}.items() if value}


def _main_input(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[str, torch.Tensor | None]:
    for name in (*_TEXT, *_OTHER):
        if isinstance(kwargs.get(name), torch.Tensor):
            return name, kwargs[name]
    if args and isinstance(args[0], torch.Tensor):
        # The first argument of a language model's forward is input_ids: whole numbers, batch × sequence.
        is_text = args[0].dim() == 2 and not args[0].is_floating_point()
        return ("input_ids" if is_text else ""), args[0]
    return "", next((v for v in kwargs.values() if isinstance(v, torch.Tensor) and v.dim() >= 2), None)
