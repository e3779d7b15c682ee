"""Data of every task, read by the exported scripts' own readers: accepted forms, and messages for others.

Real files, through the real `datasets`; the hub is a stub: no test may need a network.
"""

from __future__ import annotations

import csv
import json
import wave
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hf_memkit.common.errors import DataError
from hf_memkit.recipes.export.files import _rows, opened
from hf_memkit.recipes.export.scripts import class_rows, pair_rows
from hf_memkit.recipes.export.scripts.chat_rows import conversation
from hf_memkit.recipes.sources import is_here
from hf_memkit.recipes.tasks import find_task
from hf_memkit.recipes.tasks.chat_made_up import made_up_conversations
from hf_memkit.setup.setup import Setup
from tests.recipes.conftest import lines, write
from tests.recipes.test_tokenizer import job_of

pytestmark = pytest.mark.usefixtures("cache")

TEXT, CHAT, CLASSES, PAIRS = "language-modeling", "chat", "text-classification", "text-pairs"
IMAGES, SPEECH = "image-classification", "speech-recognition"


def read(name: str, data: Path | str, /, **columns: str) -> Any:
    """What the script of a task makes of `--data`."""
    task = find_task(name)
    values = {
        "source": str(data), "task": name, "hub_id": "nobody/nothing", "hub_config": None,
        "text_column": columns.pop("text_column", "text"), "columns": {**task.columns, **columns},
    }  # fmt: skip
    setup = Setup("x").put_all("data", {key: (value, "for this test") for key, value in values.items()})
    section = {key: value for key, (value, _) in _rows(setup, task).settings.items()}
    return opened(task, {**section, "chunk_length": 30}, task.reading.read)


def refusal(name: str, data: Path | str, /, **columns: str) -> str:
    with pytest.raises(DataError) as caught:
        read(name, data, **columns)
    message = str(caught.value)
    assert "\n" not in message and "Traceback" not in message, "an error is one line"
    return message


# ---- tables of every kind ----


def pair(number: object = "one") -> dict[str, Any]:
    return {"source": number, "target": "eins"}


@pytest.mark.parametrize("ending", ["jsonl", "json", "csv", "tsv", "parquet"])
def test_tables_of_every_kind(tmp_path: Path, ending: str) -> None:
    """Would notice: a tab that is no separator, text "NA" that is nothing, numbers that are no text in CSV."""
    path, rows = tmp_path / f"notes[1].{ending}", [pair("NA"), pair("two, or more"), pair("3")]
    comma = "\t" if ending == "tsv" else ","
    if ending == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif ending == "json":
        path.write_text(json.dumps(rows))
    elif ending == "jsonl":
        path.write_bytes(lines(*rows))
    else:
        table = [f"source{comma}target", *(f'"{row["source"]}"{comma}{row["target"]}' for row in rows)]
        path.write_text("\n".join(table))
    assert list(read(PAIRS, path)) == rows


def test_a_folder_the_recipe_s_columns_and_the_default_ones(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a.jsonl"):
        write(tmp_path / name, lines(pair(name)))
    assert read(PAIRS, tmp_path)["source"][:] == ["a.jsonl", "b.jsonl"]
    assert read(PAIRS, tmp_path, source="dialogue", target="summary")["source"][:] == ["a.jsonl", "b.jsonl"]
    write(tmp_path / "b.jsonl", lines(pair(), pair(" ")))
    assert refusal(PAIRS, tmp_path).startswith(f"{tmp_path}/b.jsonl: row 2: column 'source': empty"), "its own file"
    write(tmp_path / "c.csv", b"source,target\n")
    assert "mixed file types: 1 csv, 2 json" in refusal(PAIRS, tmp_path)
    (tmp_path / "empty").mkdir()
    assert "expected a table of text pairs" in refusal(PAIRS, tmp_path / "empty")


TSV = b"source\ttarget\n" + b"one\teins\n%s\tzwei\n" * 2 + b"one\teins\n"

PLAIN: dict[str, tuple[str, str, bytes, str]] = {
    "a missing column": (PAIRS, "a.jsonl", lines({"source": "one", "goal": "eins"}), "a.jsonl: no column 'target'"),
    "an empty text": (PAIRS, "a.jsonl", lines(pair(), pair(" ")), "a.jsonl: row 2: column 'source': empty"),
    "no text": (PAIRS, "a.jsonl", lines(pair(), pair(None)), "row 2: column 'source': expected text, found null"),
    "several": (PAIRS, "a.jsonl", lines(pair(), pair(["one"])), "row 2: column 'source': expected text, found a list"),
    "half of a character": (PAIRS, "a.jsonl", b'{"source": "\\ud800", "target": "eins"}\n', "a.jsonl: cannot be read"),
    "no object": (PAIRS, "a.jsonl", lines(pair(), ["one"]), "a.jsonl:2: expected an object, found a list"),
    "no JSON": (PAIRS, "a.jsonl", lines(pair()) + b"{'source': 'one'}\n", "a.jsonl:2: not JSON ("),
    "no JSON in an array": (PAIRS, "a.json", b'[{"source": "one"},\n{"source": }]', "a.json:2: not JSON ("),
    "nested": (PAIRS, "a.jsonl", b'{"source": ' + b"[" * 200_000, "a.jsonl:1: not JSON (nested too deeply)"),
    "a comma": (PAIRS, "a.csv", b"source,target\none,eins\n \none, two,eins\n", "a.csv: row 2: 3 fields, the hea"),
    "a comma in each row": (PAIRS, "a.csv", b"source,target\n" + b"Hello, world,Hallo\n" * 40, "a.csv: row 1: 3 fi"),
    "a comma in the first": (PAIRS, "a.csv", b"source,target\none, two,eins\none,\n", "a.csv: row 1: 3 fields, "),
    "a tab": (PAIRS, "a.tsv", b"source\ttarget\n\none\ttwo\teins\none\teins\n", "a.tsv: row 1: 3 fields, the header"),
    "a comma far down": (
        PAIRS, "a.csv", b"source,target\n" + b"one,eins\n" * 10_000 + b"a, b,c\n", "a.csv: row 10001: 3 fields,"
    ),
    "a quote": (PAIRS, "a.csv", b'source,target\n"one,eins\ntwo,zwei\n', "a.csv: row 1: a field begins with a quotat"),
    "quotes in TSV": (PAIRS, "a.tsv", TSV % (b'"a 1', b'"a 2'), "a.tsv: row 2: a field begins with a quotation mark"),
    "a quote that ends later": (PAIRS, "a.tsv", TSV % (b'"a 1', b'a 2"'), "a.tsv: row 2: a field has a tab and a"),
    "text after a quote": (PAIRS, "a.csv", b'source,target\n"Yes" he said,ja\n', "a.csv: row 1: a field begins with"),
    "a quote in the header": (PAIRS, "a.csv", b'"source"s,target\none,eins\n', "a.csv: header: a field begins with a"),
    "a column twice": (CLASSES, "a.csv", b"text,label,text\na,b,c\n", "a.csv: header: column 'text' appears twice"),
    "no label, in CSV": (CLASSES, "a.csv", b"text,label\na,-1\nb,1\n", "row 1: column 'label': -1 means no label"),
    "a score, in CSV": (CLASSES, "a.csv", b"text,label\na,2\nb,0.5\n", "row 2: column 'label': expected one class, a"),
    "UTF-16": (PAIRS, "a.csv", "source,target\none,eins\n".encode("utf-16"), "a.csv:1: expected UTF-8 text, found"),
    "another encoding": (PAIRS, "a.csv", b"source,target\nsmall,caf\xe9\n", "a.csv:2: expected UTF-8 text, found the"),
    "no row": (PAIRS, "a.jsonl", b"\n", "a.jsonl: it has no rows; expected " + pair_rows.EXAMPLE),
    "no table": (PAIRS, "a.txt", b"one\teins\n", "a.txt: not a table (it ends in '.txt'); expected a table of"),
    "no parquet": (PAIRS, "a.parquet", b"PAR1 and no more", "a.parquet: cannot be read as parquet: "),
    "no words": (TEXT, "a.txt", b" \n\t\n", "a.txt: no text in it"),
    "bytes": (TEXT, "a.bin", b"ok\n\x00\x01", "a.bin: row 1: expected text, found a NUL byte: a binary file"),
    "no UTF-8": (TEXT, "a.txt", b"one\ncaf\xc3", "a.txt:2: expected UTF-8 text, found the byte 0xc3"),
    "no column of text": (TEXT, "a.jsonl", lines({"body": "one"}), "a.jsonl: no column 'text'; columns here: 'body'"),
    "null": (TEXT, "a.jsonl", lines({"text": "a"}, {"text": None}), "row 2: column 'text': expected text, found null"),
}  # fmt: skip


@pytest.mark.parametrize("what", PLAIN)
def test_spoilt_tables_and_texts(tmp_path: Path, what: str) -> None:
    task, name, content, expected = PLAIN[what]
    assert expected in refusal(task, write(tmp_path / name, content))
    assert [each.name for each in tmp_path.iterdir()] == [name], "nothing is written beside the data"


@pytest.mark.parametrize("ending", ["csv", "tsv"])
def test_text_of_a_table_stays_as_it_is(tmp_path: Path, ending: str) -> None:
    """Would notice: 007 that becomes 7, labels 01 and 1 that become one, columns without a name that are refused."""
    texts = ["007", "1e5", "1.50", "1" * 23, "True", "0"]
    labels = ["01", "1"] * 3
    with (tmp_path / f"a.{ending}").open("w", newline="") as file:
        table = csv.writer(file, delimiter="\t" if ending == "tsv" else ",")
        table.writerow(["", "text", "label", ""])
        table.writerows([number, *row, ""] for number, row in enumerate(zip(texts, labels, strict=True)))
    rows = read(CLASSES, tmp_path / f"a.{ending}")
    assert (rows["text"][:], rows["label"][:]) == (texts, labels)


def test_quoted_text_with_commas_and_lines_is_read(tmp_path: Path) -> None:
    pairs = [pair('"Yes, I do", she said.\nAnd left, at once.'), pair('24" monitor')]
    with (tmp_path / "a.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["source", "target"], *(row.values() for row in pairs)])
    assert list(read(PAIRS, tmp_path / "a.csv")) == pairs


def test_a_file_that_was_corrected_is_read_again(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", lines(pair(), {"source": "one"}))
    refusal(PAIRS, path)
    assert list(read(PAIRS, write(path, lines(pair(), pair("two"))))) == [pair(), pair("two")]


def test_one_example_cannot_be_trained_on_and_held_out(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="1 example; the minimum is 2"):
        job_of(tmp_path).hold_out(datasets.Dataset.from_list([pair()]))


def test_documents(tmp_path: Path) -> None:
    """Would notice: a file that is cut at its lines, files below a folder that are left out, a circle of links."""
    folder = tmp_path / "texts"
    (folder / "more").mkdir(parents=True)
    write(folder / "b.txt", b"one\n\ntwo\n")
    write(folder / "more" / "a.md", b"three\n")
    write(folder / ".hidden.txt", b"four\n")
    (folder / "more" / "again").symlink_to(folder)
    assert read(TEXT, folder)["text"][:] == ["one\n\ntwo\n", "three\n"]
    assert read(TEXT, write(tmp_path / "LICENSE", b"any name"))["text"][:] == ["any name"]
    assert read(TEXT, write(tmp_path / "a.jsonl", lines({"body": "x", "n": 1})), text_column="body")["text"][:] == [
        "x"
    ]


def test_a_model_neither_local_nor_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "pears.jsonl", lines(pair()))
    assert refusal(PAIRS, "paers.jsonl").startswith("paers.jsonl: no such file or folder; did you mean 'pears.jsonl'")
    assert refusal(PAIRS, "nobody/pairs").startswith("nobody/pairs: cannot be loaded from the hub: ")
    assert is_here("pears.jsonl")
    monkeypatch.delenv("HF_HUB_OFFLINE")
    assert not is_here("nobody/pairs")


# ---- classes ----


def labelled(*labels: object) -> list[dict[str, Any]]:
    return [{"text": f"text {number}", "label": label} for number, label in enumerate(labels)]


GOOD = labelled("bad", "good") * 5


@pytest.mark.parametrize(
    ("labels", "names"),
    [
        ((10, 2, 10, 2), {"2", "10"}),
        (("b", "a ", "b", "a"), {"a", "b"}),
        ((1.0, 0.0, 1.0, 0.0), {"0", "1"}),
        ((True, False, True, False), {"false", "true"}),
        (("1", 1, 2, "2"), {"1", "2"}),
        (("1", "1", "none", "none"), {"1", "none"}),
    ],
)
def test_labels_are_names_or_numbers(tmp_path: Path, labels: tuple[Any, ...], names: set[str]) -> None:
    assert set(read(CLASSES, write(tmp_path / "a.jsonl", lines(*labelled(*labels))))["label"]) == names


def test_other_columns_pairs_and_names_of_classes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = b"id,review,stars\n" + b"".join(b'%d,"fine, really",%d\n' % (n, n % 5) for n in range(20))
    result = read(CLASSES, write(tmp_path / "a.csv", content), text="review", label="stars")
    assert result.column_names == ["text", "label"] and set(result["label"]) == set("01234")
    rows = [{**row, "text_pair": f"and {number}"} for number, row in enumerate(GOOD)]
    assert read(CLASSES, write(tmp_path / "a.jsonl", lines(*rows)))["text_pair"][3] == "and 3"
    features = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["no", "yes"])})
    made = datasets.Dataset.from_dict({"text": list("abcd"), "label": [0, 1, 0, 1]}, features=features)
    monkeypatch.setattr("hf_memkit.recipes.export.scripts.rows.load_dataset", lambda *_, **__: made)
    assert read(CLASSES, "owner/name")["label"][:] == ["no", "yes", "no", "yes"]


SPOILT_CLASSES = {
    "a missing column": (lines(*({"text": "a", "class": "b"},) * 2), ": no column 'label'; columns here: 'text', 'cl"),
    "an empty label": (lines(*GOOD, *labelled(" ")), ": row 11: column 'label': empty; expected a class, such as "),
    "no label": (lines(*GOOD, *labelled(None)), ": row 11: column 'label': expected one class, a name or a who"),
    "several labels": (lines(*labelled(["good", "short"])), ": row 1: column 'label': expected one class, a name or"),
    "a score": (lines(*labelled(0.5)), "a name or a whole number, found 0.5; such as " + class_rows.EXAMPLE),
    "a label that says none": (lines(*labelled(0, 0, -1)), ": row 3: column 'label': -1 means no label. Remove"),
    "numbers beside names": (lines(*labelled("good", "good", 1)), ": row 3: column 'label': 1 is a number, and row 1"),
    "one class": (lines(*labelled(*["good"] * 3)), ": all 3 rows have the label 'good'; expected at least two"),
    "one outside": (lines(*GOOD, *labelled("godo")), ": row 11: label 'godo' appears in this row only; the other"),
    "texts for labels": (lines(*labelled(*(f"n {n}" for n in range(30)))), "as do 30 of the 30 labels. Check th"),
    "a second text now and then": (
        lines(*({**row, "text_pair": "and"} for row in GOOD), *GOOD), "row 11: column 'text_pair'"
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", SPOILT_CLASSES)
def test_spoilt_classes(tmp_path: Path, what: str) -> None:
    content, expected = SPOILT_CLASSES[what]
    assert expected in refusal(CLASSES, write(tmp_path / "a.jsonl", content))


# ---- conversations ----

USER, ANSWER = {"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Good day."}
BRIEF = {"role": "system", "content": "Be brief."}
CALL = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add", "arguments": {"a": 1}}}]}


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"messages": [USER, ANSWER], "id": 1}, [USER, ANSWER]),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]},
                       ANSWER]}, [USER, ANSWER]),
        ({"conversations": [{"from": "human", "value": "Hello"}, {"from": "gpt", "value": "Good day."}],
          "system": "Be brief."}, [BRIEF, USER, ANSWER]),
        ({"conversations": [USER, ANSWER]}, [USER, ANSWER]),
        ({"prompt": "Hello", "completion": "Good day."}, [USER, ANSWER]),
        ({"prompt": [USER], "completion": [ANSWER]}, [USER, ANSWER]),
        ({"instruction": "Hello", "input": "", "output": "Good day."}, [USER, ANSWER]),
        ({"instruction": "Add.", "input": "1 2", "output": "3"},
         [{"role": "user", "content": "Add.\n\n1 2"}, {"role": "assistant", "content": "3"}]),
        ({"messages": [USER, ANSWER, USER]}, [USER, ANSWER, USER]),
    ],
)  # fmt: skip
def test_every_form_of_a_conversation(tmp_path: Path, row: Any, expected: list[dict[str, Any]]) -> None:
    result = read(CHAT, write(tmp_path / "chats.jsonl", lines(row, row)))
    assert result["messages"][:] == [expected, expected] and result.column_names == ["messages"]


def test_tools_and_another_name_of_the_column(tmp_path: Path) -> None:
    row = {"chat": [USER, CALL, {"role": "tool", "content": "3"}, ANSWER], "tools": [{"name": "add"}], "id": 1}
    result = read(CHAT, write(tmp_path / "chats.jsonl", lines(row, row)), messages="chat")
    calls = result[0]["messages"][1]
    assert calls["tool_calls"][0]["function"]["arguments"] == {"a": 1} and calls["content"] == ""
    assert result[0]["tools"] == [{"name": "add"}] and set(result.column_names) == {"messages", "tools"}


def spoilt(**more: Any) -> dict[str, Any]:
    return {"messages": [USER, {**ANSWER, **more}]}


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"messages": "Hello"}, "messages: expected a list of messages, found 'Hello'"),
        ({"messages": None}, "messages: expected a list of messages, found null"),
        ({"messages": []}, "messages: expected a list of messages, found a list"),
        ({"messages": ["Hello"]}, "messages[0]: expected an object with role and content, found 'Hello'"),
        ({"messages": [{"content": "Hello"}]}, "messages[0].role: null is not a role; expected human, gpt, system"),
        (spoilt(role="asistant"), "messages[1].role: 'asistant' is not a role"),
        (spoilt(content=" \n"), "messages[1].content: empty; every message needs text"),
        (spoilt(content=None), "messages[1].content: expected text, found null"),
        (spoilt(content=3), "messages[1].content: expected text, found 3"),
        (spoilt(content=[{"type": "image_url", "image_url": "a.png"}]), "messages[1].content: expected text, found a"),
        (spoilt(weight=0), "messages[1]: 'weight': not supported"),
        ({"messages": [USER]}, "no turn of the assistant to train on"),
        ({"messages": [USER, USER, ANSWER]}, "message 2 is the user's, after the user's; expected assistant there"),
        ({"messages": [USER, ANSWER, BRIEF]}, "message 3 is the system's, after the assistant's; expected user"),
        ({"messages": [ANSWER]}, "message 1 is the assistant's, and the conversation begins with it; expected"),
        ({"messages": [{**USER, "tool_calls": CALL["tool_calls"]}, ANSWER]}, "messages[0]: 'tool_calls' in"),
    ],
)  # fmt: skip
def test_spoilt_conversations(tmp_path: Path, row: Any, expected: str) -> None:
    path = write(tmp_path / "chats.jsonl", lines({"messages": [USER, ANSWER]}, row, {"messages": [USER, ANSWER]}))
    assert f"{path}: row 2: {expected}" in refusal(CHAT, path)


def test_forms_that_are_none_or_several(tmp_path: Path) -> None:
    path = write(tmp_path / "chats.jsonl", lines({"text": "Hello"}))
    assert "columns here: 'text'; expected " in refusal(CHAT, path)
    write(path, lines({"messages": [USER, ANSWER]}, {"prompt": "1", "completion": "2"}))
    assert "has columns of several forms: messages and prompt" in refusal(CHAT, path)


def test_made_up_examples_are_chats_too() -> None:
    rows = made_up_conversations()
    assert len(rows) > 300
    assert all(conversation({"messages": messages}) == messages for messages in rows)


# ---- images ----


Files = dict[str, bytes | Callable[[Path], None]]


def picture(path: Path) -> None:
    from PIL import Image

    Image.effect_noise((40, 40), 60).convert("RGB").save(path)  # noise: a JPEG of some length


def cut_off(path: Path) -> None:
    picture(path)
    path.write_bytes(path.read_bytes()[:-200])


def laid(root: Path, files: Files) -> Path:
    """A folder with these files: name → what it holds, or what writes it."""
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content) if isinstance(content, bytes) else content(path)
    return root


PHOTOS: Files = {f"{label}/{number}.jpg": picture for label in ("cat", "dog") for number in range(3)}


def images_of(path: Path) -> tuple[Any, int | None]:
    pytest.importorskip("PIL")
    result: tuple[Any, int | None] = read(IMAGES, path)
    return result


def test_a_folder_for_each_label(tmp_path: Path) -> None:
    laid(root := tmp_path / "photos[1]", PHOTOS)
    for name in ("cat/.DS_Store", "cat/Thumbs.db", ".hidden"):
        (root / name).write_text("x")
    rows, first = images_of(root)
    assert rows.features["label"].names == ["cat", "dog"] and first is None and rows["label"][:] == [0, 0, 0, 1, 1, 1]
    assert rows[0]["image"] == {"bytes": None, "path": str(root / "cat" / "0.jpg")}, "files stay where they are"
    spoilt = root / "cat" / "1.jpg"
    spoilt.write_bytes(bytes(spoilt.stat().st_size))
    assert refusal(IMAGES, root).startswith(f"{root}/cat/1.jpg: not an image that pillow can read"), "checked again"


@pytest.mark.parametrize("held_out", ["validation", "val", "test", ""])
def test_a_separate_part_is_held_out(tmp_path: Path, held_out: str) -> None:
    laid(tmp_path / "train", PHOTOS)
    laid(tmp_path / held_out, {"dog/9.png": picture} if held_out else {})
    rows, first = images_of(tmp_path)
    assert rows.features["label"].names == ["cat", "dog"] and first == (6 if held_out else None)
    assert len(rows) == 6 + bool(held_out)


@pytest.mark.parametrize("column", ["image", "file_name"])
def test_a_table_of_images(tmp_path: Path, column: str) -> None:
    table = lines({column: "a.jpg", "label": 10}, {column: "b.webp", "label": 9})
    laid(tmp_path, {"a.jpg": picture, "b.webp": picture, "metadata.jsonl": table})
    for source in (tmp_path, tmp_path / "metadata.jsonl"):
        rows, _ = images_of(source)
        assert [rows.features["label"].names[each] for each in rows["label"]] == ["10", "9"]


def table_of(*second: Any) -> Files:
    """A picture, and a table with a row of it and these."""
    return {"a.jpg": picture, "metadata.jsonl": lines({"image": "a.jpg", "label": "a"}, *second)}


SPOILT_IMAGES: dict[str, tuple[Files, str]] = {
    "cut off": ({**PHOTOS, "dog/1.jpg": cut_off}, "/dog/1.jpg: not an image that pillow can read: "),
    "empty": ({**PHOTOS, "dog/1.jpg": b""}, "/dog/1.jpg: not an image that pillow can read: "),
    "beside labels": ({**PHOTOS, "1.jpg": picture}, "/1.jpg: an image next to the folders of labels; expected "),
    "too deep": ({**PHOTOS, "cat/black/1.jpg": picture}, "/cat/black/1.jpg: an image in a folder inside a label's"),
    "one label": ({"cat/1.jpg": picture}, "all 1 images have the label 'cat'; the minimum is 2 labels"),
    "no images": ({"notes.md": b"a dog"}, ": no images ("),
    "lost": (table_of({"image": "b.jpg", "label": "b"}), "/metadata.jsonl: row 2: ROOT/b.jpg: no such file"),
    "twice": (table_of({"image": "a.jpg", "label": "b"}), "/metadata.jsonl: row 2: ROOT/a.jpg appears again"),
    "no label": (table_of({"image": "a.jpg"}), "/metadata.jsonl: row 2: column 'label': expected text, found null"),
    "two tables": (dict.fromkeys(("a.csv", "b.csv"), b"image,label\n"), "2 tables (a.csv, b.csv …); name one with"),
}  # fmt: skip


@pytest.mark.parametrize("what", SPOILT_IMAGES)
def test_spoilt_images(tmp_path: Path, what: str) -> None:
    pytest.importorskip("PIL")
    files, expected = SPOILT_IMAGES[what]
    message = refusal(IMAGES, laid(tmp_path, files))
    assert expected.replace("ROOT", str(tmp_path)) in message and message.startswith(str(tmp_path))


# ---- speech ----


def sound(path: Path, seconds: float = 0.5, loud: float = 0.5) -> None:
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(8_000)
        samples = loud * np.sin(2 * np.pi * 440 / 8_000 * np.arange(round(seconds * 8_000)))
        file.writeframes((samples * 32_767).astype("<i2").tobytes())


def damaged(path: Path) -> None:
    sound(path)
    path.write_bytes(path.read_bytes()[:30])


CLIPS: Files = {
    "one.wav": sound, "one.txt": b"the words\nof one\n", "two.wav": sound, "two.txt": b"the words\nof two\n",
}  # fmt: skip


def test_a_transcript_beside_each_file(tmp_path: Path) -> None:
    laid(tmp_path / "speaker", CLIPS)
    rows = read(SPEECH, tmp_path)
    assert rows["text"][:] == ["the words of one", "the words of two"]
    assert rows[0]["audio"] == {"bytes": None, "path": str(tmp_path / "speaker" / "one.wav")}


@pytest.mark.parametrize("text", ["text", "transcription", "sentence"])
def test_a_table_of_sound(tmp_path: Path, text: str) -> None:
    table = f'file_name,{text}\nclips/a.wav,"well, hello"\n'.encode()
    laid(tmp_path, {"clips/a.wav": sound, "metadata.csv": table})
    for source in (tmp_path, tmp_path / "metadata.csv"):
        assert read(SPEECH, source)["text"][:] == ["well, hello"]


def spoken(*rows: Any) -> Files:
    return {"a.wav": sound, "metadata.jsonl": lines(*rows)}


SPOILT_SPEECH: dict[str, tuple[Files, str]] = {
    "silent folder": ({}, ": no sound files; expected one.wav with its words in one.txt, or metadata.csv"),
    "no transcript": ({**CLIPS, "three.wav": sound}, "/three.wav: no transcript; expected its words in three.txt"),
    "no sound": ({**CLIPS, "three.txt": b"three"}, "/three.txt: a transcript without its sound file; expected three."),
    "empty text": ({**CLIPS, "one.txt": b" \n"}, "/one.txt: empty; expected the words of one.wav"),
    "no UTF-8": ({**CLIPS, "one.txt": "für".encode("latin-1")}, "/one.txt: cannot be read: "),
    "zero bytes": ({**CLIPS, "one.wav": b""}, "/one.wav: empty (0 bytes); expected sound"),
    "too long": ({**CLIPS, "two.wav": partial(sound, seconds=31)}, "/two.wav: 31.0 s long; the model takes at most 3"),
    "silence": ({**CLIPS, "two.wav": partial(sound, loud=0.0)}, "/two.wav: 0.5 s of silence, or no sound at all"),
    "damaged": ({**CLIPS, "two.wav": damaged}, "/two.wav: a WAV file without sound data: damaged or cut off"),
    "lost": (spoken({"file_name": "a.wav", "text": "a"}, {"file_name": "b.wav", "text": "b"}),
             "/metadata.jsonl: row 2: ROOT/b.wav: no such file"),
    "no words": (spoken({"file_name": "a.wav", "text": ""}), "row 1: column 'text': empty; expected text, such as "),
    "no column": (spoken({"file_name": "a.wav", "words": "a"}), "no column 'text'; columns here: 'file_name', 'word"),
}  # fmt: skip


@pytest.mark.parametrize("what", SPOILT_SPEECH)
def test_spoilt_speech(tmp_path: Path, what: str) -> None:
    files, expected = SPOILT_SPEECH[what]
    message = refusal(SPEECH, laid(tmp_path, files))
    assert expected.replace("ROOT", str(tmp_path)) in message and message.startswith(str(tmp_path))
