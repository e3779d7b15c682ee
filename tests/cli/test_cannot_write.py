"""Full disks, folders that may not be entered, and terminals that cannot show a character: one line, no traceback."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hf_memkit.cli import main
from hf_memkit.cli.options import INTERRUPTED
from hf_memkit.common.errors import InputError, MemkitError
from hf_memkit.common.user_files import write_text
from hf_memkit.run.folder import write_run
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


@contextlib.contextmanager
def full_disk(room: int) -> Iterator[None]:
    """Files cannot grow beyond `room` bytes: the system's own error after a part was written."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def _write_plan(path: Path) -> int:
    from hf_memkit.plan.plan_file import write_plan
    from tests.plan.made_plans import plan, setup

    write_plan(plan(setup(8, 1, 12, 1.0)), str(path))
    return 0


def _write_page(path: Path) -> int:
    from hf_memkit.common.answer.document import write_document

    write_document(path, f'<meta name="generator" content="memkit 1">{"text " * 100}')
    return 0


def _write_run(path: Path) -> int:
    write_run(path.parent, {"setup": ["text"] * 100})
    return 0


WRITERS: dict[str, tuple[Callable[[Path], int], str]] = {
    "preset copy": (
        lambda path: main(["preset", "copy", "lora", "--model", "gpt2", "--overwrite", str(path)]),
        "a.yaml",
    ),
    "ds copy": (lambda path: main(["ds", "copy", "zero2", "--overwrite", str(path)]), "ds.json"),
    "recipe --copy": (lambda path: main(["recipe", "gpt2-on-16gb", "--copy", str(path)]), "recipe.yaml"),
    "plan --write": (_write_plan, "plan.yaml"),
    "--html": (_write_page, "page.html"),
    "run file": (_write_run, "memkit-run.json"),
}
"""What writes a user's file → (the call, a file's name)."""


@pytest.mark.parametrize("room", [0, 64])
@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("is_new", [True, False], ids=["new", "earlier"])
def test_a_full_disk_changes_no_file(
    writer: str, room: int, is_new: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Would notice: an earlier file that is cut or lost, a part of a new one, a temporary file, a traceback."""
    write, name = WRITERS[writer]
    path = tmp_path / name
    if not is_new and writer == "recipe --copy":
        return  # it never overwrites
    if not is_new:
        assert write(path) == 0
        path.chmod(0o640)
    before = {each.name: each.read_bytes() for each in tmp_path.iterdir()}
    capsys.readouterr()
    with full_disk(room):
        try:
            code, line = write(path), capsys.readouterr().err.strip()
        except MemkitError as error:
            code, line = error.exit_code, str(error)
    assert code and "\n" not in line and str(path) in line and "File too large" in line
    assert {each.name: each.read_bytes() for each in tmp_path.iterdir()} == before
    assert write(path) == 0 and path.stat().st_mode & 0o777 == (0o644 if is_new else 0o640)


def test_a_link_s_target_is_replaced_and_a_pipe_is_written_to(tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_text("old")
    link.symlink_to(target)
    write_text(link, "new", overwrite=True)
    assert link.is_symlink() and target.read_text() == "new"
    read, written = os.pipe()
    write_text(Path(f"/dev/fd/{written}"), "piped", overwrite=True)
    assert os.read(read, 100) == b"piped"
    os.close(read), os.close(written)


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
