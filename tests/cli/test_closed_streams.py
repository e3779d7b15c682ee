"""A verb whose caller has closed a standard stream (`>&-`) answers on the others, with the same exit code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.loaded import Loaded, Ran
from tests.measuring.report import synthetic_records as made

STREAMS = ("stdin", "stdout", "stderr")
CLOSES = """
import os, sys

name, *sys.argv[1:] = sys.argv[1:]
os.close(("stdin", "stdout", "stderr").index(name))
setattr(sys, name, None)  # as Python does at its start
setattr(sys, f"__{name}__", None)
from hf_memkit.cli.main import main_and_exit

main_and_exit()
"""
"""A fork of a process with loaded libraries, as if Python had started with a closed stream."""
SCRIPT = "import sys; open('written', 'w').write('its own'); print('printed', file=sys.stderr); sys.exit(3)"
TRAINS = """
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=50, n_positions=16))
rows = [{"input_ids": list(range(8)), "labels": list(range(8))}] * 8
Trainer(model, TrainingArguments("out", report_to="none", max_steps=2), train_dataset=rows).train()
"""


@pytest.fixture(autouse=True)
def files(tmp_path: Path) -> None:
    log = (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 15 GiB"
    )
    wrong = '{"zero_optimization": {"stage": 7}}'
    for name, text in {"t.log": log, "ds.json": wrong, "s.py": SCRIPT, "t.py": TRAINS, "closes.py": CLOSES}.items():
        (tmp_path / name).write_text(text)
    made.write(tmp_path / "records", made.healthy(4))


@pytest.mark.parametrize(
    "command",
    [
        "check ds.json",
        pytest.param("check absent.json", marks=pytest.mark.slow),
        pytest.param("ds show zero2", marks=pytest.mark.slow),
        "preset show lora --json",
        "explain t.log",
        pytest.param("report records", marks=pytest.mark.slow),
        pytest.param("recipe --gpu 16GB", marks=pytest.mark.slow),
        "run s.py",
        pytest.param("doctor", marks=pytest.mark.exhaustive),
        pytest.param("predict t.py --gpu T4 --json", marks=pytest.mark.slow),
        pytest.param("plan t.py --gpu T4 --limit 3 --json", marks=pytest.mark.exhaustive),
    ],
)
def test_a_closed_stream_changes_no_exit_code_and_no_other_stream(
    process: Loaded, tmp_path: Path, command: str
) -> None:
    """Would notice: "does not fit" for an answer that nobody reads, a sentence on standard output that belongs to
    standard error, a file that gets the number of a closed stream and with it another program's output."""
    whole = process.run(["memkit", *command.split()], tmp_path)
    for stream in STREAMS:
        ran: Ran = process.run(["closes.py", stream, *command.split()], tmp_path)
        assert ran.returncode == whole.returncode and "Traceback" not in ran.output, (stream, ran.output)
        assert bool(ran.stdout) == (bool(whole.stdout) and stream != "stdout"), stream
        assert bool(ran.stderr) == (bool(whole.stderr) and stream != "stderr"), stream
        if "--json" in command and stream != "stdout":
            json.loads(ran.stdout)
    if command.startswith("run"):
        assert (tmp_path / "written").read_text() == "its own"


@pytest.mark.parametrize("closed", [">&-", "<&- >&- 2>&-"])
def test_a_script_s_own_exit_code_comes_from_a_real_process(tmp_path: Path, closed: str) -> None:
    line = f'exec "$0" -m hf_memkit run s.py {closed}'
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(["/bin/sh", "-c", line, sys.executable], cwd=tmp_path, env=environment, capture_output=True)
    assert (ran.returncode, ran.stdout) == (3, b"") and b"Traceback" not in ran.stderr
    assert (tmp_path / "written").read_text() == "its own"
