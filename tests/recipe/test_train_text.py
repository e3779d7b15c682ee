"""The blocks that the script for texts cuts: what stands in them, and that no text is lost between pieces."""

from __future__ import annotations

from pydoc_data.topics import topics
from typing import Any

import pytest
from datasets import Dataset

from hf_memkit.recipe.export.scripts import train_text
from hf_memkit.recipe.export.scripts.train_text import blocks_of, pieces_of
from tests.recipe.test_tokenizer import trained

TEXTS = [topics[name] for name in sorted(topics)[:30]]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return trained(tmp_path_factory.mktemp("job"), TEXTS, size=1000)


def ids(texts: list[str | None], tokenizer: Any, length: int = 64) -> list[int]:
    rows = Dataset.from_dict({"text": texts})
    blocks = list(blocks_of(rows, tokenizer, length))
    assert all(len(block["input_ids"]) == length and block["labels"][0] == -100 for block in blocks)
    assert all((block["labels"][1:] == block["input_ids"][1:]).all() for block in blocks)
    return [int(each) for block in blocks for each in block["input_ids"]]


def test_the_blocks_are_the_texts_each_with_its_end(tokenizer: Any) -> None:
    expected: list[int] = []
    for text in TEXTS:
        expected += [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    assert ids(list(TEXTS), tokenizer) == expected[: len(expected) // 64 * 64]
    assert ids(["", None, *TEXTS, "  \n"], tokenizer) == ids(list(TEXTS), tokenizer)


def test_long_texts_in_pieces_give_the_same_blocks(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Would notice: an end of text between pieces, a piece that is lost or cut within a word."""
    whole = ids(["\n".join(TEXTS)], tokenizer)
    monkeypatch.setattr(train_text, "PIECE", 500)
    assert ids(["\n".join(TEXTS)], tokenizer) == whole


@pytest.mark.parametrize("text", ["a" * 25, " ".join(["word"] * 9), "a\nb" * 9, "\n" * 25, "x" * 9 + " " + "y" * 30])
def test_no_text_is_lost_between_pieces(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_text, "PIECE", 10)
    assert "".join(pieces_of(text)) == text and all(pieces_of(text))
