"""Texts, or pairs of texts, with a class each."""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter

from datasets import Dataset

from hf_memkit.recipes.export.scripts.rows import Source, describe

EXAMPLE = '{"text": "I would buy it again.", "label": "positive"}'

_KINDS = {str: "a name", bool: "true or false", int: "a number"}
MAX_LISTED = 8
"""Maximum number of classes in a message."""


def read(source: Source) -> Dataset:
    """The examples, as `text`, `label` (name of the class) and, for pairs, `text_pair`."""
    source = dataclasses.replace(source, example=EXAMPLE)
    columns = {"text_pair": "text_pair", **source.data["columns"]}
    rows = source.texts(source.load(), columns["text"])
    roles = ["text"]
    second = rows.data.column(columns["text_pair"]) if columns["text_pair"] in rows.column_names else None
    if second is not None and second.null_count < len(rows):
        rows = source.texts(rows, columns["text_pair"], may_be_empty=True)
        roles.append("text_pair")
    names = class_names(source, rows, columns["label"])
    _refuse_single(source, names)
    return source.by_roles(rows, roles).add_column("label", names)


def class_names(source: Source, rows: Dataset, column: str) -> list[str]:
    """The class of each row: its name if the data set has names, or the value in the column."""
    if column not in rows.column_names:
        columns = ", ".join(map(repr, rows.column_names))
        source.refuse(f"no column {column!r}; columns here: {columns}; expected {EXAMPLE}")
    known = getattr(rows.features[column], "names", None)
    names: list[str] = []
    kinds: dict[str, int] = {}
    values = rows[column][:]
    if source.data.get("format") == "csv":  # a label stays as it is written: 01 is not 1
        with contextlib.suppress(TypeError, ValueError):  # names
            numbers = [float(value) for value in values]
            values = [
                value if number >= 0 and number.is_integer() else number
                for value, number in zip(values, numbers, strict=True)
            ]
    for row, value in enumerate(values):
        if isinstance(value, float) and value.is_integer():
            value = int(value)  # a library has made 1.0 of 1
        if isinstance(value, int) and value < 0:
            source.refuse(f"column {column!r}: {value} means no label. Remove this row", row)
        if isinstance(value, str) and not value.strip():
            source.refuse(f"column {column!r}: empty; expected a class, such as {EXAMPLE}", row)
        if not isinstance(value, str | int):
            source.expected(column, "one class, a name or a whole number", value, row)
        if not (isinstance(value, str) and value.strip().isdecimal()):  # in CSV all is text
            kind = _KINDS[type(value)]
            kinds.setdefault(kind, row)
            if len(kinds) > 1:
                first, before = next(iter(kinds.items()))
                mixed = f"{describe(value)} is {kind}, and row {before + 1} has {first}"
                source.refuse(f"column {column!r}: {mixed}; write all labels in one way, such as {EXAMPLE}", row)
        name = str(value).lower() if isinstance(value, bool) else str(value).strip()
        names.append(known[value] if known else name)
    return names


def _refuse_single(source: Source, names: list[str]) -> None:
    """Refuse classes with a single example: each needs one to train on and one to hold out."""
    counts = Counter(names)
    if len(counts) < 2:
        source.refuse(
            f"all {len(names)} rows have the label {names[0]!r}; expected at least two classes with at least 2 "
            "examples each"
        )
    single = [name for name, count in counts.items() if count == 1]
    if not single:
        return
    others = ", ".join(f"{name!r} ({count})" for name, count in counts.most_common(MAX_LISTED) if count > 1)
    why = f"label {single[0][:40]!r} appears in this row only"
    if not others or len(single) > len(names) / 10:
        why += f", as do {len(single)} of the {len(counts)} labels. Check that the recipe names the right column"
    else:
        why += f"; the others are {others}. Each class needs at least 2 examples, one to train on and one to hold out"
    source.refuse(why, names.index(single[0]))
