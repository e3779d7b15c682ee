"""Code below `train()`, of which only the source is read, and what code above it leaves behind. Real scripts in real
processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import huggingface_hub.constants
import pytest

from hf_memkit import predict_script
from hf_memkit.prediction.child.script import file_guards
from hf_memkit.prediction.traced_training import Outcome
from tests.conftest import ROOT
from tests.predict_script.conftest import Predict

HEAD = """
import json, os, shutil, sys
from pathlib import Path
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

config = GPT2Config(n_layer=2, n_embd=128, n_head=2, vocab_size=64, n_positions=64, bos_token_id=0, eos_token_id=0)
model = GPT2LMHeadModel(config)
rows = [{"input_ids": torch.arange(16), "labels": torch.arange(16)}] * 8
arguments = TrainingArguments("out", max_steps=2, per_device_train_batch_size=2, report_to="none", save_strategy="no")
trainer = Trainer(model, arguments, train_dataset=rows, eval_dataset=rows[:2])
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


def of(predict: Predict, code: str) -> tuple[Outcome, str]:
    """The outcome of a script with this code below the Trainer, and its notes."""
    found = predict(HEAD + textwrap.dedent(code))
    assert found.training, found
    return found, "\n".join(found.training.notes)


def test_no_line_below_train_runs(predict: Predict, folder: Path) -> None:
    """Would notice: results of an earlier run that go, because a script cleans up or reports what never was."""
    before = left(folder)
    code = """
    import atexit
    atexit.register(os.remove, "log.txt")
    def run():
        try:
            return trainer.train()
        except BaseException:
            open("results.json", "w")
        finally:
            open("out/config.json", "w")
    run()
    """
    found, _ = of(predict, code)
    assert left(folder) == before
    assert {"load", "forward", "backward", "optimizer"} <= set(found.training.trace.peaks_by_phase())


BELOW = """
def final(model):
    return PeftModel.from_pretrained(model, "out").merge_and_unload()
def made():
    return GPT2LMHeadModel.from_pretrained("out")
def main():
    if len(sys.argv) > 9:
        trainer.train()
    trainer.train()
    LINES
main()
made()
"""


@pytest.mark.parametrize(
    ("line", "expected", "unexpected"),
    [
        pytest.param("model.eval(); model.train(); trainer.save_model()", "", "train()", marks=pytest.mark.slow),
        pytest.param("AutoTokenizer.from_pretrained('out')", "", "from_pretrained", marks=pytest.mark.slow),
        (
            "x = GPT2LMHeadModel.from_pretrained(\n        'out')",
            "from_pretrained() (train.py, line LINE)",
            "merge_and",
        ),
        pytest.param(
            "model.merge_and_unload()",
            "merge_and_unload() (train.py, line LINE)",
            "from_pretrained",
            marks=pytest.mark.slow,
        ),
        ("trainer.train()", "a second train() (train.py, line LINE)", "loop"),
        pytest.param("for _ in ():\n        print(1)", "", "loop", marks=pytest.mark.slow),
    ],
)
def test_what_is_loaded_merged_or_trained_below_has_notes(
    predict: Predict, line: str, expected: str, unexpected: str
) -> None:
    """Would notice: a second model without a note; a note on calls above train(), or on other objects."""
    _, notes = of(predict, BELOW.replace("LINES", line).replace("main()\nmade()", "main()"))
    place = str(FIRST + BELOW.splitlines().index("    LINES"))
    assert expected.replace("LINE", place) in notes and unexpected not in notes, notes


def test_one_training_of_a_loop_is_predicted(predict: Predict) -> None:
    _, notes = of(predict, "for fold in range(3):\n    trainer.train()\n")
    assert f"train.py, line {FIRST + 1}: train() is in a loop: its first training" in notes


@pytest.mark.parametrize(
    ("code", "decides"),
    [
        ("trainer.train()\ntrainer.evaluate()", True),
        pytest.param("def after():\n    trainer.evaluate()\ntrainer.train()\nafter()", True, marks=pytest.mark.slow),
        pytest.param("trainer.train()\ntrainer.predict(rows)", True, marks=pytest.mark.slow),
        pytest.param("arguments.do_eval = True\ntrainer.train()", True, marks=pytest.mark.slow),
        pytest.param("trainer.train()\nif arguments.do_eval:\n    trainer.evaluate()", False, marks=pytest.mark.slow),
        pytest.param(
            "trainer.train()\nif arguments.eval_strategy != 'no':\n    trainer.evaluate()",
            False,
            marks=pytest.mark.slow,
        ),
        ("trainer.train()", False),
        pytest.param("if len(sys.argv) > 9:\n    trainer.evaluate()\ntrainer.train()", False, marks=pytest.mark.slow),
    ],
)
def test_an_evaluation_decides_where_something_asks_for_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: str, decides: bool
) -> None:
    """Would notice: a job that does not fit for an evaluation that it never makes, and one that fits without its last
    one."""
    monkeypatch.chdir(tmp_path)
    wide = HEAD.replace("rows[:2]", "rows * 8").replace("vocab_size=64", "vocab_size=50_000")
    Path("train.py").write_text(wide.replace('"out"', '"out", per_device_eval_batch_size=64') + code)
    found = predict_script("train.py", gpu="T4")
    assert ("evaluate" in found.phases) is decides is (found.peak_phase == "evaluate")
    assert any(note.startswith("not in the verdict: evaluate()") for note in found.notes) is not decides


def test_an_evaluation_of_data_that_the_trainer_does_not_have_has_notes(predict: Predict) -> None:
    code = HEAD.replace(", eval_dataset=rows[:2]", "") + "trainer.train()\ntrainer.evaluate(rows)"
    found = predict(code)
    assert f"not predicted: evaluate() (train.py, line {FIRST + 1})" in "\n".join(found.training.notes)
    assert "evaluate" not in found.training.trace.peaks_by_phase()


def test_no_cache_is_where_the_script_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Would notice: made-up numbers in files on machines whose HF_HOME is the folder of all work."""
    monkeypatch.chdir(tmp_path)
    for name, path in {"HF_HUB_CACHE": tmp_path.parent, "HF_ASSETS_CACHE": tmp_path / "assets"}.items():
        monkeypatch.setattr(huggingface_hub.constants, name, str(path))
    caches = list(file_guards._caches())
    assert str(tmp_path / "assets") in caches and str(tmp_path.parent) not in caches


def test_what_stood_above_train_stays(predict: Predict, folder: Path) -> None:
    """Would notice: an evaluation's NaN in a file."""
    before = left(folder)
    found, _ = of(
        predict,
        """
        baseline = trainer.evaluate()
        Path("results.json").write_text(json.dumps(baseline))
        assert json.loads(Path("results.json").read_text()).keys() == baseline.keys()
        trainer.save_metrics("eval", baseline)
        trainer.push_to_hub()
        import tempfile
        with tempfile.TemporaryDirectory() as temporary:
            Path(temporary, "rows").write_text("rows")
            print(temporary)
            trainer.train()
        """,
    )
    assert "evaluate" in found.training.trace.peaks_by_phase()
    assert left(folder) == before


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
import os
import subprocess
import sys
from hf_memkit.prediction.child.training.phase_hooks import TrainingWatch
from hf_memkit.prediction.child.tracer.tracer import StorageTracer

made(max_steps=2, save_steps=2).train()
trainer, tracer = made(max_steps=4, save_strategy="no"), StorageTracer("cpu")
watch = TrainingWatch(tracer, lambda: trainer.model_wrapped)
trainer.add_callback(watch)
with tracer:
    tracer.adopt([*trainer.model.parameters(), *trainer.model.buffers()])
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
    peaks = found.training.trace.peaks_by_phase()
    assert peaks["resume"] == pytest.approx(real["load"], rel=0.005)  # all before the first step
    for phase in ("forward", "backward"):
        assert peaks[phase] == pytest.approx(real[phase], rel=0.005), phase
