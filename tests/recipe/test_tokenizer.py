"""Choosing and training tokenizers, with the real libraries and no network."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from pydoc_data.topics import topics

import pytest
from transformers import DataCollatorWithPadding, GPT2Config

from hf_memkit.errors import DataError
from hf_memkit.recipe import tokenizer as module
from hf_memkit.recipe.data import Documents, load_documents
from hf_memkit.recipe.tokenizer import END_OF_TEXT, check_vocabulary, get_tokenizer, train_tokenizer


def documents_of(*texts: str) -> Documents:
    return Documents(texts, "a test")


PROSE = documents_of(*(topics[name] for name in sorted(topics)[:10]))
ODD = "Füße 漢字 🙂\tx  y\r\n\n  \x07<end> a . b , don 't"


def test_trained_reads_back_what_it_wrote() -> None:
    chosen = get_tokenizer(None, PROSE, vocabulary_size=600, allow_download=False)
    assert chosen.trained_here
    assert chosen.reason == "a byte-level BPE of 600 entries, trained here on a test"
    tokenizer = chosen.tokenizer
    assert len(tokenizer) == 600
    assert tokenizer.eos_token == tokenizer.bos_token == tokenizer.pad_token == END_OF_TEXT
    assert tokenizer.decode(tokenizer(ODD, add_special_tokens=False)["input_ids"]) == ODD
    assert tokenizer(END_OF_TEXT)["input_ids"] == [tokenizer.eos_token_id]
    words = tokenizer(PROSE.texts[0], add_special_tokens=False)["input_ids"]
    assert len(words) < 0.6 * len(PROSE.texts[0]), "it has learned more than bytes"


def test_small_texts_give_small_vocabularies() -> None:
    assert 257 <= len(train_tokenizer(documents_of("abab abab"), 5000)) < 270


def test_saved_and_loaded_it_is_the_models_own(tmp_path: Path) -> None:
    trained = train_tokenizer(PROSE, 400)
    trained.save_pretrained(tmp_path)
    chosen = get_tokenizer(str(tmp_path), PROSE, vocabulary_size=400, allow_download=False)
    assert not chosen.trained_here
    assert chosen.reason == f"the model's own ({tmp_path}, 400 entries)"
    assert chosen.tokenizer(ODD)["input_ids"] == trained(ODD)["input_ids"]
    assert chosen.tokenizer.eos_token_id == trained.eos_token_id


def test_a_tokenizer_without_a_token_for_padding_takes_its_end(tmp_path: Path) -> None:
    """Trainer's own collator refuses one that has none, as GPT-2 and Llama have none, also for equal rows."""
    trained = train_tokenizer(PROSE, 300)
    trained.pad_token = None
    trained.save_pretrained(tmp_path)
    chosen = get_tokenizer(str(tmp_path), PROSE, vocabulary_size=300, allow_download=False).tokenizer
    assert chosen.pad_token == END_OF_TEXT
    batch = DataCollatorWithPadding(chosen)([{"input_ids": [5, 6]}, {"input_ids": [7, 8]}])
    assert batch["input_ids"].tolist() == [[5, 6], [7, 8]]


def test_without_its_own_the_reason_is_loud() -> None:
    chosen = get_tokenizer("nobody/nothing", PROSE, vocabulary_size=300, allow_download=False)
    assert chosen.trained_here
    assert chosen.reason == (
        "NOT THE MODEL'S OWN: nobody/nothing gave none (not on this machine, and the hub is not asked), "
        "so a byte-level BPE of 300 entries was trained here on a test; its losses compare with no other tokenizer's, "
        "and weights trained with another one do not fit it"
    )


def test_a_folder_without_tokenizer_files(tmp_path: Path) -> None:
    """transformers makes a tokenizer from a config alone; it turns every text into nothing."""
    GPT2Config().save_pretrained(tmp_path)
    chosen = get_tokenizer(str(tmp_path), PROSE, vocabulary_size=300, allow_download=False)
    assert chosen.trained_here
    assert "knows no token of this text; check its files" in chosen.reason


def test_broken_tokenizer_files(tmp_path: Path) -> None:
    train_tokenizer(PROSE, 300).save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"version": ')
    chosen = get_tokenizer(str(tmp_path), PROSE, vocabulary_size=300, allow_download=False)
    assert chosen.trained_here
    assert "\n" not in chosen.reason


def test_more_entries_than_the_model_embeds(tmp_path: Path) -> None:
    trained = train_tokenizer(PROSE, 400)
    check_vocabulary(trained, 400)
    message = r"400 .* 399.*resize_token_embeddings\(400\)"
    with pytest.raises(DataError, match=message):
        check_vocabulary(trained, 399)
    trained.save_pretrained(tmp_path)
    with pytest.raises(DataError, match=message):
        get_tokenizer(str(tmp_path), PROSE, vocabulary_size=399, allow_download=False)


def test_too_small_a_vocabulary() -> None:
    assert len(train_tokenizer(PROSE, 257)) == 257
    with pytest.raises(DataError, match="vocab_size=256: too small; a byte-level tokenizer needs 257"):
        train_tokenizer(PROSE, 256)


def test_no_text() -> None:
    with pytest.raises(DataError, match="a test: no text to train a tokenizer on"):
        train_tokenizer(documents_of("", " \n"), 300)


def test_one_vocabulary_in_every_process() -> None:
    script = textwrap.dedent("""
        import hashlib
        from hf_memkit.recipe.data import load_documents
        from hf_memkit.recipe.tokenizer import train_tokenizer
        documents = load_documents(None, default_hub_id="nobody/x", default_hub_config=None, hub_reachable=False)
        tokenizer = train_tokenizer(documents, 2000).backend_tokenizer
        print(hashlib.sha256(tokenizer.to_str().encode()).hexdigest())
    """)
    digests = []
    for seed, threads in (("1", "1"), ("2", "2")):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "RAYON_NUM_THREADS": threads}
        done = subprocess.run(
            [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
        )
        digests.append(done.stdout)
    documents = load_documents(None, default_hub_id="nobody/x", default_hub_config=None, hub_reachable=False)
    here = train_tokenizer(documents, 2000).backend_tokenizer.to_str()
    assert digests == [hashlib.sha256(here.encode()).hexdigest() + "\n"] * 2


def test_only_so_much_text_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_TRAINING_CHARACTERS", 10)
    assert list(module._training_texts(documents_of("seven..", "four", "never"))) == ["seven..", "fou"]


@pytest.mark.parametrize("text", ["acgt" * 250_000, "a" + " " * 1_000_000 + "b"])
def test_a_very_long_word_does_not_take_minutes(text: str) -> None:
    start = time.monotonic()
    tokenizer = train_tokenizer(documents_of(text), 1000)
    assert time.monotonic() - start < 20
    assert tokenizer.decode(tokenizer(text, verbose=False)["input_ids"]) == text
