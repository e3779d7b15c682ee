"""The folder of a run: free, finished or unfinished; and which checkpoint is whole."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hf_memkit.errors import InputError, RunError
from hf_memkit.recipe import output


def write(folder: Path, status: str, **more: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    output.write_run(folder, {"recipe": "r", "variant": "lora", "status": status, **more})


def test_default_folders_are_never_used_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert output.default_output("r", "lora") == "memkit-runs/r-lora"
    write(tmp_path / "memkit-runs/r-lora", "finished")
    assert output.default_output("r", "lora") == "memkit-runs/r-lora-2"


def test_a_used_folder_is_refused_with_the_way_on(tmp_path: Path) -> None:
    output.refuse_used(str(tmp_path / "new" / "deep"))
    assert list(tmp_path.iterdir()) == []
    write(tmp_path / "a", "finished")
    with pytest.raises(InputError, match=r"holds a finished run. Add --overwrite"):
        output.refuse_used(str(tmp_path / "a"))
    write(tmp_path / "b", "running")
    with pytest.raises(InputError, match=r"holds an unfinished run\. Add --resume"):
        output.refuse_used(str(tmp_path / "b"))
    (tmp_path / "file").write_text("x")
    with pytest.raises(InputError, match="is a file"):
        output.refuse_used(str(tmp_path / "file"))
    with pytest.raises(InputError, match="not writable"):
        output.refuse_used(str(tmp_path / "file" / "below"))
    (tmp_path / "a" / output.RUN_FILE).write_text("{")
    with pytest.raises(RunError, match="damaged"):
        output.refuse_used(str(tmp_path / "a"))


def test_clearing_leaves_what_a_run_did_not_write(tmp_path: Path) -> None:
    write(tmp_path, "finished")
    (tmp_path / "checkpoint-5").mkdir()
    (tmp_path / "model").mkdir()
    (tmp_path / "memory-rank0.jsonl").write_text("{}\n")
    (tmp_path / "notes.txt").write_text("mine")
    output.clear(str(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
    (tmp_path / "model").mkdir()
    output.clear(str(tmp_path))
    assert (tmp_path / "model").exists(), "no run of memkit wrote that"


def test_resume_finds_the_newest_unfinished_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match="no unfinished run of r"):
        output.unfinished_run("r", "auto", "")
    write(tmp_path / "memkit-runs/r-lora", "finished")
    write(tmp_path / "memkit-runs/r-lora-2", "running")
    assert output.unfinished_run("r", "auto", "")[0] == "memkit-runs/r-lora-2"
    with pytest.raises(InputError, match="no unfinished run"):
        output.unfinished_run("r", "resident", "")
    with pytest.raises(InputError, match="is finished"):
        output.unfinished_run("r", "auto", "memkit-runs/r-lora")
    with pytest.raises(InputError, match="holds no run"):
        output.unfinished_run("r", "auto", str(tmp_path))
    with pytest.raises(InputError, match="belongs to recipe 'r', not 'other'"):
        output.unfinished_run("other", "auto", "memkit-runs/r-lora-2")


def test_a_checkpoint_that_was_cut_short_is_passed_over(tmp_path: Path) -> None:
    assert output.last_checkpoint(str(tmp_path)) is None
    for number, state in ((5, "{}"), (10, "{}"), (15, '{"global'), (20, None)):
        folder = tmp_path / f"checkpoint-{number}"
        folder.mkdir()
        if state is not None:
            (folder / "trainer_state.json").write_text(state)
    assert output.last_checkpoint(str(tmp_path)) == str(tmp_path / "checkpoint-10")


def test_the_run_file_is_written_whole(tmp_path: Path) -> None:
    write(tmp_path, "running", note="x")
    assert output.read_run(tmp_path) == {"recipe": "r", "variant": "lora", "status": "running", "note": "x"}
    assert [path.name for path in tmp_path.iterdir()] == [output.RUN_FILE]
    assert json.loads((tmp_path / output.RUN_FILE).read_text())["note"] == "x"
