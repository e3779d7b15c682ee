"""A tokenizer such as Whisper's, used if the model's own is unavailable: byte-level BPE, trained on the transcripts.
It has the tokens at the beginning and end of a transcript, and none for languages and times. Needs tokenizers and
transformers only, so that it can be copied next to a script."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, Final

from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import WhisperTokenizer

_END: Final = "<|endoftext|>"
_START: Final = "<|startoftranscript|>"
_SPECIAL: Final = (_START, "<|translate|>", "<|transcribe|>", "<|notimestamps|>")

TOKEN_VALUES: Final = (
    "decoder_start_token_id", "bos_token_id", "eos_token_id", "pad_token_id", "begin_suppress_tokens",
    "suppress_tokens",
)  # fmt: skip
"""Keys of `token_values`."""


def train_whisper_tokenizer(texts: Iterable[str], vocabulary_size: int) -> Any:
    """A `WhisperTokenizer` with at most `vocabulary_size` entries (at least 261: every byte, and five special tokens),
    which can encode any text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = vocabulary_size - len(_SPECIAL) - 1
    if words < len(alphabet):
        minimum = len(alphabet) + len(_SPECIAL) + 1
        raise ValueError(f"a vocabulary of {vocabulary_size} is too small: the minimum is {minimum}")
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=words, initial_alphabet=alphabet, show_progress=False)
    )
    model = json.loads(trained.to_str())["model"]
    tokenizer = WhisperTokenizer(
        vocab=model["vocab"],
        merges=[tuple(pair) for pair in model["merges"]],
        pad_token=_END,
        additional_special_tokens=list(_SPECIAL),
    )
    tokenizer.set_prefix_tokens()  # again, now that their IDs are known
    return tokenizer


def token_values(tokenizer: Any) -> dict[str, Any]:
    """The config values for such a tokenizer."""
    end = tokenizer.convert_tokens_to_ids(_END)
    start = tokenizer.convert_tokens_to_ids(_START)
    return dict(zip(TOKEN_VALUES, (start, end, end, end, None, None), strict=True))
