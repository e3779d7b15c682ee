"""The tokenizer of a script: the model's own, or one that is trained on the data."""

from __future__ import annotations

import re
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import pytest
import yaml
from transformers import DataCollatorWithPadding, GPT2Config, GPT2LMHeadModel, TrainingArguments

from hf_memkit.recipes.export.scripts import job as module
from hf_memkit.recipes.export.scripts.job import TrainingJob, tokenizer_texts
from hf_memkit.recipes.tasks import find_task
from hf_memkit.recipes.tasks.task import END_OF_TEXT, Framing
from hf_memkit.setup.setup import Setup

PROSE = [topics[name] for name in sorted(topics)[:10]]
ODD = "Füße 漢字 🙂\tx  y\r\n\n  \x07<end> a . b , don 't"
CONTINUED = find_task("language-modeling").framing(Setup("x"))
assert CONTINUED is not None


def job_of(folder: Path, *, size: int = 600, name: str | None = None, framing: Framing = CONTINUED) -> TrainingJob:
    data = {"tokenizer": name, "vocabulary_size": size, "special_tokens": dict(framing.tokens)}
    content = {"data": data, "model": {}, "arguments": {}}
    folder.mkdir(exist_ok=True)
    (folder / "args.yaml").write_text(yaml.safe_dump(content, sort_keys=False))
    return TrainingJob(folder)


def trained(folder: Path, texts: list[str], **options: Any) -> Any:
    return job_of(folder, **options).load_tokenizer(texts)


def test_trained_reads_back_what_it_wrote(tmp_path: Path) -> None:
    tokenizer = trained(tmp_path, PROSE)
    assert len(tokenizer) == 600
    assert tokenizer.eos_token == tokenizer.bos_token == tokenizer.pad_token == END_OF_TEXT
    assert tokenizer.decode(tokenizer(ODD, add_special_tokens=False)["input_ids"]) == ODD
    assert tokenizer(END_OF_TEXT)["input_ids"] == [tokenizer.eos_token_id]
    words = tokenizer(PROSE[0], add_special_tokens=False)["input_ids"]
    assert len(words) < 0.6 * len(PROSE[0]), "it has learned more than bytes"


def test_a_tokenizer_without_a_token_for_padding_takes_its_end(tmp_path: Path) -> None:
    """Trainer's own collator refuses one that has none, as GPT-2 and Llama have none, also for equal rows."""
    made = trained(tmp_path, PROSE)
    made.pad_token = None
    made.save_pretrained(tmp_path / "model")
    chosen = job_of(tmp_path / "again", name=str(tmp_path / "model")).load_tokenizer([])
    assert chosen.pad_token == END_OF_TEXT and chosen(ODD)["input_ids"] == made(ODD)["input_ids"]
    batch = DataCollatorWithPadding(chosen)([{"input_ids": [5, 6]}, {"input_ids": [7, 8]}])
    assert batch["input_ids"].tolist() == [[5, 6], [7, 8]]


def test_more_entries_than_the_model_embeds(tmp_path: Path) -> None:
    job, arguments = job_of(tmp_path), TrainingArguments(str(tmp_path), use_cpu=True)
    tokenizer = job.load_tokenizer(PROSE)

    def options(size: int) -> Any:
        sizes = {"n_embd": 8, "n_layer": 1, "n_head": 1}
        return job.trainer_options(GPT2LMHeadModel(GPT2Config(vocab_size=size, **sizes)), arguments, tokenizer)

    assert options(600)["processing_class"] is tokenizer
    with pytest.raises(SystemExit, match=r"600 entries.* for 599.*resize_token_embeddings\(600\)"):
        options(599)


def test_only_so_much_text_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_CHARACTERS", 10)
    assert list(tokenizer_texts(["seven..", "four", "never"])) == ["seven..", "fou"]


@pytest.mark.parametrize("text", ["acgt" * 250_000, "a" + " " * 1_000_000 + "b"])
def test_a_very_long_word_is_cut_before_training(tmp_path: Path, text: str) -> None:
    """Training time is quadratic in the longest word."""
    assert max(len(part) for part in re.findall(r"\s+|\S+", "".join(tokenizer_texts([text])))) <= 257
    tokenizer = trained(tmp_path, [text], size=1000)
    assert tokenizer.decode(tokenizer(text, verbose=False)["input_ids"]) == text
