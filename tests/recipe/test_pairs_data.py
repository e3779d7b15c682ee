"""Text pairs from real files through the real datasets library: what is read, and what is said of files that are
spoilt."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hf_memkit.errors import DataError
from hf_memkit.recipe.tables import load_table
from hf_memkit.recipe.tasks import find_task
from hf_memkit.setup import Setup
from tests.recipe.conftest import lines, write

pytestmark = pytest.mark.usefixtures("cache")

TASK = find_task("text-pairs")
EXAMPLE = TASK.example
GOOD = {"source": "one two", "target": "eins zwei"}


def setup_of(data: Path | str, **columns: str) -> Setup:
    values: dict[str, Any] = {
        "source": str(data),
        "columns": {**TASK.columns, **columns},
        "hub_id": "nobody/nothing",
        "hub_config": None,
        "hub_split": "train",
    }
    return Setup(preset="x").put_all("data", {key: (value, "for this test") for key, value in values.items()})


def rows(data: Path, **columns: str) -> list[dict[str, str]]:
    return list(load_table(TASK, setup_of(data, **columns)).rows)


class TestWhatIsRead:
    def test_json_lines_csv_and_tsv(self, tmp_path: Path) -> None:
        assert rows(write(tmp_path / "a.jsonl", lines({**GOOD, "id": 1}, GOOD))) == [GOOD, GOOD]
        csv = b'source,target\n"one, two","eins\nzwei"\nNA,null\n'
        assert rows(write(tmp_path / "a.csv", csv)) == [
            {"source": "one, two", "target": "eins\nzwei"},
            {"source": "NA", "target": "null"},
        ]
        assert rows(write(tmp_path / "a.tsv", b"target\tsource\neins\tone, one\n")) == [
            {"source": "one, one", "target": "eins"}
        ]

    def test_an_array_and_parquet(self, tmp_path: Path) -> None:
        assert rows(write(tmp_path / "a.json", json.dumps([GOOD]).encode())) == [GOOD]
        pq.write_table(pa.Table.from_pylist([GOOD, GOOD]), tmp_path / "a.parquet")
        assert rows(tmp_path / "a.parquet") == [GOOD, GOOD]

    def test_the_recipe_s_columns_and_the_usual_ones(self, tmp_path: Path) -> None:
        own = {"dialogue": "one two", "summary": "eins zwei"}
        named = {"source": "dialogue", "target": "summary"}
        assert rows(write(tmp_path / "a.jsonl", lines(own)), **named) == [GOOD]
        assert rows(write(tmp_path / "b.jsonl", lines(GOOD)), **named) == [GOOD]

    def test_a_folder_of_one_kind(self, tmp_path: Path) -> None:
        for name in ("b.jsonl", "a.jsonl"):
            write(tmp_path / name, lines({**GOOD, "source": name}))
        assert [row["source"] for row in rows(tmp_path)] == ["a.jsonl", "b.jsonl"]


JSON = "expected one object a line, or one array of objects"
SPOILT = {
    "a missing column": (
        "a.jsonl", lines(GOOD, {"source": "one", "goal": "eins"}),
        f"{{file}}:2: no column 'target'; columns here: 'source', 'goal'; expected {EXAMPLE}",
    ),
    "an empty target": (
        "a.jsonl", lines(GOOD, GOOD, {"source": "one", "target": " "}),
        f"{{file}}:3: column 'target': empty; expected text, such as {EXAMPLE}",
    ),
    "no text": (
        "a.jsonl", lines({"source": None, "target": "eins"}),
        f"{{file}}:1: column 'source': expected text, found null; such as {EXAMPLE}",
    ),
    "several targets": (
        "a.jsonl", lines({"source": "one", "target": ["eins", "uno"]}),
        f"{{file}}:1: column 'target': expected text, found an array; such as {EXAMPLE}",
    ),
    "a number": (
        "a.jsonl", lines({"source": 1, "target": "eins"}),
        f"{{file}}:1: column 'source': expected text, found 1; such as {EXAMPLE}",
    ),
    "half of a character": (
        "a.jsonl", b'{"source": "\\ud800", "target": "eins"}\n',
        "{file}:1: column 'source': half of a surrogate pair, which is not a character. Remove it",
    ),
    "no object": (
        "a.jsonl", lines(GOOD, ["one", "eins"]),
        '{file}:2: expected an object such as {"column": …}, found an array',
    ),
    "no JSON": (
        "a.jsonl", lines(GOOD) + b"{'source': 'one'}\n",
        "{file}:2: not JSON (Expecting property name enclosed in double quotes, column 2); " + JSON,
    ),
    "a comma that nobody quoted": (
        "a.csv", b"source,target\none,eins\none, two,eins\n",
        "{file}:3: expected 2 values (source, target), found 3; put one that has a comma or a line end in it "
        "between double quotes",
    ),
    "a column twice": (
        "a.tsv", b"source\tsource\none\teins\n",
        "{file}:1: column 'source' appears twice. Keep one",
    ),
    "another encoding": (
        "a.csv", "source,target\nsmall,café\n".encode("latin-1"),
        "{file}:2: expected UTF-8 text, found the byte 0xe9. Unpack the file if it is compressed, or convert it "
        "to UTF-8",
    ),
    "no row": (
        "a.jsonl", b"\n",
        f"{{file}}: it has no rows; expected {TASK.local_form}, such as {EXAMPLE}",
    ),
    "no table": (
        "a.txt", b"one\teins\n",
        f"{{file}}: not a table (it ends in '.txt'); expected {TASK.local_form}, such as {EXAMPLE}",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", SPOILT)
def test_spoilt_data_is_answered_with_place_and_example(tmp_path: Path, cache: Path, what: str) -> None:
    name, content, expected = SPOILT[what]
    path = write(tmp_path / name, content)
    with pytest.raises(DataError) as caught:
        rows(path)
    assert str(caught.value).replace(str(path), "{file}") == expected
    assert [each.name for each in tmp_path.iterdir()] == [name], "nothing is written beside the data"
    assert not [each for each in cache.rglob("*.arrow") if "incomplete" not in str(each)], "nothing half-read is kept"


def test_a_file_that_was_mended_is_read_anew(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", lines(GOOD, {"source": "one"}))
    with pytest.raises(DataError):
        rows(path)
    assert rows(write(path, lines(GOOD, GOOD))) == [GOOD, GOOD]


def test_several_kinds_in_a_folder_and_none(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no table in this folder; expected a table of text pairs"):
        rows(tmp_path)
    write(tmp_path / "a.csv", b"source,target\n")
    write(tmp_path / "a.jsonl", lines(GOOD))
    with pytest.raises(DataError, match="mixed file types: 1 CSV, 1 JSON"):
        rows(tmp_path)


def test_a_parquet_file_that_is_none(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", b"PAR1 and no more")
    with pytest.raises(DataError, match=r"a\.parquet: not a readable parquet file: "):
        rows(path)


def test_what_is_neither_here_nor_on_the_hub(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"pears.jsonl: no such file or folder"):
        rows(tmp_path / "pears.jsonl")
    with pytest.raises(DataError, match=r"nobody/pairs: the hub .*, and this machine's cache"):
        load_table(TASK, setup_of("nobody/pairs"))
