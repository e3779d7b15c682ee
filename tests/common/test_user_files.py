"""What a user gives may be nested without end, and where a user has something written may be a link to nowhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from hf_memkit.cli import main
from hf_memkit.common.errors import InputError
from hf_memkit.common.user_files import parsed, write_text

DEEP = 200_000
LISTS, OBJECTS = "[" * DEEP + "]" * DEEP, '{"a":' * DEEP + "1" + "}" * DEEP


@pytest.mark.parametrize("verb", [["check"], ["recipe"], ["preset", "show", "lora", "--args"]])
@pytest.mark.parametrize("content", [LISTS, OBJECTS, f"deepspeed: '{OBJECTS}'"], ids=["lists", "objects", "text"])
@pytest.mark.parametrize("ending", ["json", "yaml"])
def test_nested_without_end(
    verb: list[str], content: str, ending: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if content.startswith("deepspeed") and (ending == "json" or verb != ["check"]):
        return  # the text inside the text is followed by `check` alone, and is YAML
    path = tmp_path / f"deep.{ending}"
    path.write_text(content)
    file = path if verb != ["recipe"] else path.rename(tmp_path / "deep.yaml")
    assert main([*verb, str(file)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("memkit: error: ") and error.count("\n") == 1 and str(file) in error and len(error) < 300


def test_a_value_nested_without_end(capsys: pytest.CaptureFixture[str]) -> None:
    brackets = "[" * 20_000
    assert main(["preset", "show", "lora", "--model", "gpt2", "--set", f"lr_scheduler_kwargs={brackets}"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def nested(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = {"a": [value]}
    return value


def test_how_deep() -> None:
    assert parsed("x", json.loads, json.dumps(nested(49))) == nested(49)
    with pytest.raises(InputError, match=r"^x: nested"):
        parsed("x", json.loads, json.dumps(nested(51)))
    for recursive in ("a: &a [*a]", "a: &a [*a, *a]"):
        with pytest.raises(InputError, match=r"^x: (nested )?more than"):
            parsed("x", yaml.safe_load, recursive)
    bomb = "a0: &a0 {x: 1}\n" + "".join(f"a{n}: &a{n} {{p: *a{n - 1}, q: *a{n - 1}}}\n" for n in range(1, 60))
    with pytest.raises(InputError, match=r"^x: more than"):
        parsed("x", yaml.safe_load, bomb)
    with pytest.raises(ValueError, match="Expecting"):
        parsed("x", json.loads, "{")


@pytest.mark.parametrize(
    "verb",
    [
        ["recipe", "gpt2-on-16gb", "--copy"],
        ["ds", "copy", "zero2", "--overwrite"],
        ["preset", "copy", "lora", "--model", "gpt2"],
    ],
    ids=" ".join,
)
def test_a_link_to_nowhere(verb: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    link, nowhere = tmp_path / "new.yaml", tmp_path / "nowhere"
    link.symlink_to(nowhere)
    assert main([*verb, str(link)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and str(link) in error and str(nowhere) in error
    assert link.is_symlink() and not nowhere.exists()


def test_a_link_that_appears_after_the_look(tmp_path: Path) -> None:
    link, nowhere = tmp_path / "link", tmp_path / "nowhere"
    link.symlink_to(nowhere)
    for overwrite in (False, True):
        with pytest.raises(InputError, match="cannot be written"):
            write_text(link, "x", overwrite=overwrite)
    assert not nowhere.exists()
    nowhere.write_text("old")
    write_text(link, "new", overwrite=True)
    assert nowhere.read_text() == "new", "a link to a file stands for it"
