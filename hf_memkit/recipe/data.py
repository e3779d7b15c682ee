"""A `--data` value in, documents out: the texts, and what they are called in everything shown to a person.

Local files are read by `hf_memkit.recipe.text_readers`, and kept by `datasets` in its own cache as Arrow files, which
are mapped into memory rather than loaded. The cache knows them by path, size and time of change, so a second run
neither reads nor checks the files again. Nothing is written beside the user's files.

`datasets.load_dataset("text" | "json")` does not read them: it takes paths for patterns (`notes[1].txt` is not found),
holds a whole text file in memory, fails where a column that nobody asked for changes its type half-way, and names no
line in its errors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_memkit.errors import DataError
from hf_memkit.recipe.sources import HubData, NotOnHub, kept_files, load_split, named_source, nor_here
from hf_memkit.recipe.text_readers import (
    DOCUMENT_CHARACTERS,
    LocalFiles,
    check_schema,
    find_text_files,
    read_texts,
)

FALLBACK = "pydoc_data.topics (the text of Python's own help, used because the hub is not reachable)"

# Raise it when `read_texts` gives other texts for the same files: what the cache holds is then read anew.
_READERS_VERSION = 1
_ROWS = 100


@dataclass(frozen=True)
class Documents:
    """Texts to train on. Iterating gives them one by one in a fixed order, without those that are only white space."""

    texts: Sequence[str]
    """A list, or a `datasets.Column`, which reads from disk whatever is asked of it."""
    source: str
    """What a person reads."""

    def __iter__(self) -> Iterator[str]:
        # By slices: asked for row by row, a Column takes eighty times as long.
        for start in range(0, len(self.texts), _ROWS):
            for text in self.texts[start : start + _ROWS]:
                if text and not text.isspace():
                    yield text


def load_documents(
    source: str | None,
    *,
    default_hub_id: str,
    default_hub_config: str | None,
    text_column: str = "text",
    hub_reachable: bool,
) -> Documents:
    """The documents that `source` names.

    Args:
        source: a file of text, JSON, JSON lines or parquet; a folder of one kind of them; or a hub ID, `name`,
            `owner/name` or `owner/name:config`, of which the split `train` is taken. A path that exists comes first.
            None means the default corpus of the hub, or the text of Python's own help if that cannot be had.
        default_hub_id: the default corpus.
        default_hub_config: its config, if it has several.
        text_column: the column that holds the text in JSON, parquet and on the hub.
        hub_reachable: if False, the hub is not asked, and only what `datasets` has in its cache is found.

    Raises:
        DataError: nothing there, nothing that can be read, or no text in it.
    """
    wanted = HubData(default_hub_id, default_hub_config, "train") if source is None else named_source(source)
    if isinstance(wanted, Path):
        return _from_files(find_text_files(wanted), text_column)
    absent = "no such dataset; give a file or folder of text instead"
    try:
        rows = load_split(wanted, reachable=hub_reachable, absent=absent)
    except NotOnHub as error:
        if source is None and not hub_reachable:
            return _fallback()
        more = "; --data trains on a file or folder of your own" if source is None else nor_here(wanted)
        raise DataError(f"{error}{more}") from error
    return _from_hub(wanted, rows, text_column, hub_reachable)


def _fallback() -> Documents:
    from hf_memkit.recipe.tasks.made_up_texts import help_texts

    return Documents(help_texts(), FALLBACK)


def _from_files(files: LocalFiles, text_column: str) -> Documents:
    import datasets

    features = datasets.Features({"text": datasets.Value("large_string")})
    version = (_READERS_VERSION, DOCUMENT_CHARACTERS)
    rows = kept_files(_rows, features, files, text_column=text_column, version=version)
    return Documents(rows["text"], files.source)


def _rows(
    paths: tuple[str, ...], names: tuple[str, ...], kind: str, text_column: str, **stamps: object
) -> Iterator[dict[str, str]]:
    """What `datasets` keeps. `stamps` only make its cache tell files apart."""
    found = False
    for text in read_texts(map(Path, names), kind, text_column):
        found = True
        yield {"text": text}
    if not found:
        what = names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more files"
        raise DataError(f"{what}: no text in it, only white space or nothing. Give a file with text")


def _from_hub(wanted: HubData, rows: Any, text_column: str, hub_reachable: bool) -> Documents:
    name = wanted.name
    where = f"{wanted.config} ({wanted.hub_id})" if wanted.config else name
    check_schema(name, rows.features.arrow_schema, text_column)
    if nulls := rows.data.column(text_column).null_count:
        raise DataError(f"{name}: column {text_column!r}: expected text, found null in {nulls} of {len(rows)} rows")
    documents = Documents(rows[text_column], where if hub_reachable else f"{where}, from this machine's cache")
    if next(iter(documents), None) is None:
        raise DataError(f"{name}: no text in its split 'train'. Give another data set")
    return documents
