"""Reads sound files as one channel of samples at the model's rate.

This module reads WAV, because Python's `wave` refuses floats and, before 3.12, the "extensible" header of 24-bit
files, which many programs write. soundfile reads other formats (FLAC, MP3, OGG …).
"""

from __future__ import annotations

import io
import math
import struct
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

Samples = NDArray[np.float32]

_PCM: Final = 1  # format tags of WAV (Microsoft, mmreg.h), as the next two
_FLOAT: Final = 3
_EXTENSIBLE: Final = 0xFFFE
_EDGE: Final = 0.05
"""Share of the band that fades out below the limit, because an abrupt cut would ring."""


class SoundError(ValueError):
    """Sound that cannot be read; the message has the reason."""


def read_sound(source: str | Path | bytes, rate: int) -> Samples:
    """One channel (the mean of all) as float32 from -1 to 1, at `rate` samples a second.

    Raises:
        SoundError: it cannot be read.
        OSError: no such file.
    """
    content = source if isinstance(source, bytes) else Path(source).read_bytes()
    samples, own_rate = _decode(content)
    mono: Samples = samples.mean(axis=1, dtype=np.float32)
    return resample(mono, own_rate, rate)


def seconds_of(source: str | Path | bytes) -> float:
    """Length in seconds, read from the header.

    Raises:
        SoundError, OSError: it cannot be read.
    """
    content = source if isinstance(source, bytes) else Path(source).read_bytes()
    if _is_wav(content):
        wav = _wav_parts(content)
        return len(wav.data) / (wav.channels * wav.bits // 8) / wav.rate
    try:
        header = _soundfile().info(io.BytesIO(content))
    except RuntimeError as error:
        raise _unreadable(error) from error
    return float(header.frames) / float(header.samplerate)


def resample(samples: Samples, rate: int, wanted: int) -> Samples:
    """Resamples `samples` from `rate` to `wanted` samples a second.

    Uses the discrete Fourier transform: the spectrum is cut off, or padded with zeros, at half the smaller rate, which
    is exact for lower frequencies (Smith, Mathematics of the DFT, 2nd ed., "Spectral interpolation"). Silence after
    the signal separates its end from its beginning, and the last twentieth of the band fades out.
    """
    if rate == wanted or not len(samples):
        return samples
    common = math.gcd(rate, wanted)
    up = wanted // common
    down = rate // common
    length = math.ceil(len(samples) * up / down)
    blocks = math.ceil((len(samples) + rate // 10) / down)  # whole blocks give a whole number of new samples
    spectrum = np.fft.rfft(samples, blocks * down)
    bins = blocks * up // 2 + 1
    kept = min(bins, len(spectrum))
    edge = max(1, round(_EDGE * kept))
    new = np.zeros(bins, dtype=spectrum.dtype)
    new[:kept] = spectrum[:kept]
    new[kept - edge : kept] *= 0.5 + 0.5 * np.cos(np.linspace(0, np.pi, edge))
    resampled: Samples = (np.fft.irfft(new, blocks * up)[:length] * (up / down)).astype(np.float32)
    return resampled


def _unreadable(error: RuntimeError) -> SoundError:
    reason = getattr(error, "error_string", str(error)).rstrip(".")  # its str() names the buffer
    return SoundError(
        f"not a sound file that soundfile can read ({reason}). Save it again as WAV or FLAC, or remove it"
    )


def _decode(content: bytes) -> tuple[Samples, int]:
    """((samples, channels), rate)."""
    if not content:
        raise SoundError("empty (0 bytes); expected sound")
    if not _is_wav(content):
        try:
            samples, rate = _soundfile().read(io.BytesIO(content), dtype="float32", always_2d=True)
        except RuntimeError as error:
            raise _unreadable(error) from error
        return samples, int(rate)
    channels, rate, bits, kind, data = _wav_parts(content)
    width = bits // 8
    data = data[: len(data) // (width * channels) * width * channels]
    if kind == _FLOAT:
        samples = np.frombuffer(data, f"<f{width}").astype(np.float32)
    elif width == 1:  # the only unsigned PCM format
        samples = (np.frombuffer(data, np.uint8).astype(np.float32) - 128) / 128
    elif width == 3:
        whole = np.zeros((len(data) // 3, 4), np.uint8)
        whole[:, 1:] = np.frombuffer(data, np.uint8).reshape(-1, 3)
        samples = whole.view("<i4")[:, 0].astype(np.float32) / 2**31
    else:
        samples = np.frombuffer(data, f"<i{width}").astype(np.float32) / 2 ** (bits - 1)
    return samples.reshape(-1, channels), rate


def _is_wav(content: bytes) -> bool:
    return content[:4] == b"RIFF" and content[8:12] == b"WAVE"


class _Wav(NamedTuple):
    """A WAV file; `rate` in samples a second, `bits` of a sample, `kind`: `_PCM` or `_FLOAT`."""

    channels: int
    rate: int
    bits: int
    kind: int
    data: bytes


def _wav_parts(content: bytes) -> _Wav:
    form: tuple[int, int, int, int] | None = None
    place = 12
    while place + 8 <= len(content):
        name = content[place : place + 4]
        size = struct.unpack_from("<I", content, place + 4)[0]
        body = content[place + 8 : place + 8 + size]
        if name == b"fmt " and len(body) >= 16:
            kind, channels, rate, _, _, bits = struct.unpack_from("<HHIIHH", body)
            if kind == _EXTENSIBLE and len(body) >= 26:
                kind = struct.unpack_from("<H", body, 24)[0]
            form = (channels, rate, bits, kind)
        elif name == b"data":
            if form is None:
                break
            channels, rate, bits, kind = form
            known = (kind == _PCM and bits in (8, 16, 24, 32)) or (kind == _FLOAT and bits in (32, 64))
            if not known or not channels or not rate:
                raise SoundError(
                    f"a WAV file of format {kind}, {bits} bits, {channels} channel(s), {rate} Hz. Save it as PCM of "
                    "8, 16, 24 or 32 bits, or as floats"
                )
            return _Wav(channels, rate, bits, kind, body)
        place += 8 + size + size % 2
    raise SoundError("a WAV file without sound data: damaged or cut off. Save it again, or remove it")


def _soundfile() -> Any:
    try:
        import soundfile  # type: ignore[import-not-found, import-untyped, unused-ignore]
    except ImportError:
        raise SoundError("not a WAV file; other formats need soundfile; run: pip install soundfile") from None
    return soundfile
