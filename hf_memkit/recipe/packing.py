"""Documents and a tokenizer in, blocks of equal length out: what a causal language model is trained and evaluated on.

The documents' tokens stand one after the other, with the tokenizer's EOS token between two documents, and are cut into
blocks; there is no padding. A document may go on in the next block, and a block may hold several documents.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.utils.data import Dataset

from hf_memkit.errors import DataError, SettingError

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from transformers import PreTrainedTokenizerBase

    from hf_memkit.recipe.data import Documents


# Characters that are encoded at once. A token takes some 200 bytes until it is in the array.
_PIECE = 2**19
_BATCH = 2**21


class Blocks(Dataset[dict[str, torch.Tensor]]):
    """Blocks of tokens; the item `i` is `{"input_ids", "labels"}`, both int64 of shape (sequence_length,).

    The labels are the input, which transformers' models shift, but for the first, which nothing predicts: it is -100,
    because Trainer divides the summed loss by the number of labels (transformers: trainer.py, `num_items_in_batch`)
    and would otherwise report it too low by one part in sequence_length. `array` is int32, of shape (blocks,
    sequence_length); a slice of it makes other Blocks without a copy.
    """

    def __init__(self, array: NDArray[np.int32]) -> None:
        self.array = array

    def __len__(self) -> int:
        return len(self.array)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.from_numpy(self.array[index].astype(np.int64))
        labels = ids.clone()
        labels[0] = -100
        return {"input_ids": ids, "labels": labels}


@dataclass(frozen=True)
class Packed:
    """Blocks to train on, and blocks held out: the last ones, so that no document but one can stand in both."""

    train: Blocks
    held_out: Blocks


def pack(
    documents: Documents, tokenizer: PreTrainedTokenizerBase, *, sequence_length: int, holdout_fraction: float
) -> Packed:
    """Cuts `documents` into blocks. The same documents and tokenizer give the same blocks; nothing is shuffled here.

    In memory a token takes 4 to 4.3 bytes (10**9 tokens: about 4 GB of RAM, in each process), and one batch of text is
    encoded at a time. Documents without text are left out. A document above half a million characters is encoded in
    pieces, cut where tokenizers cut too (after a line's end), with no EOS token between them.

    Args:
        documents: in the order in which they stand in the blocks.
        tokenizer: its EOS token separates documents; no other special token is added. Special tokens that are written
            out in a text count as such, as in corpora that separate documents so.
        sequence_length: tokens a block, at least 2.
        holdout_fraction: share of all blocks held out, from the end; at least 0 and below 1. At least one block is
            held out, and at least one is left to train on.

    Raises:
        SettingError: `sequence_length` or `holdout_fraction` is out of range.
        DataError: the text fills fewer than two blocks, or the tokenizer has no EOS token.
    """
    if sequence_length < 2:
        raise SettingError(
            f"sequence_length={sequence_length}: a block needs at least 2 tokens, one to predict the next"
        )
    if not 0 <= holdout_fraction < 1:
        raise SettingError(f"held_out={holdout_fraction}: expected a share of the blocks, at least 0 and below 1")
    separator = tokenizer.eos_token_id
    if separator is None:
        raise DataError(
            f"model {tokenizer.name_or_path!r}: its tokenizer has no EOS token to separate documents. Set eos_token "
            f"in its tokenizer_config.json, or give another --model"
        )
    tokens = array("i")  # grows in place, where joined numpy arrays would exist twice
    first = True
    for batch in _batches(documents):
        encoded = tokenizer(
            [piece for piece, _ in batch],
            add_special_tokens=False,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,  # else it warns that a document is longer than the model's context, which packing cures
        )["input_ids"]
        for (_, starts), ids in zip(batch, encoded, strict=True):
            if starts and not first:
                tokens.append(separator)
            first = False
            tokens.frombytes(np.asarray(ids, dtype=np.int32).tobytes())
    blocks = len(tokens) // sequence_length
    if blocks < 2:
        shorter = f", or --sequence-length {len(tokens) // 2} or less" if len(tokens) >= 4 else ""
        raise DataError(
            f"{documents.source}: {len(tokens)} tokens; the minimum is {2 * sequence_length}: one block of "
            f"{sequence_length} to train on and one to hold out. Give more text{shorter}"
        )
    whole = np.frombuffer(tokens, dtype=np.int32)[: blocks * sequence_length].reshape(blocks, sequence_length)
    whole.flags.writeable = False
    held_out = min(max(1, round(blocks * holdout_fraction)), blocks - 1)
    return Packed(train=Blocks(whole[:-held_out]), held_out=Blocks(whole[-held_out:]))


def unigram_loss(held_out: Blocks) -> float:
    """The entropy, in nats a token, of the tokens that a causal model has to predict in `held_out`.

    With n(v) the number of times that token v stands at positions 1 … S-1 of the blocks (position 0 has nothing before
    it, and causal language model loss leaves it out), N the sum of n, and p(v) = n(v) / N, this is
    -Σ p(v) ln p(v): the mean loss of the best model that looks at no context, fitted to these very blocks. A model
    with a lower loss uses context. It is a bound from hindsight: a fair unigram model, fitted to the training
    blocks, does worse.
    """
    counts: NDArray[np.int64] = np.zeros(0, dtype=np.int64)
    for start in range(0, len(held_out), 1024):  # bincount works on a copy in int64
        some = np.bincount(held_out.array[start : start + 1024, 1:].ravel(), minlength=len(counts))
        some[: len(counts)] += counts
        counts = some
    seen = counts[counts > 0]
    share = seen / seen.sum()
    return float(-(share * np.log(share)).sum())


def _batches(documents: Iterable[str]) -> Iterator[list[tuple[str, bool]]]:
    """Lists of (piece of a document, whether it is the first one), each of some two million characters."""
    batch: list[tuple[str, bool]] = []
    characters = 0
    for text in documents:
        start = 0
        while start < len(text):
            end = _end_of_piece(text, start)
            batch.append((text[start:end], start == 0))
            characters += end - start
            start = end
            if characters >= _BATCH:
                yield batch
                batch, characters = [], 0
    if batch:
        yield batch


def _end_of_piece(text: str, start: int) -> int:
    """Where the piece of `text` that begins at `start` ends, so that the pieces' tokens are those of the whole text.

    Byte-level tokenizers (those of GPT-2, Llama 3, Qwen …) never join what stands before and after a single line end
    between two words; where there is none, the cut falls before a single space, and in a text without spaces anywhere.
    """
    limit = start + _PIECE
    if len(text) <= limit:
        return len(text)
    for mark, after in (("\n", 1), (" ", 0)):
        at = text.rfind(mark, start + _PIECE // 2, limit)
        while at >= 0:
            if not text[at - 1].isspace() and not text[at + 1].isspace():
                return at + after
            at = text.rfind(mark, start + _PIECE // 2, at)
    return limit
