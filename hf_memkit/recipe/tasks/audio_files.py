"""A local path in, its sound files with their transcripts out, every file read once.

Three forms are read: a folder with `metadata.csv` or `metadata.jsonl`, which have the columns `file_name` and `text`
as Hugging Face's AudioFolder has them; a table of that kind as a file; and a folder, with folders in it or not, where
each sound file has its transcript beside it (`one.wav`, `one.txt`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from hf_memkit.errors import DataError
from hf_memkit.recipe.tables import find_tables, read_rows
from hf_memkit.recipe.tasks.media import checked, column_of, files_in, only_table, told_at_once
from hf_memkit.recipe.text_readers import name_of, not_utf8

SUFFIXES: Final = (".wav", ".flac", ".mp3", ".ogg", ".opus", ".m4a", ".aiff", ".aif")

LOCAL_FORM: Final = "a folder of sound files with metadata.csv, or with a .txt beside each"
EXAMPLE: Final = '{"file_name": "clips/one.wav", "text": "good morning"}'


@dataclass(frozen=True)
class AudioFile:
    """`where` is what messages call it: its path, or the row that names it."""

    path: str
    text: str
    where: str


@dataclass(frozen=True)
class AudioFiles:
    files: tuple[AudioFile, ...]
    source: str


def audio_columns(columns: Mapping[str, str]) -> tuple[str, ...]:
    """Names of a table's column of files, in the order in which they are looked for."""
    return "file_name", "audio", "path", "file", columns["audio"]


def text_columns(columns: Mapping[str, str]) -> tuple[str, ...]:
    """Names of a table's column of transcripts, in the order in which they are looked for."""
    return columns["text"], "text", "transcription", "sentence", "transcript"


def list_audio(path: Path, columns: Mapping[str, str]) -> AudioFiles:
    """The sound files at `path`, each with its transcript; none of them is opened.

    Raises:
        DataError: none, or they are not laid out in one of the forms; tells all of it at once.
    """
    if not path.is_dir():
        if path.suffix.lower() in SUFFIXES:
            raise DataError(f"{path}: one sound file without its transcript; expected {LOCAL_FORM}")
        return _from_table(path, path.parent, columns, [])
    found = _below(path)
    sounds = [file for file in found if file.suffix.lower() in SUFFIXES]
    texts = [file for file in found if file.suffix.lower() == ".txt"]
    table = only_table(path, files_in(path)[1])
    if not sounds and table is None:
        what = f"it has {len(found)} files of other kinds" if found else "it is empty"
        raise DataError(f"{path}: no sound files ({what}); expected {LOCAL_FORM}")
    if table is None:
        return _from_pairs(path, sounds, texts)
    if texts:
        raise DataError(
            f"{path}: transcripts in two forms: {table.name}, and {len(texts)} .txt files such as {texts[0].name}; "
            f"keep one of them"
        )
    return _from_table(table, path, columns, sounds)


def check_audio(file: AudioFile, longest_s: float) -> str:
    """SHA-256 of the file, which was decoded as a whole.

    Args:
        file: one of `list_audio`.
        longest_s: what the model hears of a file at once, in seconds.

    Raises:
        DataError: it cannot be read, has no sound in it, or is longer than that.
    """
    from hf_memkit.components.speech_batches_sound import SoundError, read_sound, seconds_of

    try:
        content = Path(file.path).read_bytes()
        seconds = seconds_of(content) if content else 0.0
        if seconds > longest_s:
            raise DataError(
                f"{file.where}: {seconds:.1f} s long; the model takes at most {longest_s:g} s. Cut it and its text "
                f"into pieces"
            )
        samples = read_sound(content, _RATE)
    except SoundError as error:
        raise DataError(f"{file.where}: {error}") from error
    except OSError as error:
        raise DataError(f"{file.where}: cannot be read: {error.strerror or error}") from error
    if not len(samples):
        raise DataError(f"{file.where}: no sound (0 samples). Remove it")
    if not samples.any():
        raise DataError(f"{file.where}: {seconds:.1f} s of silence: every sample is 0. Remove it")
    return hashlib.sha256(content).hexdigest()


_RATE: Final = 16_000


def audio_rows(files: tuple[AudioFile, ...], longest_s: float, **stamps: object) -> Iterator[dict[str, Any]]:
    """A row of each file that was read and found good. `stamps` only make the cache tell files apart.

    Raises:
        DataError: some cannot be used; names them.
    """
    found = checked(files, lambda file: (file, check_audio(file, longest_s)), "sound files cannot be used")
    for file, digest in found:
        yield {"audio": {"bytes": None, "path": file.path}, "text": file.text, "sha256": digest, "where": file.where}


def _below(folder: Path) -> list[Path]:
    folders, files = files_in(folder)
    return [*files, *(file for inner in folders for file in _below(inner))]


def _from_pairs(root: Path, sounds: list[Path], texts: list[Path]) -> AudioFiles:
    listed: list[AudioFile] = []
    problems: list[str] = []
    by_name: dict[Path, Path] = {}
    for file in sounds:
        name = file.with_suffix("")
        if (other := by_name.setdefault(name, file)) is not file:
            problems.append(f"{file}: {other.name} has the same transcript; keep one of them")
            continue
        transcript = file.with_suffix(".txt")
        if transcript not in texts:
            problems.append(f"{file}: no transcript; expected its words in {transcript.name} beside it")
            continue
        try:
            listed.append(AudioFile(str(file.resolve()), _text(transcript), str(file)))
        except DataError as error:
            problems.append(str(error))
    problems += [
        f"{file}: a transcript without its sound file; expected {file.stem}.wav beside it"
        for file in texts
        if file.with_suffix("") not in by_name
    ]
    return _finish(listed, problems, str(root))


def _text(path: Path) -> str:
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise not_utf8(path, 1, error) from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error
    if not text.strip():
        raise DataError(f"{path}: empty; expected the words of {path.stem}.wav")
    return " ".join(text.split())


def _from_table(path: Path, folder: Path, columns: Mapping[str, str], sounds: list[Path]) -> AudioFiles:
    """`sounds`: files in the folder, each of which must have its row."""
    tables = find_tables(path, f"{LOCAL_FORM}, such as {EXAMPLE}")
    listed: list[AudioFile] = []
    problems: list[str] = []
    places: dict[str, str] = {}
    for where, row in read_rows(tables.paths[0], tables.kind):
        audio = column_of(where, row, audio_columns(columns), EXAMPLE)
        text = column_of(where, row, text_columns(columns), EXAMPLE)
        name, words = row[audio], row[text]
        if not isinstance(name, str) or not name.strip():
            problems.append(f"{where}: column {audio!r}: expected a path, found {name_of(name)}; such as {EXAMPLE}")
            continue
        file = folder / name
        resolved = str(file.resolve())
        if resolved in places:
            problems.append(f"{where}: {name} appears again, first at {places[resolved]}. Remove one row")
            continue
        places[resolved] = where
        if not isinstance(words, str) or not words.strip():
            found = "nothing" if isinstance(words, str) else name_of(words)
            problems.append(
                f"{where}: column {text!r}: expected the words of {name}, found {found}; such as {EXAMPLE}"
            )
        elif not file.is_file():
            problems.append(f"{where}: {name}: no such file in {folder}")
        else:
            listed.append(AudioFile(resolved, " ".join(words.split()), f"{where}: {name}"))
    if not listed and not problems:
        raise DataError(f"{path}: it has no rows; expected {LOCAL_FORM}, such as {EXAMPLE}")
    problems += [
        f"{file}: no transcript; expected a row for it in {path.name}"
        for file in sounds
        if str(file.resolve()) not in places
    ]
    return _finish(listed, problems, str(path))


def _finish(listed: list[AudioFile], problems: list[str], source: str) -> AudioFiles:
    if problems:
        raise told_at_once(problems, len(listed) + len(problems), "places are wrong")
    return AudioFiles(tuple(listed), f"{source} ({len(listed)} sound files)")
