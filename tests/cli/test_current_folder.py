"""memkit runs no file of the current folder before the user's own program; that one imports as under Python."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hf_memkit.common.boot import BOOT

PLANTED = (
    "accelerate", "argparse", "difflib", "json", "pydantic", "runpy", "shutil", "sitecustomize", "textwrap", "torch",
    "transformers", "typer", "typing", "yaml",
)  # fmt: skip
WAYS = {
    "command": [str(Path(sys.executable).parent / "memkit")],
    "module": [sys.executable, "-m", "hf_memkit"],
    "another Python": [sys.executable, BOOT],
}
VERBS = (
    "explain train.log", "ds list", "preset list", "report out", "recipe", "doctor", "plan --help", "predict --help",
    "run no.py",
)  # fmt: skip


@pytest.fixture
def planted(tmp_path: Path) -> Path:
    """A folder with files named like libraries, each of which leaves a trace when it runs; and its user's files."""
    for name in PLANTED:
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'ran-')!r} + {name!r}, 'w')\n")
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 3}}')
    (tmp_path / "train.log").write_text("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.")
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "neighbour.py").write_text("is_imported = True\n")
    return tmp_path


def started(folder: Path, command: list[str], python_path: str | None = None) -> subprocess.CompletedProcess[str]:
    """The command, run in this folder without an active environment."""
    given = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    variables = given if python_path is None else {**given, "PYTHONPATH": python_path}
    return subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, timeout=300)


def ran(folder: Path) -> set[str]:
    return {path.name.removeprefix("ran-") for path in folder.glob("ran-*")}


@pytest.mark.parametrize("way", ["command", *(pytest.param(way, marks=pytest.mark.slow) for way in list(WAYS)[1:])])
def test_a_check_runs_no_file_of_the_folder(planted: Path, way: str) -> None:
    """With an empty entry of PYTHONPATH Python itself imports `sitecustomize`."""
    check = [*WAYS[way], "check", "ds.json"]
    assert "ds.json" in started(planted, check).stdout
    assert ran(planted) == set()
    assert "ds.json" in started(planted, check, ":/nowhere").stdout
    assert ran(planted) == {"sitecustomize"}


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_no_verb_runs_a_file_of_the_folder(planted: Path, way: str) -> None:
    for verb in VERBS:
        completed = started(planted, [*WAYS[way], *verb.split()])
        assert "Traceback" not in completed.stderr and completed.stdout + completed.stderr, verb
        assert ran(planted) == set(), verb


@pytest.mark.parametrize(
    "python_path", [None, *(pytest.param(path, marks=pytest.mark.slow) for path in (":", "/nowhere:"))]
)
def test_a_script_imports_as_under_python(planted: Path, python_path: str | None) -> None:
    """`memkit run` gives it the same `sys.path`, with its own folder first."""
    (planted / "scripts" / "paths.py").write_text("import neighbour, sys\nprint(sys.path)\n")
    commands = [[sys.executable], *([*way, "run"] for way in WAYS.values())]
    paths = [started(planted, [*each, "scripts/paths.py"], python_path).stdout for each in commands]
    assert paths[0].startswith(f"['{planted}/scripts', ") and set(paths) == {paths[0]}


@pytest.mark.slow
def test_a_prediction_runs_no_file_of_the_folder(planted: Path) -> None:
    """`accelerate.py` and `torch.py` lie in the current folder, not in the script's; with `-m` they would be first."""
    (planted / "scripts" / "train.py").write_text(
        "import neighbour\nfrom transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments\n"
        "model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=32, n_head=2, vocab_size=64))\n"
        "rows = [{'input_ids': [1] * 8, 'labels': [1] * 8}] * 8\n"
        "Trainer(model, TrainingArguments('out', report_to=[], max_steps=2), train_dataset=rows).train()\n"
    )
    completed = started(planted, [*WAYS["command"], "predict", "scripts/train.py", "--gpu", "T4"])
    assert completed.returncode == 0, completed.stderr
    assert ran(planted) == set()
