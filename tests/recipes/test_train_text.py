"""The blocks that the script for texts cuts: what stands in them, and that no text is lost between pieces."""

from __future__ import annotations

from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import pytest
import yaml
from datasets import Dataset
from transformers import GPT2Config

from hf_memkit.recipes.export.scripts import train_text
from hf_memkit.recipes.export.scripts.job import TrainingJob
from hf_memkit.recipes.export.scripts.train_text import cut_into_blocks, split_text
from tests.recipes.test_tokenizer import trained

TEXTS = [topics[name] for name in sorted(topics)[:30]]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return trained(tmp_path_factory.mktemp("job"), TEXTS, size=1000)


def ids(texts: list[str | None], tokenizer: Any, length: int = 64) -> list[int]:
    rows = Dataset.from_dict({"text": texts})
    blocks = list(cut_into_blocks(rows, tokenizer, length))
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
    assert "".join(split_text(text)) == text and all(split_text(text))


def test_too_little_text_ends_in_a_line(tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Defect, seen on a GPU: `datasets` raises where a generator gives no row at all."""
    tokenizer.save_pretrained(tmp_path / "tokens")
    (tmp_path / "short.txt").write_text("a few words\n")
    data = {
        "files": ["short.txt"],
        "format": "text",
        "text_column": "text",
        "sequence_length": 64,
        "tokenizer": str(tmp_path / "tokens"),
    }
    (tmp_path / "args.yaml").write_text(yaml.safe_dump({"data": data, "model": {}, "arguments": {}}))
    monkeypatch.setattr(train_text, "__file__", str(tmp_path / "train_text.py"))
    with pytest.raises(SystemExit, match=r"short\.txt: fewer than two blocks of 64 tokens"):
        train_text.main()


def test_a_folder_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    """Defect, seen on a GPU: transformers makes a tokenizer without words of a config alone."""
    GPT2Config().save_pretrained(tmp_path / "model")
    data = {"tokenizer": str(tmp_path / "model")}
    (tmp_path / "args.yaml").write_text(yaml.safe_dump({"data": data, "model": {}, "arguments": {}}))
    with pytest.raises(SystemExit, match="model: no tokenizer in it"):
        TrainingJob(tmp_path).load_tokenizer([])
