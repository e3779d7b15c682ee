"""Documents: rows with one column of text."""

from __future__ import annotations

import dataclasses

import pyarrow.compute as compute
from datasets import Dataset

from hf_memkit.recipes.export.scripts.rows import Source

EXAMPLE = '{"text": "Once upon a time …"}'


def read(source: Source) -> Dataset:
    """The documents, as `text`."""
    source = dataclasses.replace(source, example=EXAMPLE)
    column = source.data["text_column"]
    rows = source.texts(source.load(), column, may_be_empty=True)
    texts = rows.data.column(column)
    binary = compute.index(compute.match_substring(texts, "\0"), True).as_py()
    if binary >= 0:
        source.refuse("expected text, found a NUL byte: a binary file. Give a text file", binary)
    if not compute.any(compute.not_equal(compute.utf8_trim_whitespace(texts), "")).as_py():
        source.refuse("no text in it, only white space or nothing. Give a file with text")
    rows = rows.select_columns([column])
    return rows if column == "text" else rows.rename_column(column, "text")
