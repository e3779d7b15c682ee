"""scripts/docs.py: what its parts of pages share."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tests.conftest import load_script


@pytest.fixture(scope="module")
def blocks() -> SimpleNamespace:
    return load_script("docs_blocks.py")


def test_a_table_shows_what_is_missing_and_escapes_bars(blocks: SimpleNamespace) -> None:
    lines = blocks.table("name | error", [["a|b", "1.2 %"], ["two\nlines", None]]).splitlines()
    assert lines == ["| name | error |", "|---|---|", "| a\\|b | 1.2 % |", "| two lines | – |"]


def test_an_excerpt_says_what_it_leaves_out(blocks: SimpleNamespace) -> None:
    output = "first\nhead\n  more\n\ntail\nlast\n"
    assert blocks.excerpt(output, ("head", "tail")) == "…\nhead\n  more\n…"
    assert blocks.excerpt(output, "first", "tail") == "first\n…\ntail\n…"
    with pytest.raises(SystemExit, match="no line begins with 'other'"):
        blocks.excerpt(output, "other")


def test_a_command_runs_as_it_stands_on_the_page(blocks: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_memkit.cli.main", lambda words: print("out", *words))
    assert blocks.output_of("memkit check \\\n    ds.json", None, False) == "out check ds.json\n"
    monkeypatch.setattr("hf_memkit.cli.main", lambda words: None)
    with pytest.raises(SystemExit):
        blocks.output_of("memkit silent", None, False)


def test_json_of_the_package_s_data_has_a_list_a_line(blocks: SimpleNamespace) -> None:
    content = {"a": {"b": [1, 2], "c": {"d": 3}}}
    assert blocks.compact_json(content) == '{\n "a": {\n  "b": [ 1, 2 ],\n  "c": {\n   "d": 3\n  }\n }\n}\n'
    assert '"c": { "d": 3 }\n' in blocks.compact_json(content, sections=True)
