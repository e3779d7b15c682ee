"""Loading text: real files, read through the real datasets library. The hub is a stub: no test may need a network."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hf_memkit.errors import DataError
from hf_memkit.models import why_no_hub
from hf_memkit.recipe import text_readers
from hf_memkit.recipe.data import Documents, load_documents


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", folder)
    # conftest.py turns the hub off for all tests; here it must be load_documents that does not ask it.
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    return folder


def load(source: object, *, hub_reachable: bool = False, text_column: str = "text") -> Documents:
    return load_documents(
        None if source is None else str(source),
        default_hub_id="Salesforce/wikitext",
        default_hub_config="wikitext-103-raw-v1",
        text_column=text_column,
        hub_reachable=hub_reachable,
    )


def refusal(source: object, **options: Any) -> str:
    with pytest.raises(DataError) as caught:
        load(source, **options)
    message = str(caught.value)
    assert "\n" not in message, "an error is one line"
    assert "Traceback" not in message and "DatasetGenerationError" not in message
    return message


def write(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def write_rows(path: Path, *rows: object) -> Path:
    return write(path, "".join(json.dumps(row) + "\n" for row in rows))


REFUSED: list[tuple[str, str | bytes, str]] = [
    ("a.txt", "", "{}: no text in it"),
    ("a.txt", " \n\t\n", "{}: no text in it"),
    ("a.txt", "one\ncafé".encode()[:-1], "{}:2: expected UTF-8 text, found the byte 0xc3"),
    ("a.txt", "text".encode("utf-16"), "found UTF-16; convert it: iconv"),
    ("a.bin", b"ok\n\x00\x01", "{}:2: expected text, found a NUL byte: a binary file. Give a text file"),
    ("a.csv", "text\nhello\n", "Convert it to JSON lines or parquet"),
    ("a.json", "[]", "no text in it"),
    ("a.jsonl", "\n", "no text in it"),
    ("a.jsonl", '{"text": "one"}\n{"text": "two"}\n{"text": "thr\n', "{}:3: not JSON ("),
    ("a.jsonl", '{"text": "thr\n', "expected one object a line, or one array of objects"),
    ("a.json", '[{"text": "one"},\n{"text": }]', "{}:2: not JSON ("),
    ("a.json", '[{"text": "a"}, 2]', "item 2: expected an object"),
    ("a.jsonl", '"one"\n', """{}:1: expected an object such as {"text": "…"}, found 'one'"""),
    ("a.jsonl", '{"text": "one"}\n{"text": 3}\n', "{}:2: column 'text': expected text, found 3"),
    ("a.jsonl", '{"text": null}\n', "{}:1: column 'text': expected text, found null"),
    ("a.jsonl", '{"text": ["a"]}\n', "{}:1: column 'text': expected text, found an array"),
    ("a.jsonl", '{"text": {}}\n', "{}:1: column 'text': expected text, found an object"),
    ("a.jsonl", '{"text": "\\ud800"}\n', "{}:1: column 'text': half of a surrogate pair"),
    ("a.jsonl", b'{"text": "caf\xe9"}\n', "{}:1: expected UTF-8 text, found the byte 0xe9"),
    ("a.jsonl", '{"text": ' + "[" * 200_000, "{}:1: JSON nested too deeply"),
    ("a.parquet", "just text", "{}: not a readable parquet file: "),
]


@pytest.mark.parametrize(("name", "content", "said"), REFUSED, ids=range(len(REFUSED)))
def test_what_is_no_text_is_refused(tmp_path: Path, name: str, content: str | bytes, said: str) -> None:
    path = write(tmp_path / name, content)
    assert said.replace("{}", str(path)) in refusal(path)
    assert [each.name for each in tmp_path.iterdir()] == [name], "nothing is written beside it"


class TestText:
    def test_a_file_is_one_document_with_its_lines_and_blank_lines(self, tmp_path: Path) -> None:
        documents = load(write(tmp_path / "a.txt", "one\ntwo\n\nthree\n"))
        assert list(documents) == ["one\ntwo\n\nthree\n"]
        assert documents.source == str(tmp_path / "a.txt")

    @pytest.mark.parametrize("name", ["a.md", "README", "notes[1].txt", "a*b.txt", ".hidden.txt", "naïve file.txt"])
    def test_any_name(self, tmp_path: Path, name: str) -> None:
        assert list(load(write(tmp_path / name, "text"))) == ["text"]

    def test_byte_order_mark_and_windows_line_ends(self, tmp_path: Path) -> None:
        assert list(load(write(tmp_path / "a.txt", b"\xef\xbb\xbfone\r\ntwo\r\n"))) == ["one\ntwo\n"]

    def test_characters_and_line_ends_across_chunks(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(text_readers, "_CHUNK_BYTES", 3)
        assert list(load(write(tmp_path / "a.txt", "aé\r\n漢字\r\n🙂"))) == ["aé\n漢字\n🙂"]

    @pytest.mark.parametrize(
        ("text", "ends"),
        [("line\n" * 30 + "\n" + "line\n" * 60, "\n\n"), ("line\n" * 90, "\n"), ("word " * 90, " "), ("x" * 450, "x")],
    )
    def test_a_large_file_is_cut_without_loss(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, ends: str
    ) -> None:
        monkeypatch.setattr(text_readers, "DOCUMENT_CHARACTERS", 200)
        texts = list(text_readers.read_texts([write(tmp_path / "a.txt", text)], "text", "text"))
        assert len(texts) > 1
        assert "".join(texts) == text
        assert max(map(len, texts)) <= 200
        assert texts[0].endswith(ends)

    def test_not_utf8_names_the_line(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(text_readers, "_CHUNK_BYTES", 4)
        path = write(tmp_path / "a.txt", b"one\ntwo\ncaf\xe9 three\n")
        assert refusal(path).startswith(f"{path}:3: expected UTF-8 text, found the byte 0xe9")

    def test_a_pipe_is_refused(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "pipe")
        assert refusal(tmp_path / "pipe").endswith("not a regular file. Write the text to a file first")


class TestJson:
    def test_lines(self, tmp_path: Path) -> None:
        path = write(tmp_path / "a.jsonl", '\ufeff{"text": "one"}\r\n\r\n{"text": "tw\\u00f6\\n"}\r\n{"text": " "}')
        assert list(load(path)) == ["one", "twö\n"]

    def test_one_array(self, tmp_path: Path) -> None:
        path = write(tmp_path / "a.json", json.dumps([{"text": "one"}, {"text": "two"}], indent=1))
        assert list(load(path)) == ["one", "two"]

    def test_lines_in_a_json_file(self, tmp_path: Path) -> None:
        assert list(load(write_rows(tmp_path / "a.json", {"text": "one"}, {"text": "two"}))) == ["one", "two"]

    def test_other_columns_may_change_their_type(self, tmp_path: Path) -> None:
        path = write_rows(tmp_path / "a.jsonl", {"text": "one", "m": {"a": 1}}, {"text": "two", "m": [1], "n": 0})
        assert list(load(path)) == ["one", "two"]

    def test_another_column(self, tmp_path: Path) -> None:
        assert list(load(write_rows(tmp_path / "a.jsonl", {"body": "one"}), text_column="body")) == ["one"]

    def test_the_column_is_missing(self, tmp_path: Path) -> None:
        path = write_rows(
            tmp_path / "a.jsonl", {"text": "one"}, {"id": "a1", "n": 3, "story": "once", "url": "http://a"}
        )
        assert refusal(path) == (
            f"{path}:2: no column 'text'; columns here: 'id', 'n', 'story', 'url'; "
            "'story' looks like the text. Rename it to 'text', or set data.text_column in a recipe's file of your own "
            "(memkit recipe NAME --copy mine.yaml)"
        )

    def test_the_longest_column_is_suggested(self, tmp_path: Path) -> None:
        message = refusal(write_rows(tmp_path / "a.jsonl", {"id": "a1", "prosa": "es war einmal", "n": 3}))
        assert "'prosa' looks like the text" in message
        assert "looks like" not in refusal(write_rows(tmp_path / "b.jsonl", {"n": 3}))


class TestParquet:
    @pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())])
    def test_rows(self, tmp_path: Path, kind: pa.DataType) -> None:
        table = pa.table({"id": [1, 2], "text": pa.array(["one", "two"]).cast(kind)})
        pq.write_table(table, tmp_path / "a.parquet")
        assert list(load(tmp_path / "a.parquet")) == ["one", "two"]

    def test_the_column_is_no_text(self, tmp_path: Path) -> None:
        path = tmp_path / "a.parquet"
        pq.write_table(pa.table({"text": [1, 2]}), path)
        assert refusal(path) == f"{path}: column 'text': expected text, found int64"
        pq.write_table(pa.table({"text": ["one", None]}), path)
        assert refusal(path) == f"{path}: row 2: column 'text': expected text, found null"


class TestFolder:
    def test_sorted_by_path_and_nested(self, tmp_path: Path) -> None:
        folder = tmp_path / "corpus"
        for name in ("b.txt", "a/z.md", "a.txt", ".git/x.txt", ".x.txt", "picture.png", "a/LICENSE"):
            write(folder / name, name)
        documents = load(folder)
        assert list(documents) == ["a/z.md", "a.txt", "b.txt"]
        assert documents.source == f"{folder} (3 text files; not read: 1 .png, 1 without ending)"

    def test_links_to_folders_are_followed_and_circles_end(self, tmp_path: Path) -> None:
        write(tmp_path / "real/a.txt", "one")
        (tmp_path / "folder").mkdir()
        (tmp_path / "folder/linked").symlink_to(tmp_path / "real")
        for name in ("up", "again"):  # two circles: 2**40 ways through before the system stops it
            (tmp_path / "real" / name).symlink_to(tmp_path / "folder")
        (tmp_path / "link").symlink_to(tmp_path / "folder")
        assert list(load(tmp_path / "link")) == ["one"]

    def test_several_kinds(self, tmp_path: Path) -> None:
        write(tmp_path / "a.txt", "one")
        write(tmp_path / "b.md", "two")
        write_rows(tmp_path / "c.jsonl", {"text": "three"})
        assert refusal(tmp_path) == (
            f"{tmp_path}: mixed file types: 2 text (1 .md, 1 .txt), 1 JSON (1 .jsonl). "
            "Give a folder with one type, or a single file"
        )

    def test_nothing_usable(self, tmp_path: Path) -> None:
        folder = tmp_path / "corpus"
        folder.mkdir()
        assert refusal(folder).startswith(
            f"{folder}: no text in this folder (it is empty); expected files that end in .txt"
        )
        write(folder / "a.png", "")
        assert "no text in this folder (it has 1 .png); expected" in refusal(folder)

    def test_no_text_in_any_file(self, tmp_path: Path) -> None:
        write(tmp_path / "a.txt", "\n")
        write(tmp_path / "b.txt", "")
        assert refusal(tmp_path).startswith(f"{tmp_path / 'a.txt'} and 1 more files: no text in it")

    def test_a_broken_link(self, tmp_path: Path) -> None:
        (tmp_path / "a.txt").symlink_to(tmp_path / "gone")
        assert refusal(tmp_path) == f"{tmp_path / 'a.txt'}: cannot be read: No such file or directory"


@contextlib.contextmanager
def somebody() -> Iterator[None]:
    """Root reads everything: for a while be one who may not."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


class TestPaths:
    @pytest.fixture
    def public(self) -> Iterator[Path]:
        """pytest's own folder is closed to others."""
        with tempfile.TemporaryDirectory() as name:
            Path(name).chmod(0o755)
            yield Path(name)

    def test_not_permitted(self, public: Path) -> None:
        path = write(public / "a.txt", "one")
        path.chmod(0)
        closed = write(public / "closed/a.txt", "one").parent
        closed.chmod(0)
        with somebody():
            assert refusal(path) == f"{path}: cannot be read: Permission denied"
            assert refusal(closed) == f"{closed}: this folder cannot be read: Permission denied"
            assert refusal(closed / "a.txt") == f"{closed / 'a.txt'}: cannot be read: Permission denied"
        closed.chmod(0o700)

    def test_the_cache_cannot_be_written(self, public: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path = write(public / "a.txt", "one")
        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", write(tmp_path / "file", "") / "cache")
        assert refusal(path).startswith(f"{path}: cannot write to the cache in {tmp_path}/file/cache: ")

    def test_not_there(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        write(tmp_path / "corpus.txt", "one")
        assert refusal(tmp_path / "corpsu.txt") == (
            f"{tmp_path / 'corpsu.txt'}: no such file or folder; did you mean 'corpus.txt'?"
        )
        monkeypatch.chdir(tmp_path)
        assert refusal("gone.txt", hub_reachable=True) == "gone.txt: no such file or folder"
        assert refusal("./gone") == "./gone: no such file or folder"
        assert refusal("a/b/c") == "a/b/c: no such file or folder"

    def test_relative_and_home(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        write(tmp_path / "a.txt", "one")
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("HOME", str(tmp_path))
        assert list(load("a.txt")) == list(load("~/a.txt")) == ["one"]

    def test_a_changed_file_is_read_anew(self, tmp_path: Path) -> None:
        path = write(tmp_path / "a.txt", "one")
        assert list(load(path)) == ["one"]
        stat = path.stat()
        write(path, "two, longer")
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        assert list(load(path)) == ["two, longer"]
        write(path, "TWO, longer")
        assert list(load(path)) == ["TWO, longer"]

    def test_a_second_process_uses_the_cache(self, tmp_path: Path, cache: Path) -> None:
        path = write(tmp_path / "a.txt", "one")
        load(path)
        before = {arrow: arrow.stat().st_mtime_ns for arrow in cache.rglob("*.arrow")}
        script = textwrap.dedent(f"""
            from hf_memkit.recipe.data import load_documents
            documents = load_documents({str(path)!r}, default_hub_id="x", default_hub_config=None, hub_reachable=False)
            print(list(documents))
        """)
        environment = {**os.environ, "HF_DATASETS_CACHE": str(cache), "PYTHONHASHSEED": "7"}
        done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
        assert (done.returncode, done.stdout, done.stderr) == (0, "['one']\n", "")
        assert len(before) == 1
        assert {arrow: arrow.stat().st_mtime_ns for arrow in cache.rglob("*.arrow")} == before

    def test_quiet_only_inside(self, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
        level = logging.getLogger("datasets").level
        load(write(tmp_path / "a.txt", "one"))
        refusal(write(tmp_path / "b.txt", ""))
        assert capfd.readouterr() == ("", "")
        assert logging.getLogger("datasets").level == level
        assert not datasets.utils.are_progress_bars_disabled()


class TestHub:
    @pytest.fixture
    def asked(self, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
        """Stands for the hub: `rows` is what it answers, `call` how it was asked."""
        hub: dict[str, Any] = {"rows": {"text": ["", "one", "two"]}}

        def load_dataset(*args: object, **kwargs: object) -> datasets.Dataset:
            hub["call"] = (args, kwargs)
            if isinstance(hub["rows"], Exception):
                raise hub["rows"]
            return datasets.Dataset.from_dict(hub["rows"])

        monkeypatch.setattr(datasets, "load_dataset", load_dataset)
        return hub

    def test_the_default_corpus(self, asked: dict[str, Any]) -> None:
        documents = load(None, hub_reachable=True)
        assert asked["call"] == (("Salesforce/wikitext", "wikitext-103-raw-v1"), {"split": "train"})
        assert documents.source == "wikitext-103-raw-v1 (Salesforce/wikitext)"
        assert list(documents) == ["one", "two"], "rows without text are left out"

    @pytest.mark.parametrize(
        ("source", "hub_id", "config"),
        [("imdb", "imdb", None), ("a/b.c", "a/b.c", None), ("a/b:c-1", "a/b", "c-1")],
    )
    def test_ids(self, asked: dict[str, Any], source: str, hub_id: str, config: str | None) -> None:
        load(source, hub_reachable=True)
        assert asked["call"] == ((hub_id, config), {"split": "train"})

    def test_a_path_that_exists_comes_first(
        self, asked: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        write(tmp_path / "imdb/a.txt", "mine")
        monkeypatch.chdir(tmp_path)
        assert list(load("imdb", hub_reachable=True)) == ["mine"]

    def test_its_errors_are_one_line(self, asked: dict[str, Any]) -> None:
        asked["rows"] = ValueError("Config name is missing.\nPlease pick one of ['a']\nExample: …")
        assert refusal("a/b", hub_reachable=True) == (
            "a/b: cannot be loaded from the hub: Config name is missing. Please pick one of ['a'] "
            "(nor is 'a/b' a file or folder here)"
        )
        asked["rows"] = ConnectionError("no route")
        assert refusal(None, hub_reachable=True) == (
            "Salesforce/wikitext:wikitext-103-raw-v1: cannot be loaded from the hub: no route; "
            "--data trains on a file or folder of your own"
        )

    def test_its_columns_are_checked(self, asked: dict[str, Any]) -> None:
        asked["rows"] = {"label": [1], "content": ["one"]}
        assert "a/b: no column 'text'; columns here: 'label', 'content'; 'content' looks" in refusal(
            "a/b", hub_reachable=True
        )
        asked["rows"] = {"text": [1]}
        assert refusal("a/b", hub_reachable=True) == "a/b: column 'text': expected text, found int64"
        asked["rows"] = {"text": ["one", None]}
        assert "found null in 1 of 2 rows" in refusal("a/b", hub_reachable=True)
        asked["rows"] = {"text": ["", " "]}
        assert refusal("a/b", hub_reachable=True).startswith("a/b: no text in its split 'train'")

    def test_not_reachable(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """With the real library: it must neither wait for the network nor show its traceback."""
        write(tmp_path / "corpus/a.txt", "one")
        monkeypatch.chdir(tmp_path)
        assert refusal("corpse") == (
            f"corpse: {why_no_hub()}, and this machine's cache has no such dataset; give a file or folder of text "
            "instead (nor is 'corpse' a file or folder here; did you mean 'corpus'?)"
        )

    def test_not_reachable_and_in_the_cache(self, cache: Path) -> None:
        folder = cache / "owner___name/default/0.0.0/0123456789abcdef"
        rows = datasets.Dataset.from_dict({"text": ["cached"]})
        builder = datasets.Dataset.from_generator(lambda: iter(rows), cache_dir=str(cache / "made"))
        made = Path(builder.cache_files[0]["filename"]).parent
        folder.parent.mkdir(parents=True)
        made.rename(folder)
        (folder / "generator-train.arrow").rename(folder / "name-train.arrow")
        info = json.loads((folder / "dataset_info.json").read_text())
        info.update(builder_name="parquet", dataset_name="name", config_name="default")
        for split in info["splits"].values():
            split["dataset_name"] = "name"
        (folder / "dataset_info.json").write_text(json.dumps(info))
        documents = load("owner/name")
        assert list(documents) == ["cached"]
        assert documents.source == "owner/name, from this machine's cache"
        assert not datasets.config.HF_HUB_OFFLINE, "as before afterwards"

    def test_the_fallback(self, monkeypatch: pytest.MonkeyPatch) -> None:
        import pydoc_data.topics

        topics = pydoc_data.topics.topics
        monkeypatch.setattr(pydoc_data.topics, "topics", dict(reversed(topics.items())))
        documents = load(None)
        assert documents.source == (
            "pydoc_data.topics (the text of Python's own help, used because the hub is not reachable)"
        )
        assert list(documents) == [topics[name] for name in sorted(topics)]
