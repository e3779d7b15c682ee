"""The folder of a run: free, finished or unfinished; and which checkpoint is whole."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest

from hf_memkit.common.errors import InputError, RunError
from hf_memkit.components.resuming import last_checkpoint
from hf_memkit.run import folder as run_folder

RUN = {"recipe": "r", "variant": "lora", "setup": {}, "files": ["train_text.py"]}


def write(folder: Path, status: str, **more: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    run_folder.write_run(folder, {**RUN, "status": status, **more})


def test_default_folders_are_never_used_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_folder.default_output("r", "lora") == "memkit-runs/r-lora"
    write(tmp_path / "memkit-runs/r-lora", "finished")
    assert run_folder.default_output("r", "lora") == "memkit-runs/r-lora-2"


def test_a_used_folder_is_refused_with_the_way_on(tmp_path: Path) -> None:
    run_folder.refuse_used(str(tmp_path / "new" / "deep"))
    assert list(tmp_path.iterdir()) == []
    write(tmp_path / "a", "running")
    with pytest.raises(InputError, match=r"has an unfinished run\. Add --resume"):
        run_folder.refuse_used(str(tmp_path / "a"))
    (tmp_path / "file").write_text("x")
    with pytest.raises(InputError, match="is a file"):
        run_folder.refuse_used(str(tmp_path / "file"))
    with pytest.raises(InputError, match="not writable"):
        run_folder.refuse_used(str(tmp_path / "file" / "below"))
    (tmp_path / "a" / run_folder.RUN_FILE).write_text("{")
    with pytest.raises(RunError, match="damaged"):
        run_folder.refuse_used(str(tmp_path / "a"))
    write(tmp_path / "c", run_folder.WRITTEN)
    with pytest.raises(InputError, match=f"type: memkit run {tmp_path}/c"):
        run_folder.refuse_used(str(tmp_path / "c"))


def test_clearing_leaves_what_a_run_did_not_write(tmp_path: Path) -> None:
    write(tmp_path, "finished")
    (tmp_path / "checkpoint-5").mkdir()
    (tmp_path / "model").mkdir()
    (tmp_path / "memory-rank0.jsonl").write_text("{}\n")
    (tmp_path / "notes.txt").write_text("mine")
    run_folder.clear(str(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
    (tmp_path / "model").mkdir()
    run_folder.clear(str(tmp_path))
    assert (tmp_path / "model").exists(), "no run of memkit wrote that"


def test_resume_finds_the_newest_unfinished_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match="no unfinished run of r"):
        run_folder.unfinished_run("r", "auto", "")
    write(tmp_path / "memkit-runs/r-lora", "finished")
    write(tmp_path / "memkit-runs/r-lora-2", "running")
    write(tmp_path / "memkit-runs/r-lora-3", run_folder.WRITTEN)
    assert run_folder.unfinished_run("r", "auto", "") == Path("memkit-runs/r-lora-2")
    with pytest.raises(InputError, match="no unfinished run"):
        run_folder.unfinished_run("r", "resident", "")
    with pytest.raises(InputError, match="has no run"):
        run_folder.unfinished_run("r", "auto", str(tmp_path))
    with pytest.raises(InputError, match="is of recipe 'r', not 'other'"):
        run_folder.unfinished_run("other", "auto", "memkit-runs/r-lora-2")


@pytest.mark.parametrize(
    ("status", "resume", "overwrite", "refused"),
    [
        (run_folder.WRITTEN, False, False, ""),
        (run_folder.WRITTEN, True, False, "nothing has run in run yet"),
        ("running", False, False, "run: has an unfinished run. Add --resume"),
        ("interrupted", True, False, ""),
        ("finished", False, False, "run: has a finished run. Add --overwrite"),
        ("finished", False, True, ""),
        ("finished", True, False, "is finished"),
    ],
)
def test_runs_that_may_begin_or_continue(status: str, resume: bool, overwrite: bool, refused: str) -> None:
    with pytest.raises(InputError, match=refused) if refused else contextlib.nullcontext():
        run_folder.refuse_state("run", status, resume=resume, overwrite=overwrite)


def test_a_checkpoint_that_was_cut_short_is_passed_over(tmp_path: Path) -> None:
    assert last_checkpoint(str(tmp_path)) is None
    for number, state in ((5, "{}"), (10, "{}"), (15, '{"global'), (20, None)):
        folder = tmp_path / f"checkpoint-{number}"
        folder.mkdir()
        if state is not None:
            (folder / "trainer_state.json").write_text(state)
    assert last_checkpoint(str(tmp_path)) == str(tmp_path / "checkpoint-10")


def test_the_run_file_is_written_whole(tmp_path: Path) -> None:
    write(tmp_path, "running", note="x")
    assert run_folder.read_run(tmp_path) == {**RUN, "status": "running", "note": "x"}
    assert [path.name for path in tmp_path.iterdir()] == [run_folder.RUN_FILE]
    assert json.loads((tmp_path / run_folder.RUN_FILE).read_text())["note"] == "x"
