"""A collator that pads each batch to its own longest sample, rounded up to a multiple.

transformers has collators that pad; each pads some of the inputs. This one pads the token inputs and the labels of
causal, masked, classification and encoder-decoder models alike. It never treats a token of the text as padding
(GPT-2's padding token is its end-of-text token, whose labels DataCollatorForLanguageModeling drops), removes earlier
padding, and omits inputs that the model does not take. It pads on the right, whatever the tokenizer's side is: on the
left more padding would shift the positions of models that count them from the first column, such as GPT-2.

In causal models the first label of a sample is left out: nothing predicts it, but Trainer counts it where it does not
recognise the loss (transformers 5.23.0: trainer.py 2316-2328, `_loss_shifts_labels`; GPT-2's class has no loss type),
and divides the summed loss by one label a sample too many.

This file needs torch and transformers only, so that it can lie beside a script.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

_IGNORED = -100
"""Labels that the loss leaves out (torch.nn.functional.cross_entropy, `ignore_index`)."""

_SECOND = frozenset({"labels", "decoder_input_ids", "decoder_attention_mask"})
"""Inputs of an encoder-decoder model that are as long as its second text."""


def trainer_options(*, model: nn.Module, processing_class: Any, arguments: Any, multiple: int = 8) -> dict[str, Any]:
    """`data_collator`: pads to the batch's longest sample, rounded up to `multiple` tokens.

    Args:
        model: inputs that it does not take are omitted; a causal language model gets labels if there are none.
        processing_class: the tokenizer, for its padding token; without one it is 0.
        arguments: not used.
        multiple: at least 1.

    Raises:
        ValueError: `multiple` is not a whole number above 0.
    """
    if not isinstance(multiple, int) or isinstance(multiple, bool) or multiple < 1:
        raise ValueError(f"multiple={multiple!r}: must be a whole number above 0")
    padding = getattr(processing_class, "pad_token_id", None)
    if padding is None:
        # Masked and without labels, whichever token it is: only its embedding has to exist.
        padding = getattr(processing_class, "eos_token_id", None) or 0
    config = getattr(model, "config", None)
    collator = PadBatches(
        multiple,
        padding=padding,
        keep=_forward_names(model),
        causal=_is_causal(model),
        longest=getattr(config, "max_position_embeddings", None),
        second_text=bool(getattr(config, "is_encoder_decoder", False)),
    )
    return {"data_collator": collator}


class PadBatches:
    """Collator: a list of samples → `{input: tensor}` of shape (samples, tokens), or (samples,) for numbers.

    `tokens` is the longest sample's number rounded up to `multiple`, but never more than `longest`.

    Attributes:
        multiple: what the number of tokens is rounded up to.
        tokens, padding_tokens: counted over all batches made so far in this process: of the text, and added.
    """

    def __init__(
        self,
        multiple: int,
        *,
        padding: int = 0,
        keep: frozenset[str] | None = None,
        causal: bool = False,
        longest: int | None = None,
        second_text: bool = False,
    ) -> None:
        self.multiple = multiple
        self.tokens = 0
        self.padding_tokens = 0
        # What else there is is filled with 0.
        self._fill = {"input_ids": padding, "decoder_input_ids": padding, "labels": _IGNORED}
        self._keep = keep
        self._causal = causal
        self._longest = longest
        self._second = _SECOND if second_text else frozenset()

    def __call__(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """The batch; a ValueError where samples lack fields that others have."""
        rows = [self._row(sample) for sample in samples]
        names = rows[0].keys()
        if differing := {name for row in rows for name in row.keys() ^ names}:
            raise ValueError(f"only some samples of a batch have {', '.join(sorted(differing))}. Give all or none")
        width = self._width(max(len(row["input_ids"]) for row in rows))
        self.tokens += sum(len(row["input_ids"]) for row in rows)
        self.padding_tokens += sum(width - len(row["input_ids"]) for row in rows)
        batch = {}
        for name in names:
            values = [row[name] for row in rows]
            if values[0].dim() == 0:
                batch[name] = torch.stack(values)
                continue
            wide = self._width(max(map(len, values))) if name in self._second else width
            fill = self._fill.get(name, 0)
            batch[name] = torch.stack([nn.functional.pad(one, (0, wide - len(one)), value=fill) for one in values])
        return batch

    def _width(self, longest: int) -> int:
        width = -(-longest // self.multiple) * self.multiple
        # Positions that the model does not have.
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
            if value.dim() > 1 or (value.dim() == 1 and name not in self._second and len(value) != count):
                raise ValueError(
                    f"{name}: shape {tuple(value.shape)} for {count} input_ids. Give one value a token or a sample"
                )
        text = row["attention_mask"].nonzero().flatten()
        if len(text) and len(text) < count:  # padded before: on either side, never inside of the text
            span = slice(int(text[0]), int(text[-1]) + 1)
            row = {name: one[span] if one.dim() and name not in self._second else one for name, one in row.items()}
        if self._causal:
            labels = row.get("labels", row["input_ids"].masked_fill(row["attention_mask"] == 0, _IGNORED)).clone()
            labels[0] = _IGNORED
            row["labels"] = labels
        return row


def _forward_names(model: nn.Module) -> frozenset[str] | None:
    """What the model's forward takes by name, and the names of labels; None if it cannot be told."""
    base: Any = getattr(model, "get_base_model", None)  # under PEFT's wrapper
    inner = model if base is None else base()
    parameters = inspect.signature(inner.forward).parameters
    names = {name for name, one in parameters.items() if one.kind is not inspect.Parameter.VAR_KEYWORD}
    return frozenset({*names, "labels", "label", "label_ids"}) if "input_ids" in names else None


def _is_causal(model: nn.Module) -> bool:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL

    base: Any = getattr(model, "get_base_model", None)  # under PEFT's wrapper
    inner = model if base is None else base()
    names = {name for one in CAUSAL.values() for name in ((one,) if isinstance(one, str) else one)}
    return type(inner).__name__ in names
