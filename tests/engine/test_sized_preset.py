"""A preset that `memkit ds copy` sized for a model trains it in a plain script, and swaps what the ledger says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hf_memkit.deepspeed import ops
from hf_memkit.setup.process_group import single_process_environment
from tests.conftest import Memkit
from tests.engine.tiny_training import save_initial_weights
from tests.operators import EVERY_OPERATOR

pytestmark = pytest.mark.operators

SCRIPT = """
import json, sys
import torch
from pathlib import Path
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

sizes = {}

class CountFiles(TrainerCallback):
    def on_step_end(self, args, state, control, **_):
        sizes.update({str(f): f.stat().st_size for f in Path("disk").rglob("*.swp")})

arguments = TrainingArguments(
    "out", deepspeed="ds.json", max_steps=2, gradient_accumulation_steps=2, per_device_train_batch_size=1,
    bf16=True, use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=True,
)
model = AutoModelForCausalLM.from_pretrained("model", dtype=torch.bfloat16)
rows = [{"input_ids": torch.arange(16), "labels": torch.arange(16)}] * 16
Trainer(model=model, args=arguments, train_dataset=rows, callbacks=[CountFiles()]).train()
print("swapped", sum(sizes.values()))
from hf_memkit.setup.process_group import leave_process_group
leave_process_group()
"""


def test_a_sized_preset_trains_and_swaps_what_its_ledger_says(memkit: Memkit, tmp_path: Path) -> None:
    save_initial_weights(tmp_path / "model")
    (tmp_path / "disk").mkdir()
    ops.build(EVERY_OPERATOR, print, cpu=True)
    options = ("--model", "./model", "--gpu-memory", "16GB", "--ram", "32GB", "--nvme-path", str(tmp_path / "disk"))
    copied = memkit("ds", "copy", "zero3-infinity", "ds.json", *options, "--json")
    assert copied.returncode == 0, copied.stderr
    assert any("reads" in note and "measured" in note for note in json.loads(copied.stdout)["notes"])
    checked = memkit("ds", "check", "ds.json", *options)
    assert checked.returncode == 0, checked.stdout

    (tmp_path / "train.py").write_text(SCRIPT)
    environment = {
        **os.environ, **single_process_environment(), "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }  # fmt: skip
    command = [sys.executable, "train.py"]
    ran = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-3000:]
    swapped = int(ran.stdout.rpartition("swapped ")[2])
    on_disk = sum(row["gib"] for row in json.loads(copied.stdout)["ledger"]["disk"]) * 2**30
    assert swapped == pytest.approx(on_disk, rel=0.01)
