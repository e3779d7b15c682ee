"""A collator that pads each batch to its own longest sample, rounded up to a multiple.

It pads the token inputs and the labels of causal, masked, classification and encoder-decoder models; each collator of
transformers pads some of them. It removes earlier padding, omits inputs that the model does not accept, and never
treats a token of the text as padding (DataCollatorForLanguageModeling drops the labels of GPT-2's end-of-text tokens).
It pads on the right, because GPT-2 and others count positions from the first column.

In causal models the first label of a sample is ignored: nothing predicts it, but Trainer counts it if it does not know
the loss (transformers 5.23.0: trainer.py 2316-2328, `_loss_shifts_labels`), and would divide by too many labels.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

_IGNORED = -100
"""Labels that the loss leaves out (torch.nn.functional.cross_entropy, `ignore_index`)."""

_DECODER_INPUTS = frozenset({"labels", "decoder_input_ids", "decoder_attention_mask"})
"""Inputs of an encoder-decoder model that are as long as the text for its decoder."""


def trainer_options(*, model: nn.Module, processing_class: Any, arguments: Any, multiple: int = 8) -> dict[str, Any]:
    """`data_collator`: pads to the batch's longest sample, rounded up to `multiple` tokens.

    Args:
        model: inputs that it does not accept are omitted; a causal language model gets labels if there are none.
        processing_class: the tokenizer, for its padding token. Default: token 0.
        arguments: not used.
        multiple: at least 1.

    Raises:
        ValueError: `multiple` is not a whole number above 0.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL

    if not isinstance(multiple, int) or isinstance(multiple, bool) or multiple < 1:
        raise ValueError(f"multiple={multiple!r}: must be a whole number above 0")
    padding = getattr(processing_class, "pad_token_id", None)
    if padding is None:
        # Any token that has an embedding will do: padding is masked and has no labels.
        padding = getattr(processing_class, "eos_token_id", None) or 0
    config = getattr(model, "config", None)
    base: Any = getattr(model, "get_base_model", None)  # under PEFT's wrapper
    inner: Any = model if base is None else base()
    parameters = inspect.signature(inner.forward).parameters.items()
    taken = {name for name, value in parameters if value.kind is not inspect.Parameter.VAR_KEYWORD}
    causal = {name for value in CAUSAL.values() for name in ((value,) if isinstance(value, str) else value)}
    collator = PadBatches(
        multiple,
        padding=padding,
        keep=frozenset({*taken, "labels", "label", "label_ids"}) if "input_ids" in taken else None,
        causal=type(inner).__name__ in causal,
        longest=getattr(config, "max_position_embeddings", None),
        encoder_decoder=bool(getattr(config, "is_encoder_decoder", False)),
    )
    return {"data_collator": collator}


class PadBatches:
    """Collator: a list of samples → `{input: tensor}` of shape (samples, tokens), or (samples,) for numbers.

    `tokens` is the length of the longest sample, rounded up to a multiple of `multiple`, but at most `longest`.
    """

    def __init__(
        self,
        multiple: int,
        *,
        padding: int = 0,
        keep: frozenset[str] | None = None,
        causal: bool = False,
        longest: int | None = None,
        encoder_decoder: bool = False,
    ) -> None:
        self.multiple = multiple
        self._fill = {"input_ids": padding, "decoder_input_ids": padding, "labels": _IGNORED}  # others: 0
        self._keep = keep
        self._causal = causal
        self._longest = longest
        self._decoder_inputs = _DECODER_INPUTS if encoder_decoder else frozenset()

    def __call__(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """The batch. Raises ValueError if only some samples have a field."""
        rows = [self._row(sample) for sample in samples]
        names = rows[0].keys()
        if differing := {name for row in rows for name in row.keys() ^ names}:
            raise ValueError(f"only some samples of a batch have {', '.join(sorted(differing))}. Give all or none")
        width = self._width(max(len(row["input_ids"]) for row in rows))
        batch = {}
        for name in names:
            values = [row[name] for row in rows]
            if values[0].dim() == 0:
                batch[name] = torch.stack(values)
                continue
            wide = self._width(max(map(len, values))) if name in self._decoder_inputs else width
            fill = self._fill.get(name, 0)
            batch[name] = torch.stack([nn.functional.pad(row, (0, wide - len(row)), value=fill) for row in values])
        return batch

    def _width(self, longest: int) -> int:
        width = -(-longest // self.multiple) * self.multiple
        # The model has no positions beyond its longest.
        return self._longest if self._longest is not None and width > self._longest >= longest else width

    def _row(self, sample: Mapping[str, Any]) -> dict[str, Tensor]:
        if "input_ids" not in sample:
            raise ValueError(f"a sample has no input_ids, only {', '.join(sample)}. Tokenize the data set")
        row = {}
        for name, value in sample.items():
            if value is not None and (self._keep is None or name in self._keep):
                row["labels" if name in ("label", "label_ids") else name] = torch.as_tensor(value)
        count = len(row["input_ids"])
        row.setdefault("attention_mask", torch.ones(count, dtype=torch.int64))
        for name, value in row.items():
            if value.dim() > 1 or (value.dim() == 1 and name not in self._decoder_inputs and len(value) != count):
                raise ValueError(
                    f"{name}: shape {tuple(value.shape)} for {count} input_ids. Give one value a token or a sample"
                )
        text = row["attention_mask"].nonzero().flatten()
        if len(text) and len(text) < count:  # padded before, on either side of the text
            span = slice(int(text[0]), int(text[-1]) + 1)
            row = {
                name: value[span] if value.dim() and name not in self._decoder_inputs else value
                for name, value in row.items()
            }
        if self._causal:
            labels = row.get("labels", row["input_ids"].masked_fill(row["attention_mask"] == 0, _IGNORED)).clone()
            labels[0] = _IGNORED
            row["labels"] = labels
        return row
