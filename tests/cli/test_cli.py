"""The command line as a user meets it: output, exit codes, and one clear line for every mistake."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from hf_memkit.cli import main


def fails(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The error lines of a command that must fail for wrong input."""
    assert main(["recipe", *arguments]) == 2
    captured = capsys.readouterr()
    lines = captured.err.strip().splitlines()
    assert lines and all(line.startswith("memkit: error: ") for line in lines)
    return captured.err


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Every test starts in an empty folder and must leave nothing in it unless it says so."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


@pytest.mark.parametrize("variant", ["resident", "offload", "infinity", "lora", "auto"])
def test_a_dry_run_prints_a_complete_setup(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, empty_folder: Path, variant: str
) -> None:
    empty = shutil.disk_usage(empty_folder)._replace(free=100 * 2**30)  # infinity wants 27 GiB
    monkeypatch.setattr(shutil, "disk_usage", lambda path: empty)
    options = ["--dry-run", "--json", "--gpu-memory", "16GB", "--ram", "64GB", "--variant", variant]
    code = main(["recipe", "gpt2-on-16gb", *options])
    assert code == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["variant"] == (variant if variant != "auto" else "resident")
    settings = shown["setup"]["settings"]
    assert all(set(s) == {"key", "value", "reason"} and s["reason"] for s in settings)
    assert {"arguments.max_steps", "model.dtype", "data.sequence_length"} <= {s["key"] for s in settings}
    assert set(shown["setup"]["ledger"]) == {"device", "host", "pinned", "disk"}
    found = shown["prediction"]
    assert found["confidence"]["rests_on"].endswith("stored with the recipe") and found["verdict"] == "fits"
    rows = shown["setup"]["ledger"]["device"]
    assert not {row["category"] for row in rows} & {"activations", "loss"}, "the prediction has them"
    assert not shown["rehearsal"]
    assert list(empty_folder.iterdir()) == []


def test_a_dry_run_for_people_is_the_answer_and_then_the_reasons(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    asked = ["recipe", "gpt2-on-16gb", "--dry-run", "--gpu", "T4", "--ram", "64GB"]
    assert main(asked) == 0
    lines = capsys.readouterr().out.splitlines()
    text = " ".join(" ".join(lines).split())
    assert lines[0].startswith("FITS: ")
    order = (
        "FITS",
        "Variant offload",
        "Peak allocated",
        "Bytes by formula",
        "arguments.fp16 = true",
    )
    places = [text.index(each) for each in order]
    assert places == sorted(places) and "not resident" in text and "stored with the recipe" in text
    tables = lines[next(i for i, line in enumerate(lines) if line.startswith("Bytes by formula")) :]
    assert max(map(len, tables)) <= 80
    assert main([*asked, "--short"]) == 0
    short = capsys.readouterr().out.splitlines()
    assert short[0] == lines[0] and len(short) <= 24 and max(map(len, short)) <= 80


def test_what_memory_does_not_decide_stands_above_the_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["recipe", "gpt2-on-16gb", "--dry-run", "--gpu", "T4", "--ram", "64GB", "--short"]
    assert main([*asked, "--variant", "resident"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("PROBLEM: needs a GPU that computes in bf16")
    assert [line for line in lines if line.startswith("PROBLEM")] == lines[:1], "memory is the verdict's"
    assert any(line.startswith("DOES NOT FIT: ") for line in lines)


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="shows what runs on a machine without a GPU")
def test_what_is_shown_is_not_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipe", "gpt2-on-16gb", "--dry-run", "--export", str(tmp_path / "job")]) == 2
    assert "--dry-run, --export: mutually exclusive" in capsys.readouterr().err
    assert not (tmp_path / "job").exists()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["gpt2-on-16g"], "did you mean 'gpt2-on-16gb'"),
        (["no/such.yaml"], "does not exist"),
        (["gpt2-on-16gb", "--variant", "ofload"], "did you mean 'offload'"),
        (["gpt2-on-16gb", "--set", "learning_rat=1"], "did you mean 'learning_rate'"),
        (["gpt2-on-16gb", "--set", "per_device_train_batch_size=5"], "Use one of 2, 4, 8"),
        (["gpt2-on-16gb", "--sequence-length", "4096"], "longer than"),
        (["gpt2-on-16gb", "--model", "./none"], "does not exist"),
        (["gpt2-on-16gb", "--no-such-option"], "no-such-option"),
        (["gpt2-on-16gb", "--short"], "--short: only with --dry-run"),
        (["--short"], "--short: no recipe named"),
        (["gpt2-on-16gb", "--resume"], "no unfinished run"),
        (["gpt2-on-16gb", "--resume", "--max-steps", "5"], "omit --max-steps"),
        (["gpt2-on-16gb", "--data", "./none.txt"], "none.txt"),
        (["gpt2-on-16gb", "--output", "/dev/null/x"], "not writable"),
    ],
)
def test_mistakes_are_told_in_one_line_and_change_nothing(
    capsys: pytest.CaptureFixture[str], empty_folder: Path, arguments: list[str], expected: str
) -> None:
    assert expected in fails(capsys, *arguments)
    assert list(empty_folder.iterdir()) == []


def test_a_broken_recipe_file_is_told_line_by_line(capsys: pytest.CaptureFixture[str], empty_folder: Path) -> None:
    (empty_folder / "mine.yaml").write_text("summary: x\nmodel: 3\nwhat: 1\n")
    told = fails(capsys, "mine.yaml")
    assert "mine.yaml: what: unknown key" in told and "mine.yaml: variants: missing" in told and "model: 3" in told


def test_a_folder_that_cannot_be_written_to(capsys: pytest.CaptureFixture[str], empty_folder: Path) -> None:
    if os.geteuid() == 0:
        target = "/proc/memkit"  # root may write anywhere but here
    else:
        (empty_folder / "locked").mkdir(mode=0o500)
        target = "locked/run"
    assert main(["recipe", "gpt2-on-16gb", "--output", target]) == 2
    assert "not writable" in capsys.readouterr().err


def test_the_version_and_a_missing_verb(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("memkit ")
    assert main(["recip"]) == 2
    assert "memkit: error: No such command 'recip'" in capsys.readouterr().err
