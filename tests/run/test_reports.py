"""What `memkit run` adds to scripts that train: records, page and advice, and not a bit of a loss."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hf_memkit.deepspeed import ops
from hf_memkit.measuring.memory.records import read_records
from tests.loaded import Loaded
from tests.run.conftest import MEMKIT, ROOT, Start

PAGE = "memory-report.html"


@pytest.fixture(autouse=True)
def trains(script: Callable[[str], Path]) -> None:
    script("trains.py")


def load_output(folder: Path, name: str, rank: int = 0) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / f"{name}-{rank}.json").read_text())
    return content


def recorded(folder: Path, rank: int = 0) -> list[str]:
    return [record["kind"] for record in read_records(folder / f"memory-rank{rank}.jsonl")]


@pytest.mark.slow
def test_every_trainer_is_recorded_once_and_computes_what_it_computes_without(process: Loaded, tmp_path: Path) -> None:
    """Finds: a random number or a variable that memkit takes or sets, two callbacks in one Trainer, a script's own
    callback replaced, words on standard output."""
    plain = process.run(["trains.py", "many", "plain"], tmp_path)
    assert plain.returncode == 0, plain.stderr
    memkit = process.run(["memkit", "run", "trains.py", "--log", "none", "--", "many", "reported"], tmp_path)
    assert memkit.returncode == 0, memkit.stderr
    assert load_output(tmp_path, "reported") == load_output(tmp_path, "plain")

    kinds = ["run", "modules", "step", "step", "step", "end"]
    assert [recorded(tmp_path / "reported" / name) for name in ("first", "second", "own", "own too")] == [kinds] * 4
    pages = sorted(str(page.parent.relative_to(tmp_path / "reported")) for page in tmp_path.glob(f"reported/*/{PAGE}"))
    assert pages == ["first", "own", "second"]
    assert not list(tmp_path.glob("reported/third/memory*")) + list(tmp_path.glob("reported/fourth/memory*"))

    assert memkit.stderr.count("Finished after step 3") == 2 and f"Page: reported/first/{PAGE}" in memkit.stderr
    assert "memkit" not in memkit.stdout and "Finished" not in memkit.stdout and "memory/" not in memkit.stdout
    assert memkit.stdout.count("'loss'") == plain.stdout.count("'loss'") == 12


@pytest.mark.slow
def test_out_of_memory_ends_with_advice(start: Start, tmp_path: Path) -> None:
    """Finds: an error that is swallowed or loses its traceback, advice that nobody sees, memkit's own frames."""
    memkit = start(*MEMKIT, "trains.py", "oom", "out").ended()
    assert memkit.code == 1
    shown = memkit.err[memkit.err.index("Traceback (most recent call last)") :]
    first_frame = shown.splitlines()[1]
    assert first_frame == f'  File "{tmp_path}/trains.py", line {first_frame.split()[3][:-1]}, in <module>'
    assert "hf_memkit" not in shown[: shown.index("torch.OutOfMemoryError: CUDA")]
    assert "memkit: out of memory in forward of step 2" in shown and "memkit explain" in shown
    assert recorded(tmp_path / "out")[-2:] == ["oom", "end"] and (tmp_path / "out" / PAGE).exists()


PREDICTED = """
import sys
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=50, n_positions=16))
rows = [{"input_ids": list(range(8)), "labels": list(range(8))}] * 8
arguments = TrainingArguments(sys.argv[1], max_steps=2, report_to="none", save_strategy="no")
Trainer(model, arguments, train_dataset=rows).train()
"""


@pytest.mark.exhaustive
def test_a_prediction_stands_beside_what_is_measured(start: Start, tmp_path: Path) -> None:
    """Finds: a prediction in the script's own process, or that no report sees; one that fails and stops the run."""
    (tmp_path / "tiny.py").write_text(PREDICTED)
    memkit = start(*MEMKIT, "--predict", "tiny.py", "--", "out").ended()
    assert memkit.code == 0 and "memkit: predicted: " in memkit.err, memkit.err
    run = read_records(tmp_path / "out" / "memory-rank0.jsonl")[0]
    assert run["kind"] == "run" and run["prediction"]["phases"]["backward"]["peak_allocated_gib"] > 0
    (tmp_path / "other.py").write_text("print('no Trainer here')")
    memkit = start(*MEMKIT, "--predict", "other.py").ended()
    assert memkit.code == 0 and memkit.out == "no Trainer here\n" and "no prediction (" in memkit.err


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "zero2.json"
    path.write_text('{"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": "auto"}')
    return path


@pytest.mark.slow
def test_deepspeed_without_a_launcher_gets_the_environment_of_one_process(
    start: Start, tmp_path: Path, config: Path
) -> None:
    """Finds: "No module named 'mpi4py'", a variable of the user's replaced, and a lock on which DeepSpeed would wait
    for ever, unnamed. The script only makes its TrainingArguments: no operator is built."""
    lock = tmp_path / "extensions" / "cpu_adam" / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    variables = {"TORCH_EXTENSIONS_DIR": str(lock.parents[1]), "MASTER_PORT": "29712"}
    memkit = start(*MEMKIT, "trains.py", "deepspeed", "out", config, "arguments only", **variables).ended()
    assert memkit.code == 0, memkit.err
    assert load_output(tmp_path, "out")["environment"] == {
        "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29712",
    }  # fmt: skip
    assert "memkit: DeepSpeed without a launcher: one process (RANK=0, WORLD_SIZE=1, port 29712)" in memkit.err
    (named,) = [line for line in memkit.err.splitlines() if str(lock) in line]
    assert named.startswith("memkit: ") and named.endswith(f"rm {lock}")
    assert lock.exists() and "made no Trainer" in memkit.err


@pytest.mark.operators
def test_deepspeed_without_a_launcher_trains(start: Start, tmp_path: Path, config: Path) -> None:
    """Finds: an environment with which the engine does not start, or the process aborts at its end."""
    variables = {"TORCH_EXTENSIONS_DIR": str(ops.extensions_folder(cpu=True))}
    memkit = start(*MEMKIT, "trains.py", "deepspeed", "out", config, **variables).ended()
    assert memkit.code == 0, memkit.err
    assert len(load_output(tmp_path, "out")["losses"]) == 3 and recorded(tmp_path / "out")[-1] == "end"


@pytest.mark.slow
def test_ctrl_c_says_how_to_see_the_records(tmp_path: Path) -> None:
    """And ends by the signal, as Python does."""
    command = [sys.executable, *MEMKIT, "trains.py", "long", "out"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    process = subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True)
    while "step" not in (recorded(tmp_path / "out") if (tmp_path / "out" / "memory-rank0.jsonl").exists() else []):
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, message = process.communicate()
    assert process.returncode == -signal.SIGINT
    assert [line for line in message.splitlines() if line.startswith("memkit: ") and "memkit report out" in line]
