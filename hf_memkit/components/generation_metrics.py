"""Exact match and ROUGE-L of the texts that an evaluation generates.

For an encoder-decoder model in Seq2SeqTrainer with `predict_with_generate`: what it keeps of a batch are token ids, as
many as were generated, and no logits (transformers 5.23.0: trainer_seq2seq.py, prediction_step).

This file needs numpy and transformers only, so that it can lie beside a script.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
from transformers import EvalPrediction

_IGNORED = -100
_WORD = re.compile(r"[^\W_]+")


def generation_metrics(tokenizer: Any) -> Callable[[EvalPrediction], dict[str, float]]:
    """`compute_metrics`, which gives of the evaluated pairs:

    * `exact_match`: the share of generated texts that are the target, white space at the ends and case aside;
    * `rouge_l`: the mean of `rouge_l`;
    * `generated_tokens`: the mean length of what was generated, special tokens not counted.
    """

    def compute_metrics(prediction: EvalPrediction) -> dict[str, float]:
        found = prediction.predictions[0] if isinstance(prediction.predictions, tuple) else prediction.predictions
        texts, targets = (_texts(tokenizer, ids) for ids in (found, prediction.label_ids))
        pairs = list(zip(texts, targets, strict=True))
        if not pairs:
            return {}
        special = [*tokenizer.all_special_ids, _IGNORED]
        return {
            "exact_match": float(np.mean([text.strip().lower() == target.strip().lower() for text, target in pairs])),
            "rouge_l": float(np.mean([rouge_l(text, target) for text, target in pairs])),
            "generated_tokens": float(np.mean((~np.isin(found, special)).sum(axis=1))),
        }

    return compute_metrics


def rouge_l(text: str, target: str) -> float:
    """F1 of the longest common subsequence of words, from 0 to 1 (Lin 2004, "ROUGE: A Package for Automatic Evaluation
    of Summaries", section 3, with beta = 1).

    Words are runs of letters and digits, in lower case, not stemmed. For English that is what Google's `rouge_score`
    counts; for other scripts it counts the words that `rouge_score` drops.
    """
    mine, theirs = _WORD.findall(text.lower()), _WORD.findall(target.lower())
    common = _longest_common(mine, theirs)
    return 2 * common / (len(mine) + len(theirs)) if common else 0.0


def _longest_common(mine: list[str], theirs: list[str]) -> int:
    """Words in the longest common subsequence."""
    last = [0] * (len(theirs) + 1)
    for word in mine:
        row = [0]
        for at, other in enumerate(theirs, 1):
            row.append(last[at - 1] + 1 if word == other else max(last[at], row[-1]))
        last = row
    return last[-1]


def _texts(tokenizer: Any, ids: Any) -> list[str]:
    array = np.asarray(ids)
    padding = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    found: list[str] = tokenizer.batch_decode(np.where(array == _IGNORED, padding, array), skip_special_tokens=True)
    return found
