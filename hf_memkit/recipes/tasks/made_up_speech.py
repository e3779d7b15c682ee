"""Words spoken in tones, one for each letter, used without data. Needs only numpy, to be copied next to a script."""

from __future__ import annotations

import io
import wave
from typing import Any, Final

import numpy as np

_RATE: Final = 16_000
_LETTER_S: Final = 0.12
_WORDS: Final = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "zero")


def made_up_speech(count: int = 160) -> list[dict[str, Any]]:
    """`count` rows `{"audio": {"bytes": a WAV file, "path": None}, "text": three words}`, equal in every process."""
    random = np.random.default_rng(0)
    rows = []
    for _ in range(count):
        text = " ".join(random.choice(_WORDS, 3))
        time = np.arange(int(_LETTER_S * _RATE)) / _RATE
        letters = [np.zeros(len(time)) if letter == " " else _tone(letter, time) for letter in text]
        sound = np.concatenate(letters) + random.normal(0, 0.003, len(letters) * len(time))
        file = io.BytesIO()
        with wave.open(file, "wb") as output:
            output.setnchannels(1)
            output.setsampwidth(2)
            output.setframerate(_RATE)
            output.writeframes((sound * 32_000).astype("<i2").tobytes())
        rows.append({"audio": {"bytes": file.getvalue(), "path": None}, "text": text})
    return rows


def _tone(letter: str, time: Any) -> Any:
    """A tone with its octave: 300 Hz for the letter a, a semitone and a half more for each further letter."""
    frequency = 300 * 2 ** ((ord(letter) - ord("a")) / 8)
    fade = np.minimum(1, np.minimum(time, time[::-1]) / 0.01)
    return fade * (0.3 * np.sin(2 * np.pi * frequency * time) + 0.15 * np.sin(4 * np.pi * frequency * time))
