"""Texts with a class each, or pairs of texts: sentiment, topic, entailment. For any model with a classifying head.

The classes are those in the data, in the order of their numbers if they are numbers, otherwise of the
alphabet. Of each class the last examples are held out, in the share that the recipe gives, so that data that is sorted
by class is measured on all of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Final

from hf_memkit.errors import DataError
from hf_memkit.recipe.tables import (
    Table,
    as_tokens,
    cell,
    checked_text,
    load_table,
    tokenizer_for,
)
from hf_memkit.recipe.tasks.made_up_texts import kinds_of_text
from hf_memkit.recipe.tasks.task import Examples, PaddedTask, Say, Settings
from hf_memkit.recipe.text_readers import name_of
from hf_memkit.recipe.tokenizer import Framing
from hf_memkit.setup import Setup

_TOKENS: Final = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]",
                  "mask_token": "[MASK]"}  # fmt: skip
_MULTIPLE: Final = 8
_LISTED: Final = 8
"""Classes that a message names at most."""


class _Reader:
    """Reads the rows of one table, whose labels are all numbers or all names."""

    def __init__(self, task: _TextClassification) -> None:
        self._task, self._labels = task, OneKind(task.example)

    def __call__(self, columns: Mapping[str, str], where: str, row: Mapping[str, Any]) -> dict[str, Any]:
        task, pair = self._task, None
        if "text_pair" in row or "text_pair" in columns:
            pair = checked_text(task, {"text_pair": "text_pair", **columns}, "text_pair", where, row)
        text = checked_text(task, columns, "text", where, row)
        label = cell(task, columns, "label", where, row)
        name = label_name(label, columns["label"], where, task.example)
        self._labels.add(label, columns["label"], where)
        return {"text": text, "text_pair": pair, "label": name, "place": where}


class _TextClassification(PaddedTask):
    name: ClassVar[str] = "text-classification"
    auto_class: ClassVar[str] = "AutoModelForSequenceClassification"
    model_parts: ClassVar[Settings] = {"mean_loss": ({}, "the model averages its loss over the examples itself")}
    columns: ClassVar[Mapping[str, str]] = {"text": "text", "label": "label"}
    local_form: ClassVar[str] = (
        "a table of texts with a label each: JSON lines, CSV, TSV or parquet, or a folder of one kind"
    )
    example: ClassVar[str] = '{"text": "I would buy it again.", "label": "positive"}'
    script: ClassVar[str] = "train_text_classification"
    padded_to: ClassVar[int] = _MULTIPLE

    def arguments(self, data: Any) -> Settings:
        return {
            "prediction_loss_only": (
                False,
                "accuracy and F1 are measured; of the logits only the likeliest class stays",
            )
        }

    def reader(self) -> _Reader:
        return _Reader(self)

    def features(self) -> Any:
        import datasets

        kinds = {"text": "large_string", "text_pair": "large_string", "label": "string", "place": "string"}
        return datasets.Features({name: datasets.Value(kind) for name, kind in kinds.items()})

    def made_up(self) -> list[dict[str, Any]]:
        return [{**row, "text_pair": None, "place": f"made-up row {n}"} for n, row in enumerate(kinds_of_text(), 1)]

    def read(self, setup: Setup) -> tuple[Table, bool, list[str]]:
        """(the rows, whether they have second texts, their classes)."""
        table = load_table(self, setup)
        return table, _paired(table.rows), _classes(table.rows["label"][:], table.rows["place"], table.source)

    def prepare(self, setup: Setup, say: Say) -> Examples:
        from hf_memkit.components.classification_metrics import last_of_each

        data = setup.section("data")
        table, paired, labels = self.read(setup)
        given: list[str] = table.rows["label"][:]
        say(f"Data: {table.source}")
        texts = ("text", "text_pair") if paired else ("text",)
        tokenizer = tokenizer_for(setup, table, texts, self.framing(setup), say)
        length = int(data["sequence_length"])
        encode = partial(_encode, tokenizer, labels, paired, length)
        rows = as_tokens(table.rows, encode, {"input_ids": ("texts", length)}, say)
        held = last_of_each(given, float(data["held_out"]))
        taken = set(held)
        train = rows.select([index for index in range(len(rows)) if index not in taken])
        return Examples(train, rows.select(held), tokenizer, {"labels": labels})

    def padded(self, setup: Setup) -> tuple[str, ...]:
        return ("input_ids",)

    def framing(self, setup: Setup) -> Framing:
        """BERT's special tokens; the second text of a pair is marked where the model can tell the two apart."""
        kinds = int(setup["model.architecture"].get("type_vocab_size", 2))
        second = ":1" if kinds > 1 else ""
        return Framing(_TOKENS, single="[CLS] $A [SEP]", pair=f"[CLS] $A [SEP] $B{second} [SEP]{second}")

    def examples(self) -> list[dict[str, Any]]:
        return [{name: row[name] for name in self.columns} for row in self.made_up()]


def _classes(given: Sequence[str], places: Sequence[str], source: str) -> list[str]:
    """The classes, numbers before names.

    Raises:
        DataError: there is one only, or one that has a single example: none would be left to measure it.
    """
    counts = Counter(given)
    if len(counts) < 2:
        raise DataError(
            f"{source}: all {len(given)} rows have the label {given[0]!r}; expected at least two classes with "
            "at least 2 examples each"
        )
    single = [label for label, count in counts.items() if count == 1]
    if single:
        others = ", ".join(f"{label!r} ({count})" for label, count in counts.most_common(_LISTED) if count > 1)
        where = places[given.index(single[0])]
        if not others or len(single) > len(given) / 10:
            raise DataError(
                f"{where}: label {single[0][:40]!r} appears in this row only, as do {len(single)} of the "
                f"{len(counts)} labels in {len(given)} rows. Each class needs at least 2 examples. Check that the "
                "recipe names the right column"
            )
        raise DataError(
            f"{where}: label {single[0][:40]!r} appears in this row only; the others are {others}. "
            "Each class needs at least 2 examples, one to train on and one to hold out"
        )
    return sorted(counts, key=lambda name: (0, int(name), "") if name.isdecimal() else (1, 0, name))


def _paired(rows: Any) -> bool:
    """Whether there are second texts.

    Raises:
        DataError: some rows have one, others not.
    """
    column = rows.data.column("text_pair")
    missing = column.null_count
    if missing and missing < len(rows):
        lacks = next(number for number, text in enumerate(rows["text_pair"]) if text is None)
        raise DataError(
            f"{rows[lacks]['place']}: no column 'text_pair', which {len(rows) - missing} of {len(rows)} rows have; "
            "give a second text in every row, or in none"
        )
    return bool(missing == 0)


def _encode(
    tokenizer: Any, labels: list[str], paired: bool, length: int, rows: Mapping[str, list[Any]]
) -> dict[str, list[Any]]:
    inputs = tokenizer(
        rows["text"],
        rows["text_pair"] if paired else None,
        truncation=True,
        max_length=length,
        return_attention_mask=False,  # the collator makes it
    )
    return {**inputs, "labels": [labels.index(label) for label in rows["label"]]}


TASK = _TextClassification()


def label_name(value: Any, column: str, where: str, example: str) -> str:
    """The name of a class. A class may be a number, also one that a library has made 1.0 of.

    Raises:
        DataError: there is none, or something that is not one.
    """
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, int):
        if value >= 0:
            return str(value)
        raise DataError(f"{where}: column {column!r}: {value} means no label. Remove this row")
    if not isinstance(value, str):
        raise DataError(
            f"{where}: column {column!r}: expected one class, a name or a whole number, found {name_of(value)}; "
            f"such as {example}"
        )
    if not value.strip():
        raise DataError(f"{where}: column {column!r}: empty; expected a class, such as {example}")
    return value.strip()


class OneKind:
    """Sees to it that the labels of one table are all numbers or all names: `1` beside `"positive"` is a second way of
    writing, and would be a separate class. Text that is a number goes with both: in CSV all is text."""

    def __init__(self, example: str) -> None:
        self._example, self._first = example, ("", "", "")

    def add(self, value: Any, column: str, where: str) -> None:
        """Takes a label that `label_name` has taken.

        Raises:
            DataError: it is of the other kind than those before.
        """
        if isinstance(value, str):
            kind = "" if value.strip().isdecimal() else "a name"
        else:
            kind = "true or false" if isinstance(value, bool) else "a number"
        if not kind:
            return
        before, first, place = self._first
        if not before:
            self._first = kind, str(value), where
        elif kind != before:
            raise DataError(
                f"{where}: column {column!r}: {str(value)[:40]!r} is {kind}, and {first[:40]!r} in {place} is "
                f"{before}; write all labels in one way, such as {self._example}"
            )
