"""Folders and tables of speech: what is read, and ten and more ways to spoil them. Real files."""

from __future__ import annotations

import json
import struct
import wave
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hf_memkit.components.speech_batches import SpeechBatches, WordErrors, label_tokens, word_errors
from hf_memkit.components.speech_batches_sound import read_sound, resample, seconds_of
from hf_memkit.errors import DataError
from hf_memkit.recipe.tasks.audio_files import EXAMPLE, LOCAL_FORM
from hf_memkit.recipe.tasks.made_up_speech import made_up_speech
from hf_memkit.recipe.tasks.speech_recognition import _from_files
from hf_memkit.recipe.tasks.whisper_tokenizer import token_values, train_whisper_tokenizer

pytestmark = pytest.mark.usefixtures("cache")

_COLUMNS = {"audio": "audio", "text": "text"}


@pytest.fixture(scope="module")
def processor() -> Any:
    from transformers import WhisperFeatureExtractor, WhisperProcessor

    texts = [row["text"] for row in made_up_speech(30)]
    return WhisperProcessor(WhisperFeatureExtractor(chunk_length=2), train_whisper_tokenizer(texts, 300))


def tone(seconds: float = 0.5, rate: int = 16_000, hertz: float = 440.0) -> Any:
    return 0.5 * np.sin(2 * np.pi * hertz * np.arange(round(seconds * rate)) / rate)


def sound(path: Path, seconds: float = 0.5, rate: int = 16_000, channels: int = 1) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with wave.open(str(path), "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(2)
        file.setframerate(rate)
        samples = np.repeat((tone(seconds, rate) * 32_767).astype("<i2"), channels)
        file.writeframes(samples.tobytes())
    return path


def pairs(root: Path) -> Path:
    for name in ("one", "two"):
        sound(root / f"{name}.wav")
        (root / f"{name}.txt").write_text(f"the words\nof {name}\n")
    return root


def metadata(root: Path, *rows: object) -> Path:
    root.mkdir(exist_ok=True)
    (root / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return root


def load(path: Path, longest_s: float = 30.0) -> Any:
    return _from_files(path, _COLUMNS, longest_s)[0]


class TestForms:
    def test_a_transcript_beside_each_file(self, tmp_path: Path) -> None:
        pairs(tmp_path / "speaker")
        rows = load(tmp_path)
        assert rows["text"] == ["the words of one", "the words of two"]
        assert rows[0]["audio"] == {"bytes": None, "path": str(tmp_path / "speaker" / "one.wav")}

    @pytest.mark.parametrize("text", ["text", "transcription", "sentence"])
    def test_metadata(self, tmp_path: Path, text: str) -> None:
        sound(tmp_path / "clips" / "a.wav")
        metadata(tmp_path, {"file_name": "clips/a.wav", text: "good morning"})
        for source in (tmp_path, tmp_path / "metadata.jsonl"):
            assert load(source)["text"] == ["good morning"]

    def test_csv(self, tmp_path: Path) -> None:
        sound(tmp_path / "a.wav")
        (tmp_path / "metadata.csv").write_text('file_name,text\na.wav,"well, hello"\n')
        assert load(tmp_path)["text"] == ["well, hello"]

    @pytest.mark.parametrize(("rate", "channels"), [(8_000, 1), (44_100, 2), (48_000, 1), (22_050, 6)])
    def test_any_rate_and_channels(self, tmp_path: Path, rate: int, channels: int) -> None:
        sound(tmp_path / "a.wav", 1.0, rate, channels)
        (tmp_path / "a.txt").write_text("a")
        assert len(load(tmp_path)) == 1
        found = read_sound(tmp_path / "a.wav", 16_000)
        assert len(found) == 16_000 and found.dtype == np.float32
        assert np.abs(found - tone(1.0))[400:-400].max() < 2e-3


def _empty(root: Path) -> str:
    return f"{root}: no sound files (it is empty); expected {LOCAL_FORM}"


def _texts_only(root: Path) -> str:
    (root / "a.txt").write_text("a")
    return f"{root}: no sound files (it has 1 files of other kinds); expected {LOCAL_FORM}"


def _no_transcript(root: Path) -> str:
    sound(pairs(root) / "three.wav")
    return f"{root}/three.wav: no transcript; expected its words in three.txt beside it"


def _no_sound(root: Path) -> str:
    (pairs(root) / "three.txt").write_text("three")
    return f"{root}/three.txt: a transcript without its sound file; expected three.wav beside it"


def _empty_text(root: Path) -> str:
    (pairs(root) / "one.txt").write_text(" \n")
    return f"{root}/one.txt: empty; expected the words of one.wav"


def _no_utf8(root: Path) -> str:
    (pairs(root) / "one.txt").write_bytes("für".encode("latin-1"))
    return (
        f"{root}/one.txt:1: expected UTF-8 text, found the byte 0xfc. Unpack the file if it is compressed, or convert "
        f"it to UTF-8"
    )


def _two_forms(root: Path) -> str:
    metadata(pairs(root), {"file_name": "one.wav", "text": "one"})
    return f"{root}: transcripts in two forms: metadata.jsonl, and 2 .txt files such as one.txt; keep one of them"


def _zero_bytes(root: Path) -> str:
    (pairs(root) / "one.wav").write_bytes(b"")
    return f"{root}/one.wav: empty (0 bytes); expected sound"


def _no_samples(root: Path) -> str:
    sound(pairs(root) / "one.wav", 0)
    return f"{root}/one.wav: no sound (0 samples). Remove it"


def _too_long(root: Path) -> str:
    sound(pairs(root) / "two.wav", 31, 8_000)
    return f"{root}/two.wav: 31.0 s long; the model takes at most 30 s. Cut it and its text into pieces"


def _silence(root: Path) -> str:
    path = pairs(root) / "two.wav"
    path.write_bytes(path.read_bytes()[:44] + bytes(16_000))
    return f"{root}/two.wav: 0.5 s of silence: every sample is 0. Remove it"


def _cut_header(root: Path) -> str:
    path = pairs(root) / "two.wav"
    path.write_bytes(path.read_bytes()[:30])
    return f"{root}/two.wav: a WAV file without sound data: damaged or cut off. Save it again, or remove it"


def _other_coding(root: Path) -> str:
    path = pairs(root) / "two.wav"
    content = bytearray(path.read_bytes())
    content[20:22] = struct.pack("<H", 85)  # MP3 inside WAV
    path.write_bytes(content)
    return (
        f"{root}/two.wav: a WAV file of format 85, 16 bits, 1 channel(s), 16000 Hz. Save it as PCM of 8, 16, 24 or 32 "
        "bits, or as floats"
    )


def _missing_file(root: Path) -> str:
    sound(root / "a.wav")
    metadata(root, {"file_name": "a.wav", "text": "a"}, {"file_name": "b.wav", "text": "b"})
    return f"{root}/metadata.jsonl:2: b.wav: no such file in {root}"


def _row_without_words(root: Path) -> str:
    sound(root / "a.wav")
    metadata(root, {"file_name": "a.wav", "text": ""})
    return f"{root}/metadata.jsonl:1: column 'text': expected the words of a.wav, found nothing; such as {EXAMPLE}"


def _file_without_row(root: Path) -> str:
    for name in ("a.wav", "b.wav"):
        sound(root / name)
    metadata(root, {"file_name": "a.wav", "text": "a"})
    return f"{root}/b.wav: no transcript; expected a row for it in metadata.jsonl"


def _twice(root: Path) -> str:
    sound(root / "a.wav")
    metadata(root, {"file_name": "a.wav", "text": "a"}, {"file_name": "a.wav", "text": "b"})
    return f"{root}/metadata.jsonl:2: a.wav appears again, first at {root}/metadata.jsonl:1. Remove one row"


def _no_column(root: Path) -> str:
    metadata(root, {"file_name": "a.wav", "words": "a"})
    return f"{root}/metadata.jsonl:1: no column 'text'; columns here: 'file_name', 'words'; expected {EXAMPLE}"


def _several(root: Path) -> str:
    one, two = _no_transcript(root), _no_sound(root / "more")
    return f"2 of 5 places are wrong: {one}; {two}".replace("2 of 5", "2 of 6")


@pytest.mark.parametrize(
    "spoil",
    [
        _empty, _texts_only, _no_transcript, _no_sound, _empty_text, _no_utf8, _two_forms, _zero_bytes, _no_samples,
        _too_long, _silence, _cut_header, _other_coding, _missing_file, _row_without_words, _file_without_row, _twice,
        _no_column, _several,
    ],
)  # fmt: skip
def test_spoiled_speech(tmp_path: Path, cache: Path, spoil: Callable[[Path], str]) -> None:
    expected = spoil(tmp_path)
    with pytest.raises(DataError) as caught:
        load(tmp_path)
    assert str(caught.value) == expected
    assert not [file for file in cache.rglob("*") if file.suffix == ".arrow"], "nothing half-processed is kept"


def test_other_sound_needs_soundfile_and_says_so(tmp_path: Path) -> None:
    path = pairs(tmp_path) / "one.wav"
    path.write_bytes(b"fLaC" + bytes(100))
    with pytest.raises(DataError) as caught:
        load(tmp_path)
    assert "soundfile" in str(caught.value) and str(caught.value).startswith(f"{path}: not a ")
    assert "\n" not in str(caught.value)


def wav(samples: Any, kind: int, bits: int, extensible: bool = False) -> bytes:
    """A WAV file by the book: fmt chunk, a chunk that readers pass over, data."""
    tag = 0xFFFE if extensible else kind
    form = struct.pack("<HHIIHH", tag, 1, 16_000, 16_000 * bits // 8, bits // 8, bits)
    form += struct.pack("<HHIH14s", 22, bits, 4, kind, bytes(14)) if extensible else b""
    data = samples if isinstance(samples, bytes) else samples.tobytes()
    chunks = b"".join(
        name + struct.pack("<I", len(body)) + body + bytes(len(body) % 2)
        for name, body in ((b"fmt ", form), (b"LIST", b"odd"), (b"data", data))
    )
    return b"RIFF" + struct.pack("<I", 4 + len(chunks)) + b"WAVE" + chunks


@pytest.mark.parametrize("extensible", [False, True])
@pytest.mark.parametrize(
    ("kind", "bits", "tolerance"),
    [(1, 8, 0.01), (1, 16, 1e-4), (1, 24, 1e-6), (1, 32, 1e-6), (3, 32, 1e-7), (3, 64, 1e-7)],
)  # fmt: skip
def test_all_kinds_of_wav(kind: int, bits: int, tolerance: float, extensible: bool) -> None:
    wanted = tone(0.1)
    whole = np.round(wanted * (2 ** (bits - 1) - 1))
    coded: Any = {
        (1, 8): lambda: (whole + 128).astype(np.uint8),
        (1, 16): lambda: whole.astype("<i2"),
        (1, 24): lambda: b"".join(int(value).to_bytes(3, "little", signed=True) for value in whole),
        (1, 32): lambda: whole.astype("<i4"),
        (3, 32): lambda: wanted.astype("<f4"),
        (3, 64): lambda: wanted.astype("<f8"),
    }[kind, bits]()
    content = wav(coded, kind, bits, extensible)
    assert np.abs(read_sound(content, 16_000) - wanted).max() < tolerance
    assert seconds_of(content) == pytest.approx(0.1)


class TestResampling:
    @pytest.mark.parametrize("rate", [8_000, 11_025, 22_050, 44_100, 48_000, 22_049])
    def test_a_tone_stays_that_tone(self, rate: int) -> None:
        found = resample(tone(1.0, rate).astype(np.float32), rate, 16_000)
        assert len(found) == 16_000
        assert np.abs(found - tone(1.0))[400:-400].max() < 2e-3

    def test_what_is_too_high_for_the_new_rate_is_gone(self) -> None:
        found = resample(tone(1.0, 44_100, 12_000).astype(np.float32), 44_100, 16_000)
        assert np.abs(found)[400:-400].max() < 2e-3

    def test_the_end_does_not_run_into_the_beginning(self) -> None:
        loud_end = np.concatenate([np.zeros(8_000), tone(0.5, 48_000)]).astype(np.float32)
        assert np.abs(resample(loud_end, 48_000, 16_000)[:1_000]).max() < 1e-3


def test_a_batch_has_spectrograms_and_labels_without_the_start(processor: Any, tmp_path: Path) -> None:
    rows = [
        {"audio": {"path": str(sound(tmp_path / "a.wav", rate=8_000)), "bytes": None}, "text": "one two"},
        made_up_speech(1)[0],
    ]
    batch = SpeechBatches(processor)(rows)
    assert batch["input_features"].shape == (2, 80, 200)
    tokenizer = processor.tokenizer
    first = [token for token in batch["labels"][0].tolist() if token != -100]
    assert tokenizer.decode(first, skip_special_tokens=True) == "one two"
    values = token_values(tokenizer)
    assert first[-1] == values["eos_token_id"] and values["decoder_start_token_id"] not in first
    assert tokenizer("one two")["input_ids"][0] == values["decoder_start_token_id"]
    assert batch["labels"].shape == (2, max(len(label_tokens(tokenizer, row["text"])) for row in rows))


def test_word_errors_against_the_textbook_recursion() -> None:
    random = np.random.default_rng(0)

    def slow(a: tuple[int, ...], b: tuple[int, ...]) -> int:
        if not a or not b:
            return len(a) + len(b)
        if a[0] == b[0]:
            return slow(a[1:], b[1:])
        return 1 + min(slow(a[1:], b), slow(a, b[1:]), slow(a[1:], b[1:]))

    for _ in range(30):
        a, b = (tuple(random.integers(0, 3, random.integers(0, 6)).tolist()) for _ in range(2))
        assert word_errors(list(map(str, a)), list(map(str, b))) == slow(a, b)


def test_the_word_error_rate_adds_up_over_batches(processor: Any) -> None:
    from transformers import EvalPrediction

    tokenizer = processor.tokenizer
    rate = WordErrors(tokenizer)

    def batch(wanted: str, found: str) -> EvalPrediction:
        labels, tokens = (tokenizer(text, return_tensors="pt")["input_ids"] for text in (wanted, found))
        return EvalPrediction(tokens, labels)

    assert rate(batch("one two three", "One, two four"), compute_result=False) == {}
    assert rate(batch("one", "one"), compute_result=True) == {"word_error_rate": 1 / 4}
    assert rate(batch("one", "two"), compute_result=True) == {"word_error_rate": 1.0}
