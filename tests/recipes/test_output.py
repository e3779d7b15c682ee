"""The folder of a run: free, finished or unfinished; and which checkpoint is whole."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest

from hf_memkit.common.errors import InputError
from hf_memkit.components.resuming import last_checkpoint
from hf_memkit.run import folder as run_folder

RUN = {"recipe": "r", "variant": "lora", "setup": {}, "files": ["train_text.py"]}


def write(folder: Path, status: str, **more: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    run_folder.write_run(folder, {**RUN, "status": status, **more})


def write_trained(folder: Path, names: str) -> None:
    """Files of these names, and folders whose names end in a slash. A checkpoint with a state file is complete: it has
    an engine's shards."""
    for name in names.split():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).mkdir() if name.endswith("/") else (folder / name).write_text("{}")
        if name.endswith("/trainer_state.json"):
            (folder / name).with_name("global_step1").mkdir()


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
    for refused in (run_folder.refuse_used, run_folder.clear):
        with pytest.raises(InputError, match=r"damaged\. To train from the first step"):
            refused(str(tmp_path / "a"))
    write_trained(tmp_path / "a", "checkpoint-500/trainer_state.json")
    (tmp_path / "a" / "train_text.py").touch()
    with pytest.raises(InputError, match=r"To continue from checkpoint-500, type: python .*/train_text\.py"):
        run_folder.clear(str(tmp_path / "a"))
    assert (tmp_path / "a" / "checkpoint-500").exists()
    write(tmp_path / "c", run_folder.WRITTEN)
    with pytest.raises(InputError, match=f"type: memkit run {tmp_path}/c"):
        run_folder.refuse_used(str(tmp_path / "c"))
    write_trained(tmp_path / "c", "model/a")
    with pytest.raises(InputError, match=r"has model, and no memkit run has trained there"):
        run_folder.refuse_used(str(tmp_path / "c"))
    write_trained(tmp_path / "other", "checkpoint-500/trainer_state.json")  # of a training without memkit
    with pytest.raises(InputError, match=r"other: has checkpoint-500, which memkit did not write"):
        run_folder.refuse_used(str(tmp_path / "other"))


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
    ("status", "trained", "options", "refused"),
    [
        (run_folder.WRITTEN, "", "", ""),
        (run_folder.WRITTEN, "model/", "", ""),  # empty
        (run_folder.WRITTEN, "", "resume", "nothing has run in run yet"),
        ("running", "", "", "run: has an unfinished run. Add --resume"),
        ("interrupted", "", "resume", ""),
        ("finished", "", "", "run: has a finished run. Add --overwrite"),
        ("finished", "", "overwrite", ""),
        ("finished", "", "resume", "is finished"),
        # `python run/train_text.py` has trained.
        (run_folder.WRITTEN, "checkpoint-8/trainer_state.json checkpoint-10/trainer_state.json model/a", "",
         r"run: has checkpoint-8, checkpoint-10, model, .* from checkpoint-10, type: memkit run run --resume"),
        (run_folder.WRITTEN, "checkpoint-8/a", "", r"run: has checkpoint-8, and .* To replace them, add --overwrite"),
        (run_folder.WRITTEN, "checkpoint-8/trainer_state.json model/a", "resume", ""),
        (run_folder.WRITTEN, "checkpoint-8/trainer_state.json model/a", "overwrite", ""),
        (run_folder.WRITTEN, "checkpoint-8/a model/a", "resume", "has checkpoint-8, model, but no complete"),
    ],
)  # fmt: skip
def test_runs_that_may_begin_or_continue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: str, trained: str, options: str, refused: str
) -> None:
    monkeypatch.chdir(tmp_path)
    write_trained(tmp_path / "run", trained)
    with pytest.raises(InputError, match=refused) if refused else contextlib.nullcontext():
        run_folder.refuse_state("run", status, resume=options == "resume", overwrite=options == "overwrite")


def test_a_checkpoint_that_was_cut_short_is_passed_over(tmp_path: Path) -> None:
    assert last_checkpoint(str(tmp_path)) is None
    for number, state in ((5, "{}"), (10, "{}"), (15, '{"global'), (20, None)):
        folder = tmp_path / f"checkpoint-{number}"
        (folder / "global_step1").mkdir(parents=True)
        if state is not None:
            (folder / "trainer_state.json").write_text(state)
    assert last_checkpoint(str(tmp_path)) == str(tmp_path / "checkpoint-10")


def test_the_run_file_is_written_whole(tmp_path: Path) -> None:
    write(tmp_path, "running", note="x")
    assert run_folder.read_run(tmp_path) == {**RUN, "status": "running", "note": "x"}
    assert [path.name for path in tmp_path.iterdir()] == [run_folder.RUN_FILE]
    assert json.loads((tmp_path / run_folder.RUN_FILE).read_text())["note"] == "x"
