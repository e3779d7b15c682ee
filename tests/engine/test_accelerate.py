"""`memkit ds copy --accelerate`: what it writes starts a real script under accelerate launch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hf_memkit.deepspeed import ops
from tests.conftest import Memkit

pytestmark = pytest.mark.operators

SCRIPT = """
import torch
from transformers import AutoModelForCausalLM, GPT2Config, Trainer, TrainingArguments

arguments = TrainingArguments("out", max_steps=2, use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=True)
shape = dict(vocab_size=128, n_positions=32, n_embd=64, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
model = AutoModelForCausalLM.from_config(GPT2Config(**shape))
rows = [{"input_ids": torch.arange(16), "labels": torch.arange(16)}] * 16
trainer = Trainer(model=model, args=arguments, train_dataset=rows)
trainer.train()
print("ran", type(trainer.model_wrapped).__name__, "at stage", trainer.model_wrapped.zero_optimization_stage())
"""


def test_accelerate_launch_runs_a_script_with_a_copied_preset(memkit: Memkit, tmp_path: Path) -> None:
    copied = memkit("ds", "copy", "zero2", "ds.json", "--model", "gpt2", "--accelerate")
    assert copied.returncode == 0, copied.stderr
    (tmp_path / "train.py").write_text(SCRIPT)
    ops.build(("deepspeed_shm_comm",), print, cpu=True)
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", "ds-accelerate.yaml", "train.py"]
    ran = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert "ran DeepSpeedEngine at stage 2" in ran.stdout
