"""Packing: what stands in the blocks, what is held out, and the entropy of that."""

from __future__ import annotations

import logging
import math
import pickle
from collections.abc import Iterator
from pydoc_data.topics import topics
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from torch.utils.data import DataLoader

from hf_memkit.errors import DataError, SettingError
from hf_memkit.recipe import packing
from hf_memkit.recipe.data import Documents
from hf_memkit.recipe.packing import Blocks, Packed, pack, unigram_loss
from hf_memkit.recipe.tokenizer import END_OF_TEXT, train_tokenizer

TEXTS = [topics[name] for name in sorted(topics)[:30]]


def documents_of(*texts: str) -> Documents:
    return Documents(texts, "a test")


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return train_tokenizer(documents_of(*TEXTS), 1000)


def all_ids(packed: Packed) -> list[int]:
    return np.concatenate([packed.train.array, packed.held_out.array]).ravel().tolist()


@pytest.fixture(scope="module")
def packed(tokenizer: Any) -> Packed:
    return pack(documents_of(*TEXTS), tokenizer, sequence_length=64, holdout_fraction=0.1)


def test_the_blocks_are_the_texts_joined_by_eos(packed: Packed, tokenizer: Any) -> None:
    joined = END_OF_TEXT.join(TEXTS)
    written = tokenizer.decode(all_ids(packed))
    assert joined.startswith(written)
    missing = tokenizer(joined[len(written) :], add_special_tokens=False)["input_ids"]
    assert len(missing) < 64
    assert all_ids(packed).count(tokenizer.eos_token_id) == len(TEXTS) - 1


def test_nothing_is_dropped_where_the_blocks_come_out_even(tokenizer: Any) -> None:
    packed = pack(
        documents_of("abcd", "efg"), train_tokenizer(documents_of("x"), 257), sequence_length=2, holdout_fraction=0
    )
    assert len(packed.train) == 3 and len(all_ids(packed)) == 8


def test_documents_without_text_leave_no_trace(packed: Packed, tokenizer: Any) -> None:
    gaps = documents_of("", *(part for text in TEXTS for part in (text, " \n")), "")
    again = pack(gaps, tokenizer, sequence_length=64, holdout_fraction=0.1)
    assert all_ids(again) == all_ids(packed)


@pytest.mark.parametrize(("fraction", "blocks"), [(0.0, 1), (0.001, 1), (0.1, 10), (0.5, 50), (0.999, 99)])
def test_the_last_blocks_are_held_out(fraction: float, blocks: int) -> None:
    bytewise = train_tokenizer(documents_of("x"), 257)
    text = "".join(chr(33 + i % 90) for i in range(400))
    packed = pack(documents_of(text), bytewise, sequence_length=4, holdout_fraction=fraction)
    assert len(packed.held_out) == blocks
    assert bytewise.decode(packed.train.array.ravel()) == text[: -4 * blocks], "in order, before any shuffling"
    assert bytewise.decode(packed.held_out.array.ravel()) == text[-4 * blocks :]


def test_the_same_again(packed: Packed, tokenizer: Any) -> None:
    column = Dataset.from_dict({"text": TEXTS})["text"]
    for texts in (TEXTS, column):
        again = pack(Documents(texts, "x"), tokenizer, sequence_length=64, holdout_fraction=0.1)
        assert np.array_equal(again.train.array, packed.train.array)
        assert np.array_equal(again.held_out.array, packed.held_out.array)


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(packing, "_PIECE", 200)
    monkeypatch.setattr(packing, "_BATCH", 700)
    yield


def test_long_documents_in_pieces_give_the_same_blocks(packed: Packed, tokenizer: Any, small_pieces: None) -> None:
    again = pack(documents_of(*TEXTS), tokenizer, sequence_length=64, holdout_fraction=0.1)
    assert all_ids(again) == all_ids(packed)


@pytest.mark.parametrize(
    "text", ["x" * 5000, " " * 2500 + "x" * 2500, "\n" * 5000 + "x", "ab cd ef " * 600, "漢" * 999]
)
def test_no_text_is_lost_between_pieces(tokenizer: Any, small_pieces: None, text: str) -> None:
    packed = pack(documents_of(text), tokenizer, sequence_length=2, holdout_fraction=0)
    written = tokenizer.decode(all_ids(packed))
    whole = written.rstrip("\ufffd")
    missing = tokenizer(text[len(whole) :], add_special_tokens=False)["input_ids"]
    assert text.startswith(whole) and len(missing) <= 3, "one token, or the bytes of one character"


def test_items(packed: Packed) -> None:
    item = packed.train[3]
    assert set(item) == {"input_ids", "labels"}
    for tensor in item.values():
        assert (tensor.dtype, tensor.shape) == (torch.int64, (64,))
        assert tensor.tolist()[1:] == packed.train.array[3].tolist()[1:]
    assert item["input_ids"][0] == packed.train.array[3][0]
    assert item["labels"][0] == -100  # nothing predicts it, and Trainer's mean must not count it
    item["labels"][1] = -100
    assert item["input_ids"][1] != -100 and packed.train[3]["labels"][1] != -100
    with pytest.raises(IndexError):
        packed.train[len(packed.train)]
    with pytest.raises(ValueError, match="read-only"):
        packed.train.array[0, 0] = 1
    assert packed.train.array.dtype == np.int32
    assert np.array_equal(pickle.loads(pickle.dumps(packed.train)).array, packed.train.array)


def test_a_data_loader_with_workers(packed: Packed) -> None:
    batches = list(DataLoader(packed.held_out, batch_size=2, num_workers=1))
    assert torch.equal(torch.cat([batch["input_ids"] for batch in batches]).int(), torch.tensor(packed.held_out.array))


def test_too_little_text(tokenizer: Any) -> None:
    text = documents_of("Some words.")
    count = len(tokenizer("Some words.")["input_ids"])
    with pytest.raises(DataError) as caught:
        pack(text, tokenizer, sequence_length=64, holdout_fraction=0.1)
    assert str(caught.value) == (
        f"a test: {count} tokens; the minimum is 128: one block of 64 to train on and one to hold out. "
        f"Give more text, or --sequence-length {count // 2} or less"
    )
    assert len(pack(text, tokenizer, sequence_length=count // 2, holdout_fraction=0.1).train) == 1
    with pytest.raises(DataError, match=r"a test: 0 tokens; .*\. Give more text$"):
        pack(documents_of(""), tokenizer, sequence_length=64, holdout_fraction=0.1)


def test_wrong_values(tokenizer: Any) -> None:
    for fraction in (-0.1, 1.0, math.nan):
        with pytest.raises(SettingError, match="held_out="):
            pack(documents_of("x"), tokenizer, sequence_length=8, holdout_fraction=fraction)
    with pytest.raises(SettingError, match="sequence_length=1: a block needs at least 2 tokens"):
        pack(documents_of("x"), tokenizer, sequence_length=1, holdout_fraction=0.1)


def test_a_tokenizer_without_eos() -> None:
    tokenizer = train_tokenizer(documents_of("x"), 257)
    tokenizer.eos_token = None
    with pytest.raises(DataError, match=r"no EOS token .* --model"):
        pack(documents_of("x" * 99), tokenizer, sequence_length=8, holdout_fraction=0.1)


def test_no_warning_about_length(capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = train_tokenizer(documents_of("x"), 257)
    tokenizer.model_max_length = 16
    logger = logging.getLogger("transformers")
    logger.addHandler(caplog.handler)
    try:
        pack(documents_of("x" * 99), tokenizer, sequence_length=8, holdout_fraction=0.1)
    finally:
        logger.removeHandler(caplog.handler)
    assert caplog.text == ""
    assert capfd.readouterr() == ("", "")


def test_unigram_loss_by_hand() -> None:
    blocks = Blocks(np.array([[9, 0, 0, 1], [8, 0, 0, 1]], dtype=np.int32))
    expected = -(4 / 6 * math.log(4 / 6) + 2 / 6 * math.log(2 / 6))
    assert unigram_loss(blocks) == pytest.approx(expected, abs=1e-12)
    assert unigram_loss(Blocks(np.array([[5, 3, 3]], dtype=np.int32))) == 0.0


def test_unigram_loss_is_the_least_loss_without_context(packed: Packed) -> None:
    """A causal model whose logits are the log frequencies has exactly this loss, as transformers computes it."""
    from transformers.loss.loss_utils import ForCausalLMLoss

    blocks = packed.held_out.array
    counts = torch.bincount(torch.tensor(blocks[:, 1:]).flatten(), minlength=1000).double()
    logits = (counts / counts.sum()).log().clamp(min=-50).expand(*blocks.shape, 1000)
    labels = torch.tensor(blocks).long()
    bound = unigram_loss(packed.held_out)
    assert ForCausalLMLoss(logits, labels, vocab_size=1000).item() == pytest.approx(bound, abs=1e-5)
    flatter = (counts + 1).log().expand(*blocks.shape, 1000)
    assert ForCausalLMLoss(flatter, labels, vocab_size=1000).item() > bound
