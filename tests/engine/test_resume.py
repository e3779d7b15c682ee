"""Runs that are stopped: by kill -9, by Ctrl-C; and what `--resume` makes of them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hf_memkit.measuring.memory.records import read_records, steps
from tests.conftest import ROOT, Quick

STEPS = 12


def command(text_file: Path, variant: str) -> list[str]:
    """With a checkpoint every 4 steps."""
    arguments = ["recipe", "gpt2-on-16gb", "--variant", variant, "--output", "run", "--data", str(text_file)]
    return [*arguments, "--max-steps", str(STEPS), "--set", "save_steps=4", "--set", "logging_steps=1"]


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    """A run in the background."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    log = (folder / "log.txt").open("w")
    memkit = [sys.executable, "-m", "hf_memkit", *arguments]
    return subprocess.Popen(memkit, cwd=folder, env=environment, stdout=log, stderr=log, text=True)


def wait_for(process: subprocess.Popen[str], folder: Path, checkpoint: int) -> None:
    """Until that checkpoint is there and a step or two are made after it."""
    records = folder / "run" / "memory-rank0.jsonl"
    while not (records.exists() and any(step["step"] > checkpoint for step in steps(read_records(records)))):
        assert process.poll() is None, (folder / "log.txt").read_text()[-3000:]
        time.sleep(0.05)


def losses(folder: Path) -> dict[int, float]:
    """Training loss by step, from the last checkpoint's own log."""
    checkpoint = max(folder.glob("run/checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
    history = json.loads((checkpoint / "trainer_state.json").read_text())["log_history"]
    return {entry["step"]: entry["loss"] for entry in history if "loss" in entry}


@pytest.mark.exhaustive
@pytest.mark.parametrize("variant", ["resident", pytest.param("infinity", marks=pytest.mark.operators)])
def test_a_killed_run_leaves_whole_records_and_goes_on(
    tmp_path: Path, text_file: Path, quick_memkit: Quick, variant: str
) -> None:
    process = start(tmp_path, *command(text_file, variant))
    wait_for(process, tmp_path, checkpoint=6)
    process.send_signal(signal.SIGKILL)
    process.wait()
    path = tmp_path / "run" / "memory-rank0.jsonl"
    lines = path.read_text().split("\n")
    assert all(json.loads(line) for line in lines[:-1])
    assert json.loads((tmp_path / "run" / "memkit-run.json").read_text())["status"] == "running"

    refused = quick_memkit("recipe", "gpt2-on-16gb", "--variant", variant, "--output", "run", "--data", str(text_file))
    assert refused.returncode == 2 and "holds an unfinished run" in refused.stderr

    resumed = quick_memkit("recipe", "gpt2-on-16gb", "--resume", "--output", "run")
    assert resumed.returncode == 0, resumed.stdout[-2000:] + resumed.stderr[-3000:]
    assert "Continuing from run/checkpoint-" in resumed.stdout
    content = json.loads((tmp_path / "run" / "memkit-run.json").read_text())
    assert content["status"] == "finished" and content["result"]["steps"] == STEPS
    records = read_records(path)
    assert [step["step"] for step in steps(records)] == list(range(1, STEPS + 1))
    assert [record["kind"] for record in records if record["kind"] in ("run", "end")] == ["run", "run", "end"]

    again = quick_memkit("recipe", "gpt2-on-16gb", "--resume", "--output", "run")
    assert again.returncode == 2 and "is finished" in again.stderr

    # The same run without the kill makes the same losses: nothing was lost or repeated.
    whole = tmp_path / "whole"
    whole.mkdir()
    ran = quick_memkit(*command(text_file, variant), cwd=whole)
    assert ran.returncode == 0, ran.output[-3000:]
    assert losses(tmp_path) == pytest.approx(losses(whole), rel=0.02)


@pytest.mark.slow
def test_ctrl_c_finishes_the_step_and_leaves_a_checkpoint(
    tmp_path: Path, text_file: Path, quick_memkit: Quick
) -> None:
    """Of the folder that a recipe exports: the same function runs both."""
    exported = quick_memkit(*(word.replace("--output", "--export") for word in command(text_file, "lora")))
    assert exported.returncode == 0, exported.stderr
    process = start(tmp_path, "run", "run")
    wait_for(process, tmp_path, checkpoint=5)
    process.send_signal(signal.SIGINT)
    assert process.wait() == 128 + signal.SIGINT
    text = (tmp_path / "log.txt").read_text()
    assert "Stopping after this step" in text and "memkit run run --resume" in text
    records = read_records(tmp_path / "run" / "memory-rank0.jsonl")
    assert records[-1]["kind"] == "end" and records[-1]["status"] == "interrupted"
    stopped_at = records[-1]["steps"]
    assert (tmp_path / "run" / f"checkpoint-{stopped_at}" / "trainer_state.json").exists()
    assert json.loads((tmp_path / "run" / "memkit-run.json").read_text())["status"] == "interrupted"
    assert not (tmp_path / "run" / "model").exists(), "what stands below train() was run"

    refused = quick_memkit("run", "run")
    assert refused.returncode == 2 and "has an unfinished run. Add --resume" in refused.stderr
    text = text_file.read_text()
    text_file.write_text(text * 2)
    changed = quick_memkit("run", "run", "--resume")
    assert changed.returncode == 1 and "Restore the data, or start again" in changed.stderr
    assert json.loads((tmp_path / "run" / "memkit-run.json").read_text())["status"] == "interrupted"
    text_file.write_text(text)
    resumed = quick_memkit("run", "run", "--resume", "--json")
    assert resumed.returncode == 0, resumed.stderr[-3000:]
    content = json.loads(resumed.stdout)
    assert content == json.loads((tmp_path / "run" / "memkit-run.json").read_text())
    assert content["status"] == "finished" and content["result"]["steps"] == STEPS
    assert [step["step"] for step in steps(read_records(tmp_path / "run" / "memory-rank0.jsonl"))] == list(
        range(1, STEPS + 1)
    )
