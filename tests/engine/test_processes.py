"""Several real processes on the CPU: started, stopped, resumed under another launcher, and one of them killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from hf_memkit.measuring.memory.records import read_records, steps
from tests.conftest import ROOT, Memkit
from tests.engine.test_variants import saved_model_loss

STEPS = 8


def start(folder: Path, text_file: Path, variant: str, *settings: str) -> subprocess.Popen[str]:
    """`memkit recipe --gpus 2` in the background."""
    command = ["recipe", "gpt2-on-16gb", "--gpus", "2", "--variant", variant, "--output", "run"]
    return started(folder, *command, "--data", str(text_file), *settings)


def started(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "hf_memkit", *arguments]
    log = (folder / "log.txt").open("w")
    return subprocess.Popen(command, cwd=folder, env=environment(), stdout=log, stderr=log, text=True)


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "COLUMNS": "200"}


def records(folder: Path, rank: int) -> list[dict[str, Any]]:
    path = folder / "run" / f"memory-rank{rank}.jsonl"
    return read_records(path) if path.exists() else []


def wait_for_step(process: subprocess.Popen[str], folder: Path, step: int) -> None:
    """Until both ranks have made that step."""
    while not all(any(made["step"] >= step for made in steps(records(folder, rank))) for rank in (0, 1)):
        assert process.poll() is None, (folder / "log.txt").read_text()[-3000:]
        time.sleep(0.05)


def children(process: subprocess.Popen[str]) -> dict[int, psutil.Process]:
    """The ranks that the launching process has started."""
    return {int(child.environ()["RANK"]): child for child in psutil.Process(process.pid).children()}


def run_file(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "run" / "memkit-run.json").read_text())
    return content


@pytest.mark.exhaustive
@pytest.mark.operators
def test_two_ranks_stop_together_and_go_on_under_another_launcher(
    tmp_path: Path, text_file: Path, memkit: Memkit
) -> None:
    """ZeRO-Infinity: its weights, states, swap files and checkpoints are really split between the two."""
    process = start(tmp_path, text_file, "infinity", "--max-steps", str(STEPS), "--set", "save_steps=100")
    wait_for_step(process, tmp_path, 2)
    swapped = {path.parent.name for path in (tmp_path / "run" / "nvme").rglob("*.swp")}
    process.send_signal(signal.SIGINT)
    assert process.wait() == 128 + signal.SIGINT
    text = (tmp_path / "log.txt").read_text()
    assert "Stopping after this step" in text and "memkit run run --resume" in text and "Traceback" not in text
    assert swapped == {"rank0", "rank1"}
    assert not list((tmp_path / "run" / "nvme").rglob("*.swp"))
    ends = [records(tmp_path, rank)[-1] for rank in (0, 1)]
    assert [end["kind"] for end in ends] == ["end", "end"] and [end["status"] for end in ends] == ["interrupted"] * 2
    stopped_at = ends[0]["step"]
    assert stopped_at == ends[1]["step"] < STEPS, "one rank stopped after another step than the other"
    optimizer_files = (tmp_path / "run" / f"checkpoint-{stopped_at}").glob("global_step*/*optim_states.pt")
    assert len(list(optimizer_files)) == 2
    stopped = run_file(tmp_path)
    assert stopped["status"] == "interrupted" and stopped["gpus"] == 2 and stopped["nodes"] == 1

    refused = memkit("recipe", "gpt2-on-16gb", "--resume", "--output", "run", "--gpus", "3")
    assert refused.returncode == 2 and "for 2 processes" in refused.stderr and "--gpus 2" in refused.stderr

    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "hf_memkit", "recipe", "gpt2-on-16gb", "--resume", "--output", "run"]
    resumed = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True)
    assert resumed.returncode == 0, resumed.stdout[-2000:] + resumed.stderr[-3000:]
    assert resumed.stdout.count(f"Continuing from run/checkpoint-{stopped_at}") == 1, "only one rank speaks"
    content = run_file(tmp_path)
    assert content["status"] == "finished" and content["result"]["steps"] == STEPS
    assert content["result"]["engine"] == "DeepSpeedEngine"
    for rank in (0, 1):
        assert [step["step"] for step in steps(records(tmp_path, rank))] == list(range(1, STEPS + 1))
    assert saved_model_loss(content, tmp_path / "run" / "model", text_file) == pytest.approx(
        content["result"]["held_out_loss"], abs=0.01
    )


@pytest.mark.slow
def test_a_killed_rank_ends_the_run_with_one_line(tmp_path: Path, text_file: Path, memkit: Memkit) -> None:
    """Of a recipe's folder, which is started as `memkit recipe` starts it."""
    asked = ["recipe", "gpt2-on-16gb", "--gpus", "2", "--variant", "lora", "--data", str(text_file)]
    exported = memkit(*asked, "--max-steps", "200", "--set", "save_steps=2", "--export", "run")
    assert exported.returncode == 0, exported.stderr
    refused = memkit("run", "run", "--gpus", "3")
    assert refused.returncode == 2 and "for 2 processes" in refused.stderr and "--gpus 2" in refused.stderr
    process = started(tmp_path, "run", "run")
    wait_for_step(process, tmp_path, 3)
    ranks = children(process)
    assert sorted(ranks) == [0, 1]
    ranks[1].send_signal(signal.SIGKILL)
    assert process.wait() == 1
    text = (tmp_path / "log.txt").read_text()
    reported = [line for line in text.splitlines() if line.startswith("memkit: error: ")]
    assert len(reported) == 1 and f"rank 1 (process {ranks[1].pid}) was killed (SIGKILL" in reported[0]
    assert "Traceback" not in text and "torch.distributed" not in text
    assert not ranks[0].is_running(), "a rank was left behind"
    for rank in (0, 1):
        lines = (tmp_path / "run" / f"memory-rank{rank}.jsonl").read_text().split("\n")
        assert all(json.loads(line) for line in lines[:-1])
        assert {record["kind"] for record in records(tmp_path, rank)} >= {"run", "step", "save"}
    content = run_file(tmp_path)
    assert content["status"] == "running" and content["gpus"] == 2
    checkpoint = tmp_path / "run" / "checkpoint-2"
    assert (checkpoint / "adapter_model.safetensors").exists() and (checkpoint / "rng_state_1.pth").exists()


@pytest.mark.slow
def test_where_the_launching_process_is_killed_its_ranks_end(tmp_path: Path, text_file: Path) -> None:
    process = start(tmp_path, text_file, "lora", "--max-steps", "2000", "--set", "save_steps=5000")
    while len(ranks := psutil.Process(process.pid).children(recursive=True)) < 2:
        assert process.poll() is None, (tmp_path / "log.txt").read_text()[-3000:]
        time.sleep(0.05)
    process.kill()
    process.wait()
    assert not psutil.wait_procs(ranks, timeout=120)[1]
