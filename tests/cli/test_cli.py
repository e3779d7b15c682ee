"""The command line as a user meets it: output, exit codes, and one clear line for every mistake."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from hf_memkit.cli import main


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Every test starts in an empty folder and must leave nothing in it unless it has a marker."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


@pytest.mark.parametrize("variant", ["infinity", "auto"])
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
    result = shown["prediction"]
    assert result["confidence"]["rests_on"].endswith("stored with the recipe") and result["verdict"] == "fits"
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
    order = ("FITS", "Variant offload", "Peak allocated", "Bytes by formula", "arguments.fp16 = true")
    places = [text.index(each) for each in order]
    assert places == sorted(places) and "not resident" in text and "stored with the recipe" in text
    tables = lines[next(i for i, line in enumerate(lines) if line.startswith("Bytes by formula")) :]
    assert max(map(len, tables)) <= 80
    assert main([*asked, "--short"]) == 0
    short = capsys.readouterr().out.splitlines()
    assert short[0] == lines[0] and len(short) <= 24 and max(map(len, short)) <= 80


@pytest.mark.slow
def test_what_memory_does_not_decide_stands_above_the_verdict(
    capsys: pytest.CaptureFixture[str], empty_folder: Path
) -> None:
    config = {"model_type": "gpt2", "n_embd": 32, "n_head": 2, "n_layer": 2, "vocab_size": 100, "n_positions": 64}
    (empty_folder / "config.json").write_text(json.dumps(config))
    asked = ["recipe", "gpt2-on-16gb", "--dry-run", "--gpu", "T4", "--ram", "64GB", "--short", "--model", "./"]
    assert main([*asked, "--sequence-length", "64", "--variant", "resident"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("PROBLEM: needs a GPU that computes in bf16")
    assert [line for line in lines if line.startswith("PROBLEM")] == lines[:1], "memory is the verdict's"
    assert any(line.startswith("FITS: ") for line in lines)


@pytest.mark.parametrize(
    "verb",
    [
        pytest.param("recipe gpt2-on-16gb --variant resident --dry-run", marks=pytest.mark.slow),
        pytest.param("predict --recipe gpt2-on-16gb --variant resident", marks=pytest.mark.slow),
        "predict --preset resident",
    ],
)
def test_the_verdict_replaces_shortages_of_memory(
    verb: str, capsys: pytest.CaptureFixture[str], empty_folder: Path
) -> None:
    """1.9 GiB of weights, gradients and AdamW's states: too much for the GPU without any activation."""
    config = {"model_type": "gpt2", "n_embd": 1024, "n_head": 2, "n_layer": 2, "vocab_size": 100_000}
    (empty_folder / "config.json").write_text(json.dumps(config))
    main([*verb.split(), "--model", "./", "--gpu", "1GB", "--ram", "64GB", "--sequence-length", "64", "--short"])
    printed = capsys.readouterr()
    assert printed.out.startswith("DOES NOT FIT: ")
    assert "without activations" not in " ".join((printed.out + printed.err).split())


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("memkit ")
