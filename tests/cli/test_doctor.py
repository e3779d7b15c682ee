"""`memkit doctor` on this machine: what it finds is so, and what is missing names the command that mends it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, get_args

import pytest
from packaging.requirements import Requirement

from hf_memkit.catalog.library_versions import OLDEST
from hf_memkit.checks.doctor import Status, gpu, host, operators, software
from hf_memkit.cli import main
from hf_memkit.deepspeed import ops

Lines = dict[str, dict[str, Any]]


def run_doctor(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, Lines]:
    """(exit code, lines by name) of the real command."""
    code = main(["doctor", "--json", *arguments])
    lines = json.loads(capsys.readouterr().out)
    assert all(
        set(line) == {"name", "status", "found", "fix"} and line["status"] in get_args(Status) for line in lines
    )
    assert all(line["fix"] for line in lines if line["status"] != "ok"), "a line that does not say what mends it"
    return code, {line["name"]: line for line in lines}


def test_this_machine_is_well_and_nothing_is_left_on_it(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, lines = run_doctor(capsys)
    assert code == 0
    for name in ("Python", "torch", "transformers", "accelerate", "deepspeed", "memkit's own", "RAM", "folder"):
        assert lines[name]["status"] == "ok", lines[name]
    assert "HF_HUB_OFFLINE=1" in lines["huggingface.co"]["found"]
    assert "O_DIRECT" in lines["folder"]["found"] and str(tmp_path) in lines["folder"]["found"]
    assert list(tmp_path.iterdir()) == []


def test_what_is_shown_to_a_person(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "a-file").touch()
    assert main(["doctor", "--nvme-path", str(tmp_path / "a-file")]) == 0, "memkit's core does not need NVMe"
    out = capsys.readouterr().out
    assert out.startswith("memkit works on this machine\n") and len(out.splitlines()) <= 60, "more than one screen"
    line = next(line for line in out.splitlines() if "a-file" in line)
    assert line.split()[:2] == ["missing", "folder"] and "→ give another folder" in out


def test_a_missing_folder_is_one_line_with_the_command_that_makes_it(tmp_path: Path) -> None:
    folder = str(tmp_path / "nvme")
    lines = [line for line in host.checks(folder) if line.name in ("folder", "speed")]
    assert [(line.name, line.status, line.fix) for line in lines] == [("folder", "missing", f"mkdir -p {folder}")]


def test_locks_of_killed_builds_are_named_and_not_removed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    mine, others = tmp_path / "py311_cpu" / "async_io" / "lock", tmp_path / "fused_adam" / "lock"
    home = tmp_path / "home" / ".cache" / "torch_extensions" / "py311_cu130" / "cpu_adam" / "lock"
    held = tmp_path / "held" / "lock"
    for lock in (mine, others, home, held):
        lock.parent.mkdir(parents=True)
        lock.touch()
    with held.open():
        fixes = [line.fix for line in operators.checks() if line.name == "stale build lock"]
    assert sorted(fixes) == sorted(f"rm {lock}" for lock in (mine, others, home))
    assert mine.exists() and others.exists() and home.exists()


def test_tools_that_are_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    lines = {line.name: line for line in operators.checks()}
    assert lines["to build them"].status == "missing" and "apt-get install g++" in lines["to build them"].fix
    assert lines["cpu_adam"].status == "missing" and "cannot be built" in lines["cpu_adam"].finding
    folder = ops.extensions_folder(cpu=True)
    for name in ("deepspeed_shm_comm", "cpu_adam", "pin_memory", "async_io"):
        (folder / name).mkdir(parents=True)
        (folder / name / f"{name}.so").touch()
    built = {line.name: line for line in operators.checks()}
    if "deepspeed_shm_comm" in built:  # without a GPU: with one the operators lie elsewhere
        assert built["to build them"].status == "warning" and built["cpu_adam"].status == "ok"


@pytest.mark.parametrize(
    ("requirement", "result"), [("torch<1", "memkit supports <1"), ("no-such-package>=2", "not installed")]
)
def test_a_package_that_memkit_cannot_do_without(requirement: str, result: str) -> None:
    line = software._package(Requirement(requirement))
    assert line.status == "missing" and line.core and result in line.finding
    assert line.fix == f'pip install "{requirement}"'


def test_what_is_needed_is_read_from_the_project_itself() -> None:
    python, trains, own = software._requirements()
    assert str(python) == ">=3.11"
    assert trains.keys() >= {"torch", "transformers", "deepspeed"} and "bitsandbytes" not in trains
    assert {each.name for each in own} >= {"rich", "typer"} and not {each.name for each in own} & trains.keys()
    for name, oldest in OLDEST.items():
        assert f">={oldest}" in str(trains[name].specifier), "pyproject.toml and library_versions.py say the same"


def test_an_allocator_setting_of_the_users_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:512")
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True,garbage_collection_threshold:0.8")
    lines = {line.name: line for line in gpu.checks()}
    assert "no effect: torch reads PYTORCH_CUDA_ALLOC_CONF first" in lines["PYTORCH_ALLOC_CONF"].finding
    assert lines["PYTORCH_CUDA_ALLOC_CONF"].fix == "unset PYTORCH_CUDA_ALLOC_CONF"
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF")
    (line,) = (line for line in gpu.checks() if line.name == "PYTORCH_ALLOC_CONF")
    assert line.status == "warning" and "garbage_collection_threshold: expandable segments are" in line.finding
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    (line,) = (line for line in gpu.checks() if line.name == "PYTORCH_ALLOC_CONF")
    assert line.status == "ok"


def test_ram_is_what_the_system_says() -> None:
    shown = {line.name: line.finding for line in host.checks(None)}
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    assert f"{total:.0f}" in shown["RAM"] or f"{total:.2f}" in shown["RAM"]
