"""A command that is killed, which no handler hears, leaves no process and no temporary folder: each real command, and
the count of its descendants."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.conftest import ROOT

TRAINS = """
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

rows = [{"input_ids": torch.arange(16), "labels": torch.arange(16)}] * 4
model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=100, n_positions=64))
Trainer(model, TrainingArguments("out", max_steps=4, report_to="none", save_strategy="no"), train_dataset=rows).train()
"""
WAITS = """
import pathlib, subprocess, time

other = subprocess.Popen(["sleep", "300"], start_new_session=True)
pathlib.Path("waits").touch()
time.sleep(300)
"""


def killed(folder: Path, code: str, *command: str, when: Callable[[list[psutil.Process]], bool]) -> None:
    """Starts `memkit COMMAND` beside `train.py`, kills it in the moment `when`, and waits for its descendants."""
    (folder / "train.py").write_text(code)
    temporary = folder / ("temporary" * 10)  # the path of a socket in it would have more than 107 bytes
    temporary.mkdir(exist_ok=True)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(folder / "cache")}
    # A folder that torch makes as soon as its compiler is imported, and keeps.
    environment |= {"TMPDIR": str(temporary), "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor")}
    with (folder / "said").open("w") as text:
        process = subprocess.Popen([*command], stdout=text, stderr=text, cwd=folder, env=environment)
    while not when(results := psutil.Process(process.pid).children(recursive=True)):
        assert process.poll() is None, (folder / "said").read_text()
        time.sleep(0.05)
    process.kill()
    process.wait()
    _, left = psutil.wait_procs(results, timeout=120)
    for each in left:
        each.kill()
    assert results and not left
    assert not [path.name for path in temporary.iterdir() if path.is_dir()]


def test_processes_of_a_pool_end_with_the_one_that_started_them(tmp_path: Path) -> None:
    """From a thread that has ended: a parent-death signal would have come then."""
    code = """
import os, threading, time
from hf_memkit.plan.judge_trace import judging_pool

pool = judging_pool()
thread = threading.Thread(target=lambda: pool.submit(os.getpid).result())
thread.start()
thread.join()
assert pool.submit(os.getpid).result()
open("ready", "w").close()
time.sleep(300)
"""
    ready = tmp_path / "ready"
    killed(tmp_path, code, sys.executable, "train.py", when=lambda results: len(results) >= 2 and ready.exists())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "code", "processes"),
    [
        ("predict train.py --gpu T4", TRAINS, 1),  # while its child loads
        ("predict train.py --gpu T4", WAITS, 3),  # while the script runs, which has started another program
        ("plan train.py --gpu T4 --limit 600", TRAINS, 1),  # while its child loads
        ("plan train.py --gpu T4 --limit 600", TRAINS, 4),  # with its pool, which holds what the others listen to
        ("run --predict train.py", WAITS, 3),
    ],
)
def test_a_killed_command_leaves_nothing(tmp_path: Path, command: str, code: str, processes: int) -> None:
    waits = tmp_path / "waits"

    def begun(results: list[psutil.Process]) -> bool:
        return len(results) >= processes and (code is TRAINS or waits.exists())

    killed(tmp_path, code, sys.executable, "-m", "hf_memkit", *command.split(), when=begun)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_all_processes_of_a_job_leaves_nothing(tmp_path: Path, number: signal.Signals) -> None:
    """As of a scheduler, or a closed terminal. Would notice: what stands for a moved folder, temporary files."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "rows").touch()
    (tmp_path / "train.py").write_text(f"import os\nos.rename('data', 'moved')\n{WAITS}")
    (temporary := tmp_path / "temporary").mkdir()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(temporary)}
    environment["TORCHINDUCTOR_CACHE_DIR"] = str(tmp_path / "inductor")
    command = [sys.executable, "-m", "hf_memkit", "predict", "train.py", "--gpu", "T4"]
    with (tmp_path / "printed").open("w") as text:
        process = subprocess.Popen(
            command, stdout=text, stderr=text, cwd=tmp_path, env=environment, start_new_session=True,
            preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),  # `nohup scripts/test` ignores SIGHUP
        )  # fmt: skip
    while not (tmp_path / "waits").exists():
        assert process.poll() is None, (tmp_path / "printed").read_text()
        time.sleep(0.05)
    children = psutil.Process(process.pid).children(recursive=True)
    os.killpg(process.pid, number)
    assert process.wait() == 128 + number
    psutil.wait_procs(children)
    assert (tmp_path / "data").is_dir() and not os.path.lexists(tmp_path / "moved")
    assert not [path.name for path in temporary.iterdir() if path.is_dir()]
