"""RAM of a script's tensors while a GPU trains equals that of a real process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hf_memkit import predict_script
from hf_memkit.common.units import GIB, MIB
from hf_memkit.prediction.child.tracer.host_memory import HostWatch
from tests.predict_script.conftest import Predict

LOAD: Final = """
import gc, sys, threading, time
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

def load(dtype):
    return AutoModelForCausalLM.from_pretrained("model", dtype=dtype)

adapted = LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")
"""
TRAIN: Final = """
model = get_peft_model(model, adapted)
rows = [{"input_ids": [1] * 8, "labels": [1] * 8}] * 16
Trainer(model, TrainingArguments("out", max_steps=2, report_to="none", save_strategy="no"), train_dataset=rows).train()
"""
MEASURED: Final = """
import json
from hf_memkit.prediction.child.tracer.host_memory import anonymous_bytes

most = {}
def measured(name, make):
    gc.collect()
    before, ended = anonymous_bytes(), []
    def watch():
        while not ended:
            most[name] = max(most.get(name, 0), anonymous_bytes() - before)
            time.sleep(0.001)
    watching = threading.Thread(target=watch)
    watching.start()
    made = make()
    ended.append(True)
    watching.join()
    return made

load(torch.bfloat16), load(torch.float32)  # what libraries take once
gc.collect()
measured("load bfloat16", lambda: load(torch.bfloat16))
measured("load float32", lambda: load(torch.float32))
print(json.dumps(most))
"""


@pytest.fixture
def model(tmp_path: Path) -> int:
    """Saves one in bf16; its bytes."""
    config = LlamaConfig(
        hidden_size=768, intermediate_size=3072, num_hidden_layers=6, num_attention_heads=6, vocab_size=8192
    )
    made = LlamaForCausalLM(config).bfloat16()
    made.save_pretrained(tmp_path / "model")
    return sum(each.nbytes for each in made.parameters())


@pytest.mark.slow
def test_tensors_on_the_host_are_what_a_process_takes(predict: Predict, tmp_path: Path, model: int) -> None:
    """Would notice: mapped files that are counted, weights in another dtype that are not."""
    real = subprocess.run(
        [sys.executable, "-c", LOAD + MEASURED], cwd=tmp_path, check=True, capture_output=True, text=True,
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"},  # so that free() gives memory back
    )  # fmt: skip
    measured = json.loads(real.stdout.splitlines()[-1])
    assert measured["load bfloat16"] < 0.1 * model
    predicted: dict[str, Any] = {}
    for name in ("bfloat16", "float32"):
        found = predict(f"{LOAD}\nmodel = load(torch.{name})\n{TRAIN}")
        predicted[name] = found.training.host.tensor_bytes
    assert predicted["bfloat16"]["load"] < 0.1 * model
    assert predicted["float32"]["load"] == pytest.approx(measured["load float32"], rel=0.07)


@pytest.mark.slow
def test_ranks_load_one_each_and_ram_that_is_given_is_judged(
    tmp_path: Path, model: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Would notice: RAM of one rank for a machine of four, a verdict by the RAM of a machine that is not the one."""
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(f"{LOAD}\nmodel = load(torch.float32)\n{TRAIN}")
    found = [predict_script("train.py", gpu="T4", gpus=gpus) for gpus in (1, 4)]
    ram = [each.host_rss_bytes or 0 for each in found]
    assert ram[1] == pytest.approx(4 * ram[0], rel=0.01) and 3 * GIB + 2 * model < ram[0] < 4 * GIB
    assert [each.verdict for each in found] == ["fits", "fits"]
    refused = predict_script("train.py", gpu="T4", gpus=4, ram=f"{ram[1] // MIB - 100}MiB")
    assert refused.verdict == "does not fit" and "of RAM" in refused.why


def test_a_file_is_unmapped_when_its_last_tensor_is_gone() -> None:
    """Would notice: copies in a file that are counted for ever, or twice."""
    host = HostWatch()
    with host.loading(torch.float32):
        tensors = [torch.empty(1000), torch.empty(500)]
        for each in tensors:
            host.watch(each, None)
    for _ in range(2):
        host.watch(tensors[0], torch.ops.aten.add_.Tensor)
    host.end_phase("load")
    del tensors[0], each
    host.end_phase("data")
    del tensors[0]
    host.end_phase("forward")
    host.end_phase("backward")
    assert host.peaks == {"load": 4000, "data": 4000, "forward": 4000, "backward": 0}
