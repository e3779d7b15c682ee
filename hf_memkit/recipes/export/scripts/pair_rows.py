"""Pairs of texts: rows of a source and its target."""

from __future__ import annotations

import dataclasses

from datasets import Dataset

from hf_memkit.recipes.export.scripts.rows import Source

EXAMPLE = '{"source": "The house is small.", "target": "Das Haus ist klein."}'


def read(source: Source) -> Dataset:
    """The pairs, as `source` and `target`."""
    source = dataclasses.replace(source, example=EXAMPLE)
    rows = source.load()
    for role in ("source", "target"):
        rows = source.texts(rows, source.data["columns"][role])
    return source.by_roles(rows, ("source", "target"))
