"""Sound of every kind, batches of speech, and word errors. Real files."""

from __future__ import annotations

import struct
import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hf_memkit.components.speech_batches import SpeechBatches, WordErrors, label_tokens, word_errors
from hf_memkit.components.speech_batches_sound import SoundError, read_sound, resample, seconds_of
from hf_memkit.recipes.tasks.made_up_speech import made_up_speech
from hf_memkit.recipes.tasks.whisper_tokenizer import token_values, train_whisper_tokenizer


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


@pytest.mark.parametrize(("rate", "channels"), [(8_000, 1), (44_100, 2), (48_000, 1), (22_050, 6)])
def test_any_rate_and_channels(tmp_path: Path, rate: int, channels: int) -> None:
    result = read_sound(sound(tmp_path / "a.wav", 1.0, rate, channels), 16_000)
    assert len(result) == 16_000 and result.dtype == np.float32
    assert np.abs(result - tone(1.0))[400:-400].max() < 2e-3


def test_a_file_without_sound_is_refused() -> None:
    with pytest.raises(SoundError, match="soundfile"):
        read_sound(b"fLaC" + bytes(100), 16_000)
    with pytest.raises(SoundError, match="a WAV file of format 85, 16 bits"):
        read_sound(wav(b"\0" * 100, 85, 16), 16_000)  # MP3 inside WAV


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
    @pytest.mark.parametrize("rate", [8_000, 44_100, 22_049])
    def test_a_tone_stays_that_tone(self, rate: int) -> None:
        result = resample(tone(1.0, rate).astype(np.float32), rate, 16_000)
        assert len(result) == 16_000
        assert np.abs(result - tone(1.0))[400:-400].max() < 2e-3

    def test_frequencies_above_the_new_rate_are_removed(self) -> None:
        result = resample(tone(1.0, 44_100, 12_000).astype(np.float32), 44_100, 16_000)
        assert np.abs(result)[400:-400].max() < 2e-3

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

    def batch(wanted: str, result: str) -> EvalPrediction:
        labels, tokens = (tokenizer(text, return_tensors="pt")["input_ids"] for text in (wanted, result))
        return EvalPrediction(tokens, labels)

    assert rate(batch("one two three", "One, two four"), compute_result=False) == {}
    assert rate(batch("one", "one"), compute_result=True) == {"word_error_rate": 1 / 4}
    assert rate(batch("one", "two"), compute_result=True) == {"word_error_rate": 1.0}
