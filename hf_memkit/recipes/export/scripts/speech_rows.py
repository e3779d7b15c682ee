"""Speech with transcripts: sound files with `.txt` files, a table of their paths, or a data set of the hub."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from datasets import Audio, Dataset, Features, Value

from hf_memkit.components.speech_batches_sound import SoundError, read_sound, seconds_of
from hf_memkit.recipes.export.scripts.rows import Source, stamps_of

EXAMPLE = '{"file_name": "clips/one.wav", "text": "good morning"}'
SUFFIXES = (".wav", ".flac", ".mp3", ".ogg", ".opus", ".m4a", ".aiff", ".aif")

PATHS = Features({"path": Value("string")})


def read(source: Source) -> Dataset:
    """Rows of `audio` (`{"path": …}` or `{"bytes": …}`) and `text`. Every local file is decoded."""
    rows, longest = list_rows(source), float(source.data["chunk_length"])  # maximum seconds of the model
    if "hub_id" in source.data:
        return rows.filter(partial(_is_usable, longest=longest))
    if not source.data.get("made_up"):
        paths = [audio["path"] for audio in rows["audio"]]
        stamps = stamps_of(paths)
        arguments = {"paths": paths, "longest": longest, "stamps": stamps}
        Dataset.from_generator(_decoded_paths, features=PATHS, gen_kwargs=arguments)  # cached for the next run
    return rows


def list_rows(source: Source) -> Dataset:
    """`read` without opening a file."""
    data = source.data
    if data.get("made_up"):
        from hf_memkit.recipes.tasks.made_up_speech import made_up_speech

        return Dataset.from_list(made_up_speech())
    if "folder" in data:
        return _of_folder(Path(data["folder"]))
    source = dataclasses.replace(source, example=EXAMPLE)
    rows = source.load()
    audio, text = data["columns"]["audio"], data["columns"]["text"]
    if "files" not in data:
        if audio not in rows.column_names or not isinstance(rows.features[audio], Audio):
            source.refuse(f"no column {audio!r} of sound; columns here: {', '.join(map(repr, rows.column_names))}")
        rows = source.by_roles(source.texts(rows, text, may_be_empty=True), ("audio", "text"))
        return rows.cast_column("audio", Audio(decode=False))
    rows = source.texts(source.texts(rows, audio), text)
    paths = [(source.files[0].parent / name).resolve() for name in rows[audio]]  # relative to the table's folder
    for row, path in enumerate(paths):
        if not path.is_file():
            source.refuse(f"{path}: no such file", row)
    if len(set(paths)) < len(paths):
        row = next(row for row, path in enumerate(paths) if path in paths[:row])
        source.refuse(f"{paths[row]} appears again. Remove one of the rows", row)
    return _as_rows(paths, rows[text])


def _of_folder(folder: Path) -> Dataset:
    """Rows of sound files in a folder and its subfolders, each with its transcript next to it."""
    files = sorted(file for file in folder.rglob("*") if not file.name.startswith("."))
    sounds = [file for file in files if file.suffix.lower() in SUFFIXES]
    texts = {file.with_suffix(""): file for file in files if file.suffix.lower() == ".txt"}
    if not sounds:
        raise SystemExit(f"{folder}: no sound files; expected one.wav with its words in one.txt, or metadata.csv")
    words = []
    for sound in sounds:
        if (text := texts.pop(sound.with_suffix(""), None)) is None:
            raise SystemExit(
                f"{sound}: no transcript; expected its words in {sound.stem}.txt, and no other sound file of that name"
            )
        try:
            words.append(text.read_text(encoding="utf-8-sig"))
        except (UnicodeDecodeError, OSError) as error:
            raise SystemExit(f"{text}: cannot be read: {error}; expected UTF-8 text") from None
        if not words[-1].strip():
            raise SystemExit(f"{text}: empty; expected the words of {sound.name}")
    if texts:
        unpaired = next(iter(texts.values()))
        raise SystemExit(f"{unpaired}: a transcript without its sound file; expected {unpaired.stem}.wav next to it")
    return _as_rows(sounds, words)


def _as_rows(paths: Sequence[Path], texts: Sequence[str]) -> Dataset:
    audio = [{"bytes": None, "path": str(path)} for path in paths]
    return Dataset.from_dict({"audio": audio, "text": [" ".join(text.split()) for text in texts]})


def _is_usable(row: dict[str, Any], longest: float) -> bool:
    return bool(row["text"].strip()) and 0 < seconds_of(row["audio"]["bytes"] or row["audio"]["path"]) <= longest


def unusable(path: str, longest: float) -> str:
    """Why a sound file cannot be trained on; empty if it can."""
    try:
        content = Path(path).read_bytes()
        seconds = seconds_of(content) if content else 0.0
        if seconds > longest:
            return f"{seconds:.1f} s long; the model takes at most {longest:g} s. Cut it and its text into pieces"
        samples = read_sound(content, 16_000)
    except (SoundError, OSError) as error:
        return str(error)
    return "" if samples.any() else f"{seconds:.1f} s of silence, or no sound at all. Remove it"


def _decoded_paths(paths: Sequence[str], longest: float, stamps: Any) -> Iterator[dict[str, str]]:
    """Paths whose sound was decoded. `stamps` (size, modification time) make `datasets` notice changed files."""
    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:  # numpy releases Python's lock
        for path, why in zip(paths, pool.map(partial(unusable, longest=longest), paths), strict=True):
            if why:
                raise SystemExit(f"{path}: {why}")
            yield {"path": path}
