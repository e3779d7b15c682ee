"""Commands in messages: a shell reads the path as one word, whatever characters it has."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from hf_memkit.checks.doctor import host
from hf_memkit.cli import main
from hf_memkit.common.answer.document import check_file
from hf_memkit.common.errors import MemkitError
from hf_memkit.measuring.report.load import load_run
from hf_memkit.plan.plan_file import check_plan_file
from hf_memkit.run import folder as run_folder
from tests.measuring.report import synthetic_records as made

NAME = "my job; $(touch pwned) 'x'"
RUN = {"recipe": "gpt2-on-16gb", "variant": "lora", "setup": {}, "files": ["train_text.py"]}


def _with_run(folder: Path, status: str) -> str:
    folder.mkdir()
    run_folder.write_run(folder, {**RUN, "status": status})
    return str(folder)


def _error(call: Callable[[], object]) -> str:
    with pytest.raises(MemkitError) as error:
        call()
    return str(error.value)


def _recipe_as_config(path: Path) -> str:
    from hf_memkit.checks.apply import check_file as check

    path = path.with_suffix(".yaml")
    path.write_text("variants: {}\n")
    return _error(lambda: check(path))


MESSAGES: dict[str, Callable[[Path], str]] = {
    "mkdir -p FILE": lambda path: _error(lambda: check_file(path / "page.html")),
    "mkdir -p FILE ": lambda path: _error(lambda: check_plan_file(str(path / "plan.yaml"))),
    "mkdir -p FILE  ": lambda path: host._disk(str(path))[0].fix or "",
    "memkit run FILE": lambda path: _error(lambda: run_folder.refuse_used(_with_run(path, "written"))),
    "memkit run FILE --overwrite": lambda path: run_folder.start_again(path),
    "memkit run FILE --resume": lambda path: _error(
        lambda: run_folder.unfinished_run("other", "auto", _with_run(path, "running"))
    ),
    "memkit recipe NAME --export FILE": lambda path: _error(lambda: run_folder.written_run(path)),
    "memkit report FILE/out": lambda path: _error(lambda: load_run(made.write(path / "out", made.healthy(1)).parent)),
    "memkit check FILE.yaml": _recipe_as_config,
}
"""A command → what gives the message with it for a path."""


@pytest.mark.parametrize("expected", MESSAGES)
def test_a_command_in_a_message_is_quoted(expected: str, tmp_path: Path) -> None:
    path = tmp_path / NAME
    message = MESSAGES[expected](path)
    words = [word.replace("FILE", str(path)) for word in expected.split()]
    assert shlex.join(words) in message, message


def test_a_screen_s_commands_are_quoted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "500")
    made.write(tmp_path / NAME, made.healthy(4))
    assert main(["report", NAME]) == 0
    quoted = shlex.quote(str(NAME))
    assert f"memkit report {quoted} --html {quoted}" in capsys.readouterr().out
    options = ["--gpu", "16GB", "--ram", "64GB", "--variant", "resident"]
    assert main(["recipe", "gpt2-on-16gb", "--export", "other job", *options]) == 0
    assert "memkit run 'other job'" in capsys.readouterr().out
