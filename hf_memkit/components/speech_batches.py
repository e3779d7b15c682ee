"""A collator that opens sound when it makes a batch: rows with file names or bytes → spectrograms and labels.

The data set stays as small as its list of files; the data loader's workers decode and resample while the GPU computes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import EvalPrediction

from hf_memkit.components.speech_batches_sound import read_sound

_IGNORED = -100
"""Labels that the loss leaves out (torch.nn.functional.cross_entropy, `ignore_index`)."""


class SpeechBatches:
    """Collator: a list of rows → `{"input_features": (rows, bands, frames), "labels": (rows, tokens)}`. A row has
    `audio` (`{"path": …}` or `{"bytes": …}`, as `datasets.Audio(decode=False)` gives it) and `text`. `processor`: a
    `WhisperProcessor`; `dtype`: of the spectrograms, such as that of 16-bit weights. Default: float32."""

    def __init__(self, processor: Any, *, dtype: torch.dtype | None = None) -> None:
        self._extractor = processor.feature_extractor
        self._tokenizer = processor.tokenizer
        self._dtype = dtype

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """The batch. Raises OSError if a file is missing, SoundError if it is not sound."""
        rate = self._extractor.sampling_rate
        waves = [read_sound(row["audio"].get("bytes") or row["audio"]["path"], rate) for row in rows]
        features: Tensor = self._extractor(waves, sampling_rate=rate, return_tensors="pt")["input_features"]
        texts = [label_tokens(self._tokenizer, row["text"]) for row in rows]
        labels = torch.full((len(texts), max(map(len, texts))), _IGNORED)
        for number, text in enumerate(texts):
            labels[number, : len(text)] = torch.tensor(text)
        return {"input_features": features if self._dtype is None else features.to(self._dtype), "labels": labels}


def label_tokens(tokenizer: Any, text: str) -> list[int]:
    """The label tokens of a text: language and task if the tokenizer has them, words, end. The token that the decoder
    starts from is left out, because the model adds it."""
    tokens: list[int] = tokenizer(text.strip())["input_ids"]
    return tokens[1:]


class WordErrors:
    """`compute_metrics` for `batch_eval_metrics`: the word error rate of generated texts, from two sums over batches.
    Words are compared without case and punctuation, as Whisper's tokenizer normalises them."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._wrong = self._words = 0

    def __call__(self, prediction: EvalPrediction, compute_result: bool = True) -> dict[str, float]:
        texts, references = (self._texts(tokens) for tokens in (prediction.predictions, prediction.label_ids))
        for text, reference in zip(texts, references, strict=True):
            self._wrong += word_errors(reference.split(), text.split())
            self._words += len(reference.split())
        if not compute_result:
            return {}
        rate = self._wrong / max(self._words, 1)
        self._wrong = self._words = 0
        return {"word_error_rate": rate}

    def _texts(self, tokens: Any) -> list[str]:
        first = tokens[0] if isinstance(tokens, tuple) else tokens
        numbers = np.asarray(torch.as_tensor(first).cpu())
        padding = self._tokenizer.pad_token_id
        padding = self._tokenizer.eos_token_id if padding is None else padding
        numbers = np.where((numbers < 0) | (numbers >= len(self._tokenizer)), padding, numbers)
        texts = self._tokenizer.batch_decode(numbers, skip_special_tokens=True)
        return [self._tokenizer.basic_normalize(text) for text in texts]


def word_errors(reference: Sequence[str], words: Sequence[str]) -> int:
    """The fewest insertions, deletions and substitutions of words that turn `words` into `reference` (Levenshtein
    1966). Divided by the words of the reference it is the word error rate, which can exceed 1."""
    row = np.arange(len(words) + 1)
    steps = np.arange(len(words) + 1)
    for number, word in enumerate(reference, 1):
        changed = row[:-1] + np.array([word != other for other in words], dtype=int)
        best = np.minimum(row + 1, np.concatenate(([number], changed)))
        row = np.minimum.accumulate(best - steps) + steps  # consecutive insertions
    return int(row[-1])
