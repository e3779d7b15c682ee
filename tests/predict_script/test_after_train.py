"""What stands below `train()`: it is predicted, and leaves nothing behind. Real scripts in real processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest

from hf_memkit.prediction.child import leaves_nothing
from hf_memkit.prediction.child.read_only import has_landlock
from hf_memkit.prediction.trace import Trace
from tests.conftest import ROOT
from tests.predict_script.conftest import Predict

pytestmark = pytest.mark.timeout(120)

HEAD = """
import json, os, shutil, signal, socket, subprocess, sys
from pathlib import Path
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

config = GPT2Config(n_layer=2, n_embd=128, n_head=2, vocab_size=64, n_positions=64, bos_token_id=0, eos_token_id=0)
model = GPT2LMHeadModel(config)
rows = [{"input_ids": torch.arange(16), "labels": torch.arange(16)}] * 8
server = socket.create_server(("127.0.0.1", 0))
connection = socket.create_connection(server.getsockname())
arguments = TrainingArguments("out", max_steps=2, per_device_train_batch_size=2, report_to="none", save_strategy="no")
trainer = Trainer(model, arguments, train_dataset=rows, eval_dataset=rows[:2])
result = trainer.train()
"""
FIRST = HEAD.count("\n") + 1
"""The line below it."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With files of an earlier run."""
    (tmp_path / "out").mkdir()
    for name in ("results.json", "log.txt", "out/config.json", "out/model.safetensors"):
        (tmp_path / name).write_text("earlier")
    return tmp_path


def left(folder: Path) -> dict[str, str]:
    found = {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file()}
    return {name: path.read_text() for name, path in found.items() if name != "train.py"}


def below(predict: Predict, code: str) -> tuple[dict[str, Any], list[str]]:
    """What came of a script with this below `train()`, and what is said of it."""
    found = predict(HEAD + textwrap.dedent(code))
    assert "trace" in found, found
    said = "code below train() is predicted up to "
    return found, [note.removeprefix(said) for note in found["about"]["notes"] if note.startswith(said)]


@pytest.mark.slow
def test_what_a_script_writes_comes_to_nothing(predict: Predict, folder: Path) -> None:
    """Would notice: NaN in the place of an earlier run's results, a model without weights in that of a good one."""
    before = left(folder)
    found, notes = below(
        predict,
        """
        metrics = {**result.metrics, **trainer.evaluate()}
        Path("results.json").write_text(json.dumps(metrics))
        with open("log.txt", "a") as log:
            print(metrics["eval_loss"], file=log)
        trainer.save_metrics("all", metrics)
        trainer.save_state()
        os.makedirs("out/final/deep", exist_ok=True)
        trainer.save_model()
        model.to(torch.float16).save_pretrained("out/final/deep")
        torch.save(model.state_dict(), "out/weights.pt")
        again = AutoModelForCausalLM.from_pretrained("out/final/deep").cuda()
        assert again.config.n_embd == 128 and again.dtype == torch.float16
        assert torch.load("out/weights.pt")["transformer.wte.weight"].dtype == torch.float16
        assert json.loads(Path("results.json").read_text()).keys() >= {"train_loss", "eval_loss"}
        trainer.push_to_hub()
        """,
    )
    assert notes == [] and left(folder) == before
    peaks = Trace.from_json(found["trace"]).peaks_by_phase()
    assert list(peaks) == ["load", "data", "forward", "backward", "optimizer", "evaluate", "save", "after"]


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("os.remove('log.txt')", "it would change log.txt"),
        ("Path('results.json').rename('best.json')", "it would change results.json"),
        ("shutil.rmtree('out')", "it would change out"),
        ("os.open('log.txt', os.O_WRONLY)", "it would change log.txt"),
        ("subprocess.run(['touch', 'new.txt'])", "it starts a process"),
        ("os.system('touch new.txt')", "it starts a process"),
        ("import socket; socket.create_connection(('127.0.0.1', 9))", "it connects to another machine"),
        ("connection.sendall(b'loss: nan')", "it sends to another machine"),
        ("import sqlite3; sqlite3.connect('runs.db')", "it would change runs.db"),
        ("model.transformer.wte.weight.sum().item()", "the value of a tensor of the model"),
        ("trainer.train()", "a second train() is not predicted"),
        ("raise KeyError('loss')", "KeyError: 'loss'"),
        ("trainer.predict(rows)", "predict() returns values"),
    ],
)
def test_what_would_be_left_ends_it_at_its_line(predict: Predict, folder: Path, line: str, why: str) -> None:
    """Would notice: files removed, processes and connections that tell of a training that never was, an exception of
    the last lines that takes the prediction away, an `except Exception` that goes on."""
    before = left(folder)
    caught = "raise" not in line and "item" not in line
    found, notes = below(predict, f"try:\n    {line}\nexcept Exception:\n    pass" if caught else line)
    assert len(notes) == 1 and notes[0].startswith(f"train.py, line {FIRST + caught}: "), notes
    assert why in notes[0] and left(folder) == before
    assert Trace.from_json(found["trace"]).peaks_by_phase()["backward"]


@pytest.mark.skipif(not has_landlock(), reason="this kernel has no Landlock")
@pytest.mark.parametrize(
    "line",
    [
        "import pyarrow.parquet; pyarrow.parquet.write_table(pyarrow.table({'loss': [1.0]}), 'results.json')",
        "import ctypes; assert ctypes.CDLL(None).unlink(b'log.txt') == 0",
        "import ctypes; assert ctypes.CDLL(None).truncate(b'log.txt', 0) == 0",
    ],
)
def test_code_that_is_not_python_s_changes_nothing_either(predict: Predict, folder: Path, line: str) -> None:
    """Would notice: results of an earlier run that a library written in C++ overwrites."""
    before = left(folder)
    found, notes = below(predict, line)
    assert len(notes) == 1 and left(folder) == before and list(folder.glob("*.json"))
    assert Trace.from_json(found["trace"]).peaks_by_phase()["backward"]


SPAWNED = "multiprocessing.get_context('spawn').Process(target=os.remove, args=['log.txt'])"


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("try:\n    os.remove('log.txt')\nexcept:\n    pass", "it would change log.txt"),
        (f"import multiprocessing\nstarted = {SPAWNED}\nstarted.start()\nstarted.join()", "it starts a process"),
        ("import huggingface_hub\nhuggingface_hub.create_repo('a/b', token='t')", "it would change what is on"),
        ("import huggingface_hub\nhuggingface_hub.delete_repo('a/b', token='t')", "it would change what is on"),
    ],
    ids=["caught", "spawned", "made", "deleted"],
)
def test_no_way_round(predict: Predict, folder: Path, line: str, why: str) -> None:
    """Would notice: a bare `except` that hides what was stopped, a process that no audit hook sees, the hub's module
    functions, which were bound when it was imported."""
    before = left(folder)
    found = predict(HEAD + line)
    notes = [note for note in found["about"]["notes"] if note.startswith("code below train()")]
    assert len(notes) == 1 and why in notes[0], notes
    assert {name: text for name, text in left(folder).items() if name in before} == before


def test_no_cache_is_where_the_script_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Would notice: no guard at all on machines whose HF_HOME is the folder of all work."""
    monkeypatch.chdir(tmp_path)
    for name, path in {"HF_HUB_CACHE": tmp_path.parent, "HF_ASSETS_CACHE": tmp_path / "assets"}.items():
        monkeypatch.setattr(huggingface_hub.constants, name, str(path))
    caches = list(leaves_nothing._caches())
    assert str(tmp_path / "assets") in caches and str(tmp_path.parent) not in caches


@pytest.mark.slow
def test_what_stood_above_train_stays(predict: Predict, folder: Path) -> None:
    """Would notice: checkpoints of the last run that a prediction removes, because the run would; an evaluation's NaN
    in a file; a folder or thread of the script's that nobody ends."""
    before = left(folder)
    above = HEAD.replace(
        "result = trainer.train()",
        """
shutil.rmtree("out")
os.mkdir("out")
Path("log.txt").unlink()
Path("new.txt").write_text("made")
Path("new.txt").unlink()
baseline = trainer.evaluate()
Path("results.json").write_text(json.dumps(baseline))
trainer.save_metrics("eval", baseline)
trainer.push_to_hub()
import tempfile, threading, time
def removes():
    while True:
        time.sleep(0.01)
        if below:
            os.remove("results.json")
below = False
threading.Thread(target=removes, daemon=True).start()
with tempfile.TemporaryDirectory() as temporary:
    Path(temporary, "rows").write_text("rows")
    result = trainer.train()
    below = True
print(temporary, file=open("/dev/stderr", "a"))
time.sleep(1)
""",
    )
    found = predict(above)
    assert "trace" in found, found
    notes = [note for note in found["about"]["notes"] if note.startswith("code below train()")]
    assert len(notes) == 1 and "it would change results.json" in notes[0], notes
    assert left(folder) == before and not (folder / "new.txt").exists()


@pytest.mark.parametrize("line", ["os.kill(os.getpid(), signal.SIGKILL)", "os._exit(3)", "sys.exit(3)"])
def test_however_it_ends_the_steps_are_predicted(predict: Predict, line: str) -> None:
    """Would notice: a prediction that goes with the script's process."""
    found, _ = below(predict, line)
    assert {"load", "forward", "backward", "optimizer"} <= set(Trace.from_json(found["trace"]).peaks_by_phase())
    assert found["about"]["host"]["tensors"]["load"] > 0
    cut = any("ended its process" in note for note in found["about"]["notes"])
    assert cut == ("exit(3)" not in line or "_exit" in line)


@pytest.mark.slow
def test_a_second_model_beside_the_first_is_counted(predict: Predict) -> None:
    """Would notice: weights that are loaded below `train()` and counted nowhere, or beside those that are gone."""
    twice, _ = below(predict, "other = GPT2LMHeadModel(config).cuda()")
    once, _ = below(predict, "import gc\ndel model, trainer\ngc.collect()\nother = GPT2LMHeadModel(config).cuda()")
    weights = 4 * twice["about"]["parameters"]
    peaks = [Trace.from_json(each["trace"]).peaks_by_phase()["after"] for each in (twice, once)]
    assert peaks[0] - peaks[1] == pytest.approx(weights, rel=0.05)


JOB = """
import torch
from peft import LoraConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

def made(**options):
    config = GPT2Config(n_layer=2, n_embd=128, n_head=2, vocab_size=64, n_positions=64, bos_token_id=0, eos_token_id=0)
    adapters = LoraConfig(r=64, target_modules=["c_attn", "c_fc"], fan_in_fan_out=True, task_type="CAUSAL_LM")
    rows = [{"input_ids": torch.arange(16), "labels": torch.arange(16)}] * 8
    options |= {"per_device_train_batch_size": 2, "report_to": "none", "use_cpu": True}
    model = get_peft_model(GPT2LMHeadModel(config), adapters)
    return Trainer(model, TrainingArguments("out", **options), train_dataset=rows)
"""
RESUMED = f"""{JOB}
made(max_steps=4, save_strategy="no").train(resume_from_checkpoint="out/checkpoint-2")
"""
RECORDED = f"""{JOB}
import json
from hf_memkit.prediction.child.phase_hooks import TrainingWatch
from hf_memkit.prediction.child.tracer import StorageTracer

made(max_steps=2, save_steps=2).train()
trainer, tracer = made(max_steps=4, save_strategy="no"), StorageTracer("cpu")
watch = TrainingWatch(tracer)
trainer.add_callback(watch)
with tracer:
    tracer.adopt([*trainer.model.parameters(), *trainer.model.buffers()], "weights")
    trainer.train(resume_from_checkpoint="out/checkpoint-2")
    print(json.dumps(tracer.finish(watch.phase).peaks_by_phase()))
"""


@pytest.mark.slow
def test_a_checkpoint_is_read_as_a_training_that_is_resumed_reads_it(predict: Predict, tmp_path: Path) -> None:
    """Would notice: optimizer states that are read twice, adapters that are read to the device and not counted."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-c", RECORDED]
    ran = subprocess.run(command, cwd=tmp_path, env=environment, check=True, capture_output=True, text=True)
    real = json.loads(ran.stdout.splitlines()[-1])
    found = predict(RESUMED, device="cpu", worst_batch=False)
    peaks = Trace.from_json(found["trace"]).peaks_by_phase()
    assert peaks["resume"] == pytest.approx(real["load"], rel=0.005)  # all before the first step
    for phase in ("forward", "backward"):
        assert peaks[phase] == pytest.approx(real[phase], rel=0.005), phase
