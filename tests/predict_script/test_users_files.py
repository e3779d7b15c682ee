"""A prediction loses no file of the user's: every way to write, replace, move and remove, in real scripts."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hf_memkit.prediction.child.script import file_guards
from hf_memkit.prediction.traced_training import Outcome
from tests.predict_script.conftest import Predict
from tests.predict_script.test_command import TINY

pytestmark = pytest.mark.timeout(120)

TRAIN = "\ntrainer(tiny()).train()\n"

Tree = dict[str, bytes | None]
"""Path below a folder → the file's content; None: a folder."""


def tree(folder: Path) -> Tree:
    found = {str(path.relative_to(folder)): path for path in folder.rglob("*")}
    return {
        name: str(path.readlink()).encode() if path.is_symlink() else path.read_bytes() if path.is_file() else None
        for name, path in found.items()
        if name != "train.py"
    }


def database(folder: Path) -> bytes:
    with sqlite3.connect(folder / "database") as connection:
        connection.execute("CREATE TABLE t (a)")
    return (folder / "database").read_bytes()


WRITES = {
    "open": 'open(OLD, "w").close()',
    "append": 'open(OLD, "a").write("more")',
    "update": 'open(OLD, "r+").write("more")',
    "path": 'Path(OLD).write_text("new")',
    "descriptor": "os.close(os.open(OLD, os.O_WRONLY | os.O_TRUNC))",
    "descriptor in a folder": 'os.close(os.open("../" + OLD, os.O_WRONLY | os.O_TRUNC, dir_fd=os.open("a", 0)))',
    "truncate": "os.truncate(OLD, 0)",
    "copy": "shutil.copy(NEW, OLD)",
    "copyfile": "shutil.copyfile(NEW, OLD)",
    "replace": "os.replace(NEW, OLD)",
    "rename": 'os.rename(NEW, OLD, dst_dir_fd=os.open(".", os.O_RDONLY))',
    "move": "shutil.move(NEW, OLD)",
    "link": 'os.link(OLD, "linked"); open("linked", "w").close()',
    "through a link": 'os.symlink(OLD, "symbolic"); open("symbolic", "w").close()',
    "touched": 'Path(OLD).touch(); os.chmod(OLD, 0o600); open(OLD, "w").close()',
    "fork": 'if os.fork() == 0:\n    open(OLD, "w").close()\n    os._exit(0)\nos.wait()',
    "torch": 'torch.save({"a": 1}, OLD)',
    "safetensors": 'save_file({"a": torch.ones(1)}, OLD)',
    "tokenizers": "Tokenizer(WordLevel({'a': 0}, 'a')).save(OLD)",
    "parquet": "import pyarrow, pyarrow.parquet; pyarrow.parquet.write_table(pyarrow.table({'a': [1]}), OLD)",
    "pandas": "import pandas; pandas.DataFrame({'a': [1]}).to_parquet(OLD)",
    "sqlite": 'with sqlite3.connect(OLD) as database: database.execute("INSERT INTO t VALUES (1)")',
}
"""How a script changes the file OLD; NEW is its own file."""

HEAD = """
import os, shutil, sqlite3
from pathlib import Path
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
"""


Run = Callable[..., tuple[Outcome, Tree]]


@pytest.fixture
def run(predict: Predict, tmp_path: Path) -> Run:
    """`run(files, code)` writes the files and predicts a script with this code above its Trainer; returns its outcome,
    and the copies of older files, as a tree of the folder."""

    def run(files: dict[str, str | bytes | None], code: str, **options: Any) -> tuple[Outcome, Tree]:
        (work := tmp_path / "work").mkdir()
        for name, content in files.items():
            path = work / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if content is None:
                path.mkdir()
            else:
                path.write_bytes(content.encode() if isinstance(content, str) else content)
        cache = tmp_path / "cache"
        environment = {"XDG_CACHE_HOME": str(cache)}
        outcome = predict(f"{HEAD}os.chdir('work')\n{TINY}\n{code}\n{TRAIN}", environment=environment, **options)
        predictions = list((cache / "memkit" / "overwritten").glob("*"))
        assert len(predictions) <= 1
        return outcome, tree(Path(f"{predictions[0]}{work}")) if predictions else {}

    return run


def test_what_a_script_writes_over_is_copied_once(run: Run, tmp_path: Path) -> None:
    """Would notice: results of an earlier run that a prediction empties, and nothing that says where they are."""
    files: dict[str, str | bytes | None] = {f"old-{number}": f"earlier {way}" for number, way in enumerate(WRITES)}
    files[f"old-{list(WRITES).index('sqlite')}"] = database(tmp_path)
    code = "os.mkdir('a')\n"
    for number, line in enumerate(WRITES.values()):
        code += f"OLD, NEW = 'old-{number}', 'new-{number}'\nopen(NEW, 'w').write('new')\n{line}\n"
        code += "open(OLD, 'a').write('more')\n"
    found, copied = run(files, code)
    assert found.training, found
    after = tree(tmp_path / "work")
    before = {name: content.encode() if isinstance(content, str) else content for name, content in files.items()}
    assert [way for number, way in enumerate(WRITES) if after[f"old-{number}"] == before[f"old-{number}"]] == []
    names = {way: "linked" if way == "link" else f"old-{number}" for number, way in enumerate(WRITES)}
    assert copied == {name: before[f"old-{number}"] for number, name in enumerate(names.values())}
    for way, name in names.items():
        notices = [line for line in found.training.notices if f"changes {name};" in line]
        assert len(notices) == (way != "fork"), (way, found.training.notices)
        assert all(line.startswith("train.py, line ") and line.endswith(name) for line in notices)


REMOVES = {
    "remove": ("FILE", "os.remove(OLD)"),
    "unlink in a folder": ("FILE", 'os.unlink("FILE", dir_fd=os.open(Path(OLD).parent, os.O_RDONLY))'),
    "Path.unlink": ("FILE", "Path(OLD).unlink()"),
    "rmdir": ("EMPTY", "os.rmdir(OLD); os.makedirs(OLD)"),
    "Path.rmdir": ("EMPTY", "Path(OLD).rmdir(); Path(OLD).mkdir()"),
    "removedirs": ("EMPTY", "os.removedirs(OLD)"),
    "rmtree": ("FOLDER", "shutil.rmtree(OLD); os.makedirs(f'{OLD}/inner')"),
    "rewrite": ("FILE", "os.rename(OLD, NEW); open(OLD, 'w').write(open(NEW).read())"),
    "link": ("FILE", "os.remove(OLD); os.link(OTHER, OLD)"),
    "symbolic link": ("FILE", "os.remove(OLD); Path(OLD).symlink_to('OTHER')"),
    "rename a changed folder": ("FOLDER", "Path(OLD, 'model').write_text('earlier'); os.rename(OLD, NEW)"),
    "rmtree in a folder": ("FOLDER", 'shutil.rmtree("FOLDER", dir_fd=os.open(Path(OLD).parent, os.O_RDONLY))'),
    "file by file": ("FOLDER", "[path.unlink() for path in Path(OLD).iterdir()]; os.rmdir(OLD)"),
    "rename": ("FILE", "os.rename(OLD, NEW); assert open(NEW).read() == 'earlier'"),
    "rename twice": ("FILE", "os.rename(OLD, NEW); os.rename(NEW, f'{NEW}-2'); os.rename(OLD, NEW)"),
    "rename a folder": ("FOLDER", "os.rename(OLD, NEW); assert set(os.listdir(NEW)) == {'model', 'inner'}"),
    "Path.rename": ("FILE", "assert Path(OLD).rename(NEW).read_text() == 'earlier'"),
    "renames": ("FILE", "os.renames(OLD, NEW)"),
    "replace": ("FILE", "os.replace(OLD, OTHER); assert open(OTHER).read() == 'earlier'"),
    "remove a moved folder": ("FOLDER", "os.rename(OLD, NEW); shutil.rmtree(NEW)"),
    "move": ("FOLDER", "shutil.move(OLD, NEW); Path(NEW, 'model').read_text()"),
    "move into a folder": ("FILE", "os.mkdir(NEW); shutil.move(OLD, NEW); shutil.rmtree(NEW)"),
    "save_pretrained": ("MODEL", "model = tiny(); model.save_pretrained(OLD)"),
}
"""How a script removes or moves the file or folder OLD."""


def test_what_a_script_removes_or_moves_stays(run: Run, tmp_path: Path) -> None:
    """Would notice: a checkpoint or model of an earlier run that a prediction removes, because the run would."""
    files: dict[str, str | bytes | None] = {}
    code = "import tempfile\nshutil.rmtree(tempfile.gettempdir())\n"
    for number, (kind, line) in enumerate(REMOVES.values()):
        files |= {f"{number}/OTHER": "other"}
        files |= {
            "FILE": {f"{number}/FILE": "earlier"}, "EMPTY": {f"{number}/EMPTY": None},
            "FOLDER": {f"{number}/FOLDER/model": "earlier", f"{number}/FOLDER/inner": None},
            "MODEL": {f"{number}/MODEL/model-00001-of-00002.safetensors": "earlier"},
        }[kind]  # fmt: skip
        code += f"OLD, NEW, OTHER = '{number}/{kind}', '{number}/NEW', '{number}/OTHER'\n{line}\n"
    before: Tree = {name: content and str(content).encode() for name, content in files.items()}
    found, copied = run(files, code)
    assert found.training, found
    after = {name: content for name, content in tree(tmp_path / "work").items() if name in before or "NEW" in name}
    numbers = {way: number for number, way in enumerate(REMOVES)}
    assert after == before | {f"{numbers['replace']}/OTHER": b"earlier"}
    changed = {f"{numbers['rename a changed folder']}/FOLDER/model", f"{numbers['rewrite']}/FILE"}
    changed.add(f"{numbers['replace']}/OTHER")
    assert {name for name, content in copied.items() if content} == changed
    for number, way in enumerate(REMOVES):
        assert any(f" {number}/" in line for line in found.training.notices), (way, found.training.notices)
        assert not any(f" {number}:" in line for line in found.training.notices), "of a folder above it"


@pytest.mark.parametrize("move", ["os.rename('new', 'data')", "shutil.move('new', 'data')"])
def test_a_folder_that_would_take_the_name_of_a_kept_one_stops_the_script(run: Run, tmp_path: Path, move: str) -> None:
    """Would notice: a script that goes on with the old data."""
    code = f"os.mkdir('new'); Path('new/rows').write_text('new'); shutil.rmtree('data'); {move}"
    found, _ = run({"data/rows": "earlier"}, code)
    assert found.failed.type == "WouldLoseFile" and found.failed.place.startswith("train.py, line ")
    assert tree(tmp_path / "work")["data/rows"] == b"earlier" and "data/new" not in tree(tmp_path / "work")


def test_the_copies_of_the_newest_prediction_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_guards, "_ALL_COPIES_BYTES", 100)
    for name, size in (("1", 60), ("2", 60), ("3", 101)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("x" * size)
    file_guards._make_room(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["3"]


def test_what_a_script_makes_is_its_own(run: Run, tmp_path: Path) -> None:
    """Would notice: notices and copies of a script's own files, and of those in caches of libraries."""
    code = """
for name in ("a", ".cache/a"):
    for mode in "wwa":
        open(name, mode).write(name)
os.rename("a", "b"); os.replace("b", "c"); os.remove("c")
os.mkdir("folder"); Path("folder/a").touch(); shutil.rmtree("folder")
open("empty", "w").close()
assert open("read").read() == "earlier"
sqlite3.connect("read.db").execute("SELECT * FROM t").fetchall()
"""
    files = {".cache/a": "earlier", "empty": "", "read": "earlier", "read.db": database(tmp_path)}
    found, copied = run(files, code)
    assert found.training and not copied and not found.training.notices
    assert tree(tmp_path / "work").keys() == {".cache", ".cache/a", "empty", "read", "read.db"}


@pytest.mark.parametrize(("size", "free"), [(file_guards.MAX_BYTES + 1, None), (10, 9)], ids=["large", "no space"])
def test_a_file_without_room_for_a_copy_stops_the_script(
    run: Run, tmp_path: Path, size: int, free: int | None
) -> None:
    """Would notice: a file that is emptied although it is not copied."""
    with open(tmp_path / "large", "wb") as file:  # noqa: PTH123
        file.truncate(size)
    code = "if FREE: shutil.disk_usage = lambda folder: __import__('types').SimpleNamespace(free=FREE)\n"
    code += "open('small', 'w').close()\n" * (free is None) + "open('../large', 'a')"
    found, copied = run({"small": "earlier"}, code.replace("FREE", str(free)))
    assert found.failed.type == "WouldLoseFile" and found.failed.place.startswith("train.py, line ")
    assert str(tmp_path / "large") in found.failed.message
    assert (tmp_path / "large").stat().st_size == size and copied.keys() == ({"small"} if free is None else set())


def test_made_up_values_reach_no_file(run: Run, tmp_path: Path) -> None:
    """Would notice: after an evaluation, a file that is updated and seems not to exist; a NaN in a real file."""
    code = """
made = trainer(tiny(), eval_strategy="no")
made.evaluate(rows[:2])
with open("update", "r+") as file:
    assert file.read() == "earlier"
    file.write(" NaN")
with Path("append").open("a") as file:
    file.write(" NaN")
for name in ("update", "append"):
    assert Path(name).read_text() == open(name).read() == "earlier NaN"
Path("new.tmp").write_text("NaN")
os.replace("new.tmp", "replaced")
assert Path("replaced").read_text() == "NaN"
for mode in ("r+", "x"):
    try:
        open("missing" if mode == "r+" else "update.2", mode)
        raise AssertionError
    except (FileNotFoundError, FileExistsError):
        pass
Path("new").write_text("NaN")
os.remove("new")
"""
    files = {"update": "earlier", "append": "earlier", "replaced": "earlier", "update.2": "earlier"}
    found, copied = run(files, code)
    assert found.training, found
    assert tree(tmp_path / "work") == {name: content.encode() for name, content in files.items()} and not copied


def test_programs_that_the_script_starts_are_printed(run: Run, tmp_path: Path) -> None:
    code = """
import platform, subprocess
os.system("MY_API_KEY=S3cr3tS3cr3t rm -f old")
subprocess.run(["sh", "-c", "true"]); subprocess.run(["touch", "a b"])
os.popen("true").close()
platform.processor()
"""
    found, _ = run({"old": "earlier"}, code)
    assert [line.split(": starts ")[1].split(";")[0] for line in found.training.notices] == [
        "'MY_API_KEY=$MY_API_KEY rm -f old'", "'true'", '"touch \'a b\'"', "'true'"
    ]  # fmt: skip
    assert not (tmp_path / "work" / "old").exists()


def test_nothing_outside_the_output_folder_is_removed(run: Run, tmp_path: Path) -> None:
    """Would notice: another folder's file that goes, because a name has a line break or leads through a link."""
    code = r"""
made = Trainer(tiny(), TrainingArguments("out\rbad\nworse", report_to="none"), train_dataset=rows)
Path("out\rbad\nworse/note").write_text("new")
os.mkdir("out\rbad\nworse/moved"); Path("out\rbad\nworse/moved/note").write_text("new")
os.rename("out\rbad\nworse/moved", "final"); os.symlink("../bad", "out\rbad\nworse/moved")
"""
    found, _ = run({"bad/note": "earlier", "worse/note": "earlier"}, code)
    assert found.training, found
    left = {"bad": None, "bad/note": b"earlier", "worse": None, "worse/note": b"earlier", "final": None}
    assert tree(tmp_path / "work") == {**left, "final/note": b"new"}
