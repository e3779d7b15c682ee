"""`--verify` on the CPU: the real script with a real Trainer in a separate process."""

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
import torch

from hf_memkit.catalog.hardware import Machine, gpu_of_size, this_machine
from hf_memkit.common.user_script import UserScript
from hf_memkit.plan import wording
from hf_memkit.plan.candidate import Candidate, Choice
from hf_memkit.plan.judgement import Judgement
from hf_memkit.plan.plan import Plan
from hf_memkit.plan.verify import Verified, refuse_unverifiable, verify
from tests.plan.made_plans import CHECKPOINTING, plan, setup

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    (tmp_path / "script.py").write_bytes((HERE / "verified_script.py").read_bytes())
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    return tmp_path


NO_MEMORY = Choice("other", "no memory", {"environment.OWN_MEMORY": "0"})


def plan_of(*candidates: Candidate, gpus: int = 1) -> Plan:
    machine = Machine(gpu_of_size("16GB"), 1 << 36, 1 << 38, "/", 8)
    judgements = tuple(Judgement(each, fits=True) for each in candidates)
    return Plan("script.py", machine, gpus, judgements[0], judgements)


def script(*own: str) -> UserScript:
    arguments = ["--output_dir", "out", "--eval_strategy", "epoch", "--num_train_epochs", "100", *own]
    return UserScript("script.py", arguments=tuple(arguments))


def verify_on_cpu(plan: Plan, *own: str, **options: Any) -> tuple[Plan, tuple[Verified, ...]]:
    return verify(plan, script(*own), device="cpu", **options)


@pytest.mark.slow
def test_setups_run_until_one_passes_and_is_measured(folder: Path) -> None:
    """Would notice: steps with the first rows instead of the worst; a checkpoint in the user's folder; lines below
    `train()` that run; a failed setup that is still proposed; a run of a setup that needs as much memory as one that
    ran out of it; a line of source code in a traceback that is read as an out-of-memory error."""
    (folder / "out").mkdir()
    (folder / "out" / "own.txt").write_text("of the user")
    (folder / "batches").touch()
    before = sorted(folder.rglob("*"))
    setups = (
        setup(8, 1, 8, 1.0, NO_MEMORY), setup(8, 1, 9, 1.1, CHECKPOINTING), setup(4, 2, 4, 1.2),
        setup(2, 4, 2, 1.3, CHECKPOINTING),
    )  # fmt: skip
    after, results = verify_on_cpu(plan(*setups), "--fails_from", "3")
    assert [each.judgement.candidate.micro_batch_size for each in results] == [8, 4, 2], results
    assert [each.passed for each in results] == [False, False, True], results
    assert [each.out_of_memory for each in results] == [True, False, False]
    assert results[0].failed == "failed before it trained: OutOfMemoryError: CUDA out of memory"
    assert wording.why(after, setups[1]) == "needs as much as 8 × 1, no memory, which ran out of memory here"
    assert results[1].failed == "failed in its first steps: RuntimeError: no such batch"
    assert results[1].last_lines[-1] == "RuntimeError: no such batch"
    assert after.proposed is not None and after.proposed.candidate.micro_batch_size == 2
    assert after.file()["arguments"]["per_device_train_batch_size"] == 2
    last = results[2]
    lines = (folder / "batches").read_text().splitlines()
    assert lines[:13] == ["4 23"] + ["2 23"] * 12  # 4 batches a step
    # Then two epochs of the script's own loader, with eight batches each.
    assert [line.split()[0] for line in lines[13:]] == ["2"] * 16 and lines[13:].count("2 23") == 2
    assert last.worst_batch == "2 × 23 tokens"
    assert last.step_time_s is not None
    assert last.evaluated is True and last.saved is True and last.peak_allocated_gib is None
    assert "callback Marks was not called" in last.notes
    assert sorted(folder.rglob("*")) == before
    rows = {name: (measured, predicted) for name, measured, predicted in last.rows()}
    assert rows["peak allocated"] == ("–", "1.50 GiB") and rows["a step"][1] == "1.3 s, 1.17 to 1.69 s"
    json.dumps([each.to_json() for each in results])


@pytest.mark.slow
@pytest.mark.alone
def test_several_gpus_are_ranks_of_torchrun(folder: Path) -> None:
    """Would notice: one process instead of several, a rank that waits forever."""
    _, (result,) = verify_on_cpu(plan_of(Candidate(2, 1), gpus=2))
    assert result.passed, (result.failed, result.last_lines)
    assert "run by torchrun --nproc_per_node 2" in result.notes and result.worst_batch == "2 × 23 tokens"


@pytest.mark.slow
def test_ctrl_c_ends_the_run(folder: Path) -> None:
    """Would notice: a training that continues after Ctrl-C."""
    code = "from tests.plan.test_verify import *\nverify(plan_of(Candidate(2, 1)), script('--waits'), device='cpu')\n"
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)
    while not (folder / "waits").exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    (child,) = psutil.Process(process.pid).children()
    process.send_signal(signal.SIGINT)
    assert "KeyboardInterrupt" in process.communicate()[1]
    assert not child.is_running() and not (folder / "out").exists()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_its_memory_is_measured(folder: Path) -> None:
    refuse_unverifiable(this_machine())
    _, (result,) = verify(plan_of(Candidate(2, 2, (CHECKPOINTING,))), script())
    assert result.passed, (result.failed, result.last_lines)
    assert result.peak_allocated_gib and result.peak_reserved_gib and result.alloc_retries == 0
    assert result.peak_reserved_gib >= result.peak_allocated_gib and result.step_time_s
