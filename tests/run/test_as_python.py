"""`memkit run SCRIPT` is `python SCRIPT`: what a script sees of its process, how it ends, and what stands on the
screen then. None of these scripts imports torch."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from hf_memkit.cli import main
from tests.fewer import some
from tests.run.conftest import MEMKIT, Ended, Start

NO_TRAINER = "made no Trainer, so no memory was recorded\n"


@pytest.fixture
def scripts(tmp_path: Path, script: Callable[[str], Path]) -> Path:
    source = script("shows_itself.py")
    package = tmp_path / "a_package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "inside.py").write_bytes(source.read_bytes())
    (package / "broken.py").write_text("import no_such_thing\n")
    (package / "__main__.py").write_text("from a_package import inside\nprint(inside.__name__)\n")
    (tmp_path / "link.py").symlink_to(package / "inside.py")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "__main__.py").write_text("import sys\nprint(sys.argv, sys.path[0], __file__)\n")
    (tmp_path / "wrong_syntax.py").write_text("def (:\n")
    return tmp_path


def both(start: Start, *command: str) -> tuple[Ended, Ended]:
    """By Python, and by memkit; the line at the end is cut off."""
    target = 2 if command[0] == "-m" else 1
    python = start(*command)
    memkit = start(*MEMKIT, *command[:target], "--", *command[target:])
    by_python, by_memkit = python.ended(), memkit.ended()
    if by_memkit.code == 0:
        assert by_memkit.err.endswith(NO_TRAINER), by_memkit.err
        message = by_memkit.err.splitlines(keepends=True)
        by_memkit = Ended(0, by_memkit.out, "".join(message[:-1]))
    return by_python, by_memkit


@pytest.mark.parametrize(
    "command",
    [
        "shows_itself.py 0 --lr 1 -- x",
        "-m a_package.inside 0 --lr 1 -m",
        *(pytest.param(command, marks=pytest.mark.slow) for command in ("link.py", "-m a_package", "folder x")),
    ],
)
def test_a_script_sees_what_it_sees_without_memkit(start: Start, scripts: Path, command: str) -> None:
    """Finds: memkit's words in sys.argv, its folder in sys.path[0], a wrong `__main__` or `__file__`, another module's
    `from __future__`, a variable, filter, hook or library that memkit leaves in the process."""
    python, memkit = both(start, *command.split())
    assert python.code == 0, python.err
    if python.out.startswith("{"):
        assert json.loads(memkit.out) == json.loads(python.out)
    assert memkit == python


@pytest.mark.parametrize("command", ["shows_itself.py", pytest.param("-m a_package.inside", marks=pytest.mark.slow)])
def test_classes_of_the_script_are_pickled_for_spawned_workers(start: Start, scripts: Path, command: str) -> None:
    """Finds: a `__main__` that workers cannot import again, or that runs memkit in each."""
    memkit = start(*MEMKIT, *command.split(), "spawns").ended()
    assert memkit.code == 0, memkit.err
    assert memkit.out.splitlines()[-1] == "['__mp_main__ 3', '__mp_main__ 4']"
    assert memkit.err.count(NO_TRAINER) == 1


@pytest.mark.parametrize("how", some(["3", "a word", "leaves", "SIGINT", "SIGTERM", "fails"], "3", "SIGINT", "fails"))
def test_a_script_ends_as_it_ends_without_memkit(start: Start, scripts: Path, how: str) -> None:
    """Finds: an exit code or signal that memkit turns into its own, a traceback with its frames, a lost note."""
    python, memkit = both(start, "shows_itself.py", how)
    assert (memkit.code, memkit.err) == (python.code, python.err)
    if how.startswith("SIG"):
        assert python.code == -getattr(signal, how)


def test_python_s_error_for_an_unreadable_script(start: Start, scripts: Path) -> None:
    """Finds: memkit's frames above a syntax error."""
    python, memkit = both(start, "wrong_syntax.py")
    assert memkit == python and memkit.code == 1


def test_a_package_that_cannot_be_imported(start: Start, scripts: Path) -> None:
    """Finds: "no such module" for one that is there, and lacks another."""
    memkit = start(*MEMKIT, "-m", "a_package.broken").ended()
    assert memkit.code == 1 and memkit.err.endswith("No module named 'no_such_thing'\n")
    assert "memkit" not in memkit.err


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("missing.py", "missing.py: no such file"),
        ("a_package/..", "a folder without __main__.py"),
        ("", "Missing argument 'SCRIPT'"),
        ("--log some shows_itself.py", "--log some: unknown. Give one of few, all, none"),
        ("--records shows_itself.py shows_itself.py", "--records shows_itself.py: a file"),
        (
            "--lr 1 shows_itself.py",
            "No such option: --lr; did you mean '--log'? Write the script's arguments after --",
        ),
        (
            "shows_itself.py --lr 1 -- x",
            "No such option: --lr; did you mean '--log'? Write the script's arguments after --",
        ),
    ],
)
def test_wrong_input_is_one_line(
    scripts: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str, expected: str
) -> None:
    """Finds: a script that is begun although memkit was given something wrong."""
    monkeypatch.chdir(scripts)
    assert main(["run", *command.split()]) == 2
    output = capsys.readouterr()
    assert output.err.startswith(f"memkit: error: {expected}") or f"error: a_package/..: {expected}" in output.err
    assert output.err.count("\n") == 1 and not output.out


@pytest.mark.parametrize(
    "module", some(["no_such_module", "a_package.missing", "no_such.module", "..a_package"], "a_package.missing")
)
def test_a_missing_module_is_one_line(start: Start, scripts: Path, module: str) -> None:
    """Finds: a traceback of importlib's for a misspelt name."""
    memkit = start(*MEMKIT, "-m", module).ended()
    assert memkit.code == 2 and not memkit.out and memkit.err.count("\n") == 1
    assert memkit.err.startswith(f"memkit: error: -m {module}: no such module. ")


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (["run", "shows_itself.py", "--log", "x", "--help"], ["--log", "x", "--help"]),
        (["run", "shows_itself.py", "--log", "none", "--", "0", "--", "--log"], ["0", "--", "--log"]),
        (["run", "--no-phases", "-m", "a_package.inside", "0", "-m"], ["0", "-m"]),
        (["--local_rank=1", "run", "shows_itself.py", "--", "0"], ["--local_rank=1", "0"]),
        (["--local-rank=0", "run", "shows_itself.py", "--", "0"], ["--local-rank=0", "0"]),
    ],
)
def test_which_words_are_the_scripts(start: Start, scripts: Path, command: list[str], expected: list[str]) -> None:
    """Finds: a word of the script's that memkit takes, and the argument of a launcher lost."""
    memkit = start("-m", "hf_memkit", *command).ended()
    assert json.loads(memkit.out)["argv"][1:] == expected


OWN = "import argparse, sys; argparse.ArgumentParser().add_argument('--predict'); print(sys.argv[1:])"


@pytest.mark.parametrize(
    ("words", "refused"),
    [
        ("train.py --plan plan.yaml", "--plan plan.yaml"),
        ("train.py --lr 1 --plan=plan.yaml --no-phases", "--plan=plan.yaml --no-phases"),
        ("train.py --records out x", "--records out"),
        ("--no-phases train.py --predict", "--predict"),
        ("-m train --log all", "--log all"),
        ("own.py --plan plan.yaml --predict 1", "--plan plan.yaml"),
    ],
)
def test_options_behind_the_script_without_dashes_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: str, refused: str
) -> None:
    """Finds: a training without the plan that its user gave."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("raise AssertionError('it ran')")
    (tmp_path / "plan.yaml").write_text("arguments: {per_device_train_batch_size: 2}")
    if words.startswith("own.py"):
        (tmp_path / "own.py").write_text(OWN)
    assert main(["run", *words.split()]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"memkit: error: {refused}: ") and "memkit run " in line


@pytest.mark.parametrize("words", ["own.py --predict 1", "own.py --plan data.json", "own.py --lr 1 -m x --help"])
def test_options_that_the_script_has_are_its_own(start: Start, tmp_path: Path, words: str) -> None:
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "data.json").write_text("[]")
    memkit = start(*MEMKIT, *words.split()).ended()
    assert memkit.out.strip() == str(words.split()[1:])


def test_a_notebook_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "job.ipynb").write_text('{"execution_count": null}')
    monkeypatch.chdir(tmp_path)
    for verb in ("run", "predict", "plan"):
        assert main([verb, "job.ipynb"]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("memkit: error: job.ipynb: a notebook")
