"""A collator that joins whole sequences in rows, instead of padding each to the longest.

Two forms. Padding-free: the whole micro-batch in one row without padding. Packed: rows of a fixed length, filled with
as many whole sequences as fit (first fit, longest first); only the rest of a row is padded.

Sequences in one row must not affect each other. transformers builds the mask for that from position ids that restart
at 0, if the model passes them on, without an attention mask and a cache (transformers 5.23.0: masking_utils.py
873-883). Other models silently read the row as one text. Therefore the model is tested first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DataCollatorWithFlattening, TrainerCallback

_IGNORED = -100  # labels that the loss ignores (torch: cross_entropy, `ignore_index`)


def trainer_options(
    *, model: nn.Module, processing_class: Any, arguments: Any, length: int | None = None
) -> dict[str, Any]:
    """`data_collator`, after a test of the model; with GPU-only attention a callback tests it when training begins.

    Args:
        model: the model as Trainer gets it.
        processing_class: the tokenizer, for its padding token; not needed without `length`.
        arguments: the TrainingArguments.
        length: tokens in a row; None: one row, of any length (padding-free).

    Raises:
        ValueError: `length` is too large for the model, or its attention cannot separate samples in several rows.
        RuntimeError: sequences in one row affect each other in this model.
    """
    attention = str(getattr(getattr(model, "config", None), "_attn_implementation", "") or "")
    flash = "flash" in attention  # also `kernels-community/flash-attn2`
    if getattr(arguments, "use_cache", False):
        raise ValueError("use_cache=True: with a cache the model reads a row as one text. Write use_cache=False")
    longest = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    if length is not None:
        if not isinstance(length, int) or isinstance(length, bool) or length < 2:
            raise ValueError(f"length={length!r}: must be a whole number, at least 2")
        if longest is not None and length > longest:
            raise ValueError(f"length={length}: the model has {longest} positions. Give {longest} or less")
        if flash:
            raise ValueError(
                f"{attention} separates samples only in a batch of one row. Use padding-free instead of packing"
            )
    callbacks: list[Any] = []
    if flash:
        callbacks.append(_TestOnDevice())  # this attention cannot run on the CPU, and the model is not on its GPU yet
    elif not _partitioned(model):
        _refuse_leaks(model)
    if length is None:
        return {"data_collator": PaddingFree(flash=flash), "callbacks": callbacks}
    padding = getattr(processing_class, "pad_token_id", None)
    return {"data_collator": PackedRows(length, padding=padding or 0), "callbacks": callbacks}


def leaks(model: nn.Module, autocast: torch.dtype | None = None) -> bool:
    """Whether sequences in one row affect each other although their position ids restart. Runs two forward passes over
    11 tokens, without gradients, in evaluation mode and without a cache. The model does not change. NaN logits count
    as a leak, because they cannot be compared. `autocast`: the dtype to compute in. Default: that of the weights."""
    device = next(model.parameters()).device
    first = torch.arange(1, 7)  # any tokens that every vocabulary has
    second = torch.arange(2, 7)
    rows = (torch.cat([first, second]), torch.cat([first.flip(0), second]))
    positions = torch.cat([torch.arange(len(first)), torch.arange(len(second))])[None].to(device)
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad(), torch.autocast(device.type, dtype=autocast, enabled=autocast is not None):
            outputs = [
                model(input_ids=row[None].to(device), position_ids=positions, use_cache=False).logits for row in rows
            ]
    finally:
        for module, mode in modes.items():
            module.training = mode
    # A masked sequence adds exact zeros. Only in a mixture of experts other tokens change how a batch is divided
    # among the experts, and with it the rounding.
    first_logits, second_logits = (output[:, len(first) :].float() for output in outputs)
    mixture = any("expert" in name for name in vars(getattr(model, "config", None) or object))
    eps = torch.finfo(autocast or outputs[0].dtype).eps
    roundings = 64 if eps < 1e-5 else 4
    tolerance = roundings * eps * float(first_logits.abs().max()) if mixture else 0.0
    return not bool((first_logits - second_logits).abs().max() <= tolerance)  # True for NaN as well


def _refuse_leaks(model: nn.Module, autocast: torch.dtype | None = None) -> None:
    name = type(model).__name__
    try:
        leaking = leaks(model, autocast)
    except (TypeError, ValueError, RuntimeError, NotImplementedError, AttributeError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise RuntimeError(
            f"{name}: a trial with two samples in one row failed ({reason}). Pad instead: technique pad-to-multiple"
        ) from error
    if leaking:
        raise RuntimeError(
            f"{name}: samples in one row affect each other, because position_ids do not separate them. Pad instead: "
            "technique pad-to-multiple"
        )


def _partitioned(model: nn.Module) -> bool:
    """Whether some weights are missing in this process: partitioned by ZeRO-3, or on the meta device."""
    return any(hasattr(parameter, "ds_id") or parameter.is_meta for parameter in model.parameters())


class _TestOnDevice(TrainerCallback):  # type: ignore[misc]
    """Tests the model when training begins, because it is on its GPU then."""

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if model is not None and not _partitioned(model):
            # Flash attention computes in 16 bits only; so does the training, through autocast or 16-bit weights.
            sixteen_bit = torch.float16 if args.fp16 else None
            _refuse_leaks(model, torch.bfloat16 if args.bf16 else sixteen_bit)


class PaddingFree:
    """Collator: a list of samples → `input_ids`, `labels` and `position_ids` of shape (1, all tokens).

    Uses transformers' DataCollatorWithFlattening, which ignores attention masks; so padding is removed first.
    """

    def __init__(self, *, flash: bool = False) -> None:
        # With given boundaries flash attention does not search them in every layer, which waits for the GPU.
        self._flatten = DataCollatorWithFlattening(return_flash_attn_kwargs=flash)

    def __call__(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        return dict(self._flatten([_text_of(sample) for sample in samples]))


class PackedRows:
    """Collator: a list of samples → `input_ids`, `labels` and `position_ids` of shape (rows, `length`)."""

    def __init__(self, length: int, *, padding: int = 0) -> None:
        self.length = length
        self._padding = padding

    def __call__(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """The batch, packed by first fit, longest samples first."""
        texts = sorted((_text_of(sample) for sample in samples), key=lambda text: -len(text["input_ids"]))
        rows: list[list[dict[str, list[int]]]] = []
        left: list[int] = []
        for text in texts:
            size = len(text["input_ids"])
            if size > self.length:
                raise ValueError(
                    f"a sample has {size} tokens, and a row {self.length}. Truncate it, or give a larger length "
                    "(in a preset: pack_length)"
                )
            fitting = next((number for number, free in enumerate(left) if free >= size), None)
            if fitting is None:
                rows.append([text])
                left.append(self.length - size)
            else:
                rows[fitting].append(text)
                left[fitting] -= size
        batch = {name: torch.tensor([self._row(name, row) for row in rows]) for name in ("input_ids", "labels")}
        batch["position_ids"] = torch.tensor([self._positions(row) for row in rows])
        return batch

    def _row(self, name: str, row: list[dict[str, list[int]]]) -> list[int]:
        fill = self._padding if name == "input_ids" else _IGNORED
        tokens = [token for text in row for token in text[name]]
        return tokens + [fill] * (self.length - len(tokens))

    def _positions(self, row: list[dict[str, list[int]]]) -> list[int]:
        # The padding counts as a separate sequence, so that it and the texts do not attend to each other.
        positions = [position for text in row for position in range(len(text["input_ids"]))]
        return positions + list(range(self.length - len(positions)))


def _text_of(sample: Mapping[str, Any]) -> dict[str, list[int]]:
    """`input_ids` and `labels` of a sample without padding; the first label is ignored: nothing predicts it."""
    if "input_ids" not in sample:
        raise ValueError(f"a sample has no input_ids, only {', '.join(sample)}. Tokenize the data set")
    ids = torch.as_tensor(sample["input_ids"])
    given = sample.get("labels")
    labels = ids if given is None else torch.as_tensor(given)
    if labels.shape != ids.shape:
        raise ValueError(
            f"labels: shape {tuple(labels.shape)} for {len(ids)} tokens. Give one label a token, or pad instead: "
            "technique pad-to-multiple"
        )
    mask = sample.get("attention_mask")
    kept = torch.ones(len(ids), dtype=torch.bool) if mask is None else torch.as_tensor(mask).bool()
    texts = ids[kept].tolist()
    return {"input_ids": texts, "labels": [_IGNORED, *labels[kept].tolist()[1:]]}
