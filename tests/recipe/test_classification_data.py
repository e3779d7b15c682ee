"""Texts with a class from real files through the real datasets library: what is read, and what is said of files that
are spoilt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import pytest

from hf_memkit.errors import DataError
from hf_memkit.recipe.tasks import find_task
from hf_memkit.recipe.tasks.task import Examples
from hf_memkit.setup import Setup
from tests.recipe.conftest import lines, write

pytestmark = pytest.mark.usefixtures("cache")

TASK = find_task("text-classification")
EXAMPLE = TASK.example


def prepared(
    data: Path, *, held_out: float = 0.2, kinds: int = 2, said: list[str] | None = None, **columns: str
) -> Examples:
    values: dict[str, Any] = {
        "source": str(data),
        "columns": {**TASK.columns, **columns},
        "hub_id": "nobody/nothing",
        "hub_config": None,
        "hub_split": "train",
        "held_out": held_out,
        "tokenizer": None,
        "vocabulary_size": 300,
        "sequence_length": 16,
    }
    setup = Setup(preset="x").put_all("data", {key: (value, "for this test") for key, value in values.items()})
    setup = setup.put("model.architecture", {"model_type": "bert", "type_vocab_size": kinds}, "for this test")
    return TASK.prepare(setup, ([] if said is None else said).append)


def labelled(*labels: object) -> list[dict[str, Any]]:
    return [{"text": f"text {number}", "label": label} for number, label in enumerate(labels)]


GOOD = labelled("bad", "good") * 5


class TestWhatIsRead:
    @pytest.mark.parametrize(
        ("labels", "classes"),
        [
            ((10, 2, 10, 2), ["2", "10"]),
            (("b", "a", "b", "a"), ["a", "b"]),
            ((1.0, 0.0, 1.0, 0.0), ["0", "1"]),
            ((True, False, True, False), ["false", "true"]),
            (("1", 1, 2, "2"), ["1", "2"]),
            (("1", "1", "none", "none"), ["1", "none"]),
        ],
    )
    def test_labels_are_names_or_numbers(self, tmp_path: Path, labels: tuple[Any, ...], classes: list[str]) -> None:
        examples = prepared(write(tmp_path / "a.jsonl", lines(*labelled(*labels))))
        assert examples.facts["labels"] == classes

    def test_csv_with_other_columns(self, tmp_path: Path) -> None:
        content = b"id,review,stars\n" + b"".join(b'%d,"fine, really",%d\n' % (n, n % 5) for n in range(20))
        examples = prepared(write(tmp_path / "a.csv", content), text="review", label="stars")
        assert (
            examples.facts["labels"] == ["0", "1", "2", "3", "4"]
            and len(examples.train) + len(examples.held_out) == 20
        )

    def test_sorted_data_is_held_out_from_every_class(self, tmp_path: Path) -> None:
        rows = labelled(*["a"] * 50, *["b"] * 30, *["c"] * 2)
        examples = prepared(write(tmp_path / "a.jsonl", lines(*rows)), held_out=0.1)
        held = examples.held_out["labels"][:]
        assert sorted(held) == [0] * 5 + [1] * 3 + [2] and held != sorted(held)
        assert len(examples.train) == 82 - len(held)
        again = prepared(write(tmp_path / "b.jsonl", lines(*rows)), held_out=0.1)
        assert again.held_out["labels"][:] == held

    @pytest.mark.parametrize(("kinds", "second"), [(2, {0, 1}), (1, {0})])
    def test_pairs_are_told_apart_where_the_model_can(self, tmp_path: Path, kinds: int, second: set[int]) -> None:
        rows = [{**row, "text_pair": f"and {number}"} for number, row in enumerate(GOOD)]
        examples = prepared(write(tmp_path / "a.jsonl", lines(*rows)), kinds=kinds)
        row = examples.train[0]
        assert examples.processing_class.decode(row["input_ids"]) == "[CLS]text 0[SEP]and 0[SEP]"
        assert set(row.get("token_type_ids", [0])) == second

    def test_long_texts_are_cut_and_counted(self, tmp_path: Path) -> None:
        rows, said = [*GOOD, {"text": "long " * 100, "label": "bad"}], list[str]()
        examples = prepared(write(tmp_path / "a.jsonl", lines(*rows)), said=said)
        assert max(map(len, examples.train["input_ids"])) <= 16
        assert said[-1] == f"Cut: 1 of {len(rows)} texts reach the maximum of 16 tokens; what follows is cut"


SPOILT = {
    "a missing column": (
        "a.jsonl", lines(*GOOD, {"text": "one", "class": "bad"}),
        f"{{file}}:11: no column 'label'; columns here: 'text', 'class'; expected {EXAMPLE}",
    ),
    "an empty label": (
        "a.csv", b"text,label\none,good\ntwo,\n",
        f"{{file}}:3: column 'label': empty; expected a class, such as {EXAMPLE}",
    ),
    "no label": (
        "a.jsonl", lines(*GOOD, {"text": "one", "label": None}),
        "{file}:11: column 'label': expected one class, a name or a whole number, found null; such as " + EXAMPLE,
    ),
    "several labels": (
        "a.jsonl", lines({"text": "one", "label": ["good", "short"]}),
        "{file}:1: column 'label': expected one class, a name or a whole number, found an array; such as " + EXAMPLE,
    ),
    "a score": (
        "a.jsonl", lines({"text": "one", "label": 0.5}),
        "{file}:1: column 'label': expected one class, a name or a whole number, found 0.5; such as " + EXAMPLE,
    ),
    "a label that says there is none": (
        "a.jsonl", lines(*GOOD, {"text": "one", "label": -1}),
        "{file}:11: column 'label': -1 means no label. Remove this row",
    ),
    "numbers beside names": (
        "a.jsonl", lines(*labelled("0", "good", "good", 1, "0", 1)),
        "{file}:4: column 'label': '1' is a number, and 'good' in {file}:2 is a name; write all labels in one way, "
        f"such as {EXAMPLE}",
    ),
    "an empty text": (
        "a.jsonl", lines({"text": "", "label": "good"}),
        f"{{file}}:1: column 'text': empty; expected text, such as {EXAMPLE}",
    ),
    "one class": (
        "a.jsonl", lines(*labelled("good", "good", "good")),
        "{file}: all 3 rows have the label 'good'; expected at least two classes with at least 2 examples each",
    ),
    "a label outside of the others": (
        "a.jsonl", lines(*GOOD, *labelled("godo")),
        "{file}:11: label 'godo' appears in this row only; the others are 'bad' (5), 'good' (5). Each class needs at "
        "least 2 examples, one to train on and one to hold out",
    ),
    "texts for labels": (
        "a.jsonl", lines(*labelled(*(f"this is number {number}" for number in range(30)))),
        "{file}:1: label 'this is number 0' appears in this row only, as do 30 of the 30 labels in 30 rows. Each "
        "class needs at least 2 examples. Check that the recipe names the right column",
    ),
    "a second text now and then": (
        "a.jsonl", lines(*({**row, "text_pair": "and"} for row in GOOD), *labelled("good")),
        "{file}:11: no column 'text_pair', which 10 of 11 rows have; give a second text in every row, or in none",
    ),
    "a quote that does not end": (
        "a.csv", b'text,label\n"one,good\ntwo,bad\n',
        "{file}:3: not CSV: unexpected end of data",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", SPOILT)
def test_spoilt_data_is_answered_with_place_and_example(tmp_path: Path, what: str) -> None:
    name, content, expected = SPOILT[what]
    path = write(tmp_path / name, content)
    with pytest.raises(DataError) as caught:
        prepared(path)
    assert str(caught.value).replace(str(path), "{file}") == expected
    assert [each.name for each in tmp_path.iterdir()] == [name], "nothing is written beside the data"


def test_classes_of_a_hub_s_data_set_come_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A ClassLabel column, as hub data sets have it: from a repository on this disk."""
    features = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["no", "yes"])})
    made = datasets.Dataset.from_dict({"text": list("abcd"), "label": [0, 1, 0, 1]}, features=features)
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **options: made)
    from hf_memkit.recipe import sources, tables

    table = tables._from_hub(TASK, sources.HubData("owner/name", None, "train"), dict(TASK.columns))
    assert table.rows["label"][:] == ["no", "yes", "no", "yes"]
    assert table.rows["place"][2] == "owner/name: row 3"
