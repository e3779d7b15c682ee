"""Full disks, folders that may not be entered, and terminals that cannot show a character: one line, no traceback."""

from __future__ import annotations

import errno
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hf_memkit.cli import main
from hf_memkit.cli.options import INTERRUPTED
from hf_memkit.common.errors import InputError
from hf_memkit.common.user_files import write_text
from tests.conftest import ROOT


def run(command: str, stdout: Any, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    words = [sys.executable, "-m", "hf_memkit", *command.split()]
    return subprocess.run(words, stdout=stdout, stderr=subprocess.PIPE, text=True, env=environment)


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_full_standard_output_is_one_line(unbuffered: str) -> None:
    with Path("/dev/full").open("w") as full:
        ran = run("--version", full, PYTHONUNBUFFERED=unbuffered)
    assert (ran.returncode, ran.stderr) == (
        2,
        "memkit: error: cannot write the answer: No space left on device\n",
    )


def test_ascii_output_has_a_character_for_each_that_it_lacks() -> None:
    ran = run("recipe --gpu 16GB", subprocess.PIPE, PYTHONIOENCODING="ascii")
    assert (ran.returncode, ran.stderr) == (0, "") and "?" in ran.stdout


class _Full(io.StringIO):
    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_new_file_on_a_full_disk_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Would notice: an empty file that blocks the next try, and an old file that is lost."""

    def full(path: Path, mode: str, **_: Any) -> io.StringIO:
        path.touch()
        return _Full()

    new, old = tmp_path / "new.yaml", tmp_path / "old.yaml"
    old.write_text("old")
    monkeypatch.setattr(Path, "open", full)
    for path in (new, old):
        with pytest.raises(InputError, match="No space left"):
            write_text(path, "text", overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["old.yaml"]


def test_a_full_disk_leaves_no_part_of_an_export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[Path] = []

    def third_fails(path: Path, text: str) -> None:
        if len(written) == 2:
            raise InputError(f"{path}: cannot be written")
        written.append(path)
        write_text(path, text)

    monkeypatch.setattr("hf_memkit.recipes.export.files.write_text", third_fails)
    options = ["--gpu", "16GB", "--ram", "64GB", "--variant", "resident"]
    assert main(["recipe", "gpt2-on-16gb", "--export", str(tmp_path / "job"), *options]) == 2
    assert len(written) == 2 and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", ["recipe closed/x.yaml", "predict closed/x.py"])
def test_a_folder_that_may_not_be_entered(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stat = Path.stat

    def refuse(path: Path, **options: bool) -> os.stat_result:
        if "closed" in path.parts:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return stat(path, **options)

    monkeypatch.setattr(Path, "stat", refuse)
    assert main(command.split()) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and command.split()[1] in lines[0] and "Permission denied" in lines[0]


def test_ctrl_c_in_a_dry_run_promises_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(_: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("hf_memkit.recipes.schema.load_recipe", interrupt)
    assert main(["recipe", "gpt2-on-16gb", "--dry-run"]) == INTERRUPTED == 130
    assert "memkit: interrupted" in (line := capsys.readouterr().err) and "--resume" not in line


def test_ds_copy_prints_to_standard_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["ds", "copy", "zero2", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["zero_optimization"]["stage"] == 2 and not list(tmp_path.iterdir())


def test_the_list_for_a_small_gpu_says_that_nothing_fits(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipe", "--gpu", "620MB"]) == 0
    assert "no recipe fits" in capsys.readouterr().out.split("\n\n")[0]


def test_data_of_the_hub_that_a_dry_run_does_not_read_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from tests.recipes.test_by_data import made

    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr("hf_memkit.recipes.by_data.predict", lambda setup: made())
    options = ["--data", "nope", "--variant", "resident", "--gpu", "16GB", "--ram", "64GB"]
    for command in (["recipe", "gpt2-on-16gb", "--dry-run", "--short"], ["predict", "--recipe", "gpt2-on-16gb"]):
        assert main([*command, *options]) in (0, 1)
        assert "--data nope" in capsys.readouterr().out, command


def test_the_answer_of_a_plan_is_printed_before_its_page_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object, **__: object) -> None:
        raise InputError("page.html: cannot be written")

    found = SimpleNamespace(verdict="fits", with_code=(), proposed=None)
    monkeypatch.setattr("hf_memkit.cli.plan._planned", lambda *_, **__: (found,))
    monkeypatch.setattr("hf_memkit.cli.plan._show", lambda *_: print("the answer"))
    monkeypatch.setattr("hf_memkit.plan.answer.plan_answer", lambda *_, **__: None)
    monkeypatch.setattr("hf_memkit.common.answer.page.write_page", full)
    assert main(["plan", "--model", "gpt2", "--gpu", "T4", "--html", str(tmp_path / "page.html")]) == 2
    shown = capsys.readouterr()
    assert shown.out == "the answer\n" and "page.html: cannot be written" in shown.err
