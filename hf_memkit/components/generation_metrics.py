"""Exact match and ROUGE-L of the texts that an evaluation generates.

For an encoder-decoder model in Seq2SeqTrainer with `predict_with_generate`, which keeps the generated token ids of a
batch and no logits (transformers 5.23.0: trainer_seq2seq.py, prediction_step).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
from transformers import EvalPrediction

_IGNORED = -100  # labels that the loss ignores (torch: cross_entropy, `ignore_index`)
_WORD = re.compile(r"[^\W_]+")


def generation_metrics(tokenizer: Any) -> Callable[[EvalPrediction], dict[str, float]]:
    """A `compute_metrics` function that returns:

    * `exact_match`: the share of generated texts equal to the target, ignoring case and surrounding white space;
    * `rouge_l`: the mean of `rouge_l`;
    * `generated_tokens`: the mean number of generated tokens, without special tokens.
    """

    def compute_metrics(prediction: EvalPrediction) -> dict[str, float]:
        generated = prediction.predictions[0] if isinstance(prediction.predictions, tuple) else prediction.predictions
        texts, targets = (_texts(tokenizer, ids) for ids in (generated, prediction.label_ids))
        pairs = list(zip(texts, targets, strict=True))
        if not pairs:
            return {}
        special = [*tokenizer.all_special_ids, _IGNORED]
        return {
            "exact_match": float(np.mean([text.strip().lower() == target.strip().lower() for text, target in pairs])),
            "rouge_l": float(np.mean([rouge_l(text, target) for text, target in pairs])),
            "generated_tokens": float(np.mean((~np.isin(generated, special)).sum(axis=1))),
        }

    return compute_metrics


def rouge_l(text: str, target: str) -> float:
    """F1 of the longest common subsequence of words, from 0 to 1 (Lin 2004, "ROUGE: A Package for Automatic Evaluation
    of Summaries", section 3, with beta = 1).

    Words are runs of letters and digits, in lower case, not stemmed. For English this matches Google's `rouge_score`;
    in other scripts it also counts the words that `rouge_score` drops.
    """
    words = _WORD.findall(text.lower())
    expected = _WORD.findall(target.lower())
    lengths = [0] * (len(expected) + 1)  # of the longest common subsequence with the first N expected words
    for word in words:
        row = [0]
        for index, other in enumerate(expected, 1):
            row.append(lengths[index - 1] + 1 if word == other else max(lengths[index], row[-1]))
        lengths = row
    common = lengths[-1]
    return 2 * common / (len(words) + len(expected)) if common else 0.0


def _texts(tokenizer: Any, ids: Any) -> list[str]:
    array = np.asarray(ids)
    padding = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    texts: list[str] = tokenizer.batch_decode(np.where(array == _IGNORED, padding, array), skip_special_tokens=True)
    return texts
