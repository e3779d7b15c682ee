"""What is given late, or wrongly: the promises of `preset()` hold for `training_arguments` and `trainer` too."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.training_args import OptimizerNames

from hf_memkit import preset
from hf_memkit.common.errors import RunError, SettingError
from tests.conftest import Memkit

CPU = {"use_cpu": True, "report_to": "none", "disable_tqdm": True, "save_strategy": "no"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("model")
    config = GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=64, n_positions=32, bos_token_id=0, eos_token_id=0)
    GPT2LMHeadModel(config).save_pretrained(folder)
    return str(folder)


@pytest.fixture
def data() -> Dataset:
    rows = [[(row + n) % 64 for n in range(16)] for row in range(16)]
    return Dataset.from_dict({"input_ids": rows, "labels": rows})


def test_the_global_batch_stays_exact(model: str, tmp_path: Path) -> None:
    own = {"use_cpu": True, "per_device_train_batch_size": 4}  # nothing is traced
    setup = preset("checkpointed", model=model, gpu_memory="16GB", global_batch_size=8, arguments=own)
    same = int(setup["arguments.per_device_train_batch_size"])
    made = setup.training_arguments(str(tmp_path), per_device_train_batch_size=same)
    assert made.per_device_train_batch_size * made.gradient_accumulation_steps == 8
    for late in ({"per_device_train_batch_size": 3}, {"gradient_accumulation_steps": 5}):
        with pytest.raises(SettingError, match="global_batch_size=8"):
            setup.training_arguments(str(tmp_path), **late)


def test_late_arguments_are_reported_and_checked(
    model: str, data: Dataset, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    setup = preset("resident", model=model, gpu_memory="16GB")
    with pytest.raises(SettingError, match="rounds 16-bit weights to nearest"):
        setup.trainer(str(tmp_path), arguments={**CPU, "optim": "adamw_torch"}, train_dataset=data)
    with pytest.raises(SettingError, match="galore_adamw_layerwise"):
        late = {"optim": OptimizerNames.GALORE_ADAMW_LAYERWISE, "gradient_accumulation_steps": 4}
        setup.training_arguments(str(tmp_path), **late)
    setup = preset("checkpointed", model=model, gpu_memory="16GB", arguments=CPU)
    capsys.readouterr()
    setup.training_arguments(str(tmp_path), activation_checkpointing=False)
    assert "Override: your activation_checkpointing = False" in capsys.readouterr().out


def test_a_field_of_training_arguments_differs_from_one_of_trainer(model: str, tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"max_steps is a field of TrainingArguments.*arguments="):
        preset("lean", model=model).trainer(str(tmp_path), max_steps=3)


def test_without_a_gpu_the_way_on_is_named(model: str, tmp_path: Path) -> None:
    with pytest.raises(RunError, match=re.escape("arguments={'use_cpu': True}")):
        preset("8bit", model=model, gpu_memory="16GB").training_arguments(str(tmp_path))


def test_nothing_that_fits_is_not_called_fitting() -> None:
    setup = preset("8bit", model="gpt2-xl", gpu_memory="4GB", global_batch_size=8, use_hub=False)
    assert any("needs at least" in problem for problem in setup.problems)
    (reason,) = (s.reason for s in setup.settings if s.key == "arguments.per_device_train_batch_size")
    assert reason.endswith("the smallest: it cannot fit, even without activations")


@pytest.mark.slow
def test_a_script_that_sizes_its_batch_is_predicted_with_it(memkit: Memkit, model: str, tmp_path: Path) -> None:
    """Would notice: the process that traces sizes taken for a training, or another batch than in the run."""
    (tmp_path / "train.py").write_text(
        "from datasets import Dataset\n"
        "from hf_memkit import preset\n"
        f"setup = preset('checkpointed', model={model!r}, gpu_memory='16GB', global_batch_size=8)\n"
        "rows = Dataset.from_dict({'input_ids': [[1] * 8] * 16, 'labels': [[1] * 8] * 16})\n"
        "trained = setup.load_model(random_weights=True)\n"
        "setup.trainer('out', train_dataset=rows, model=trained).train()\n"
    )
    ran = memkit("predict", "train.py", "--gpu", "T4", "--no-search", "--json")
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert json.loads(ran.stdout)["request"]["micro_batch_size"] == 8


@pytest.mark.operators
def test_offload_trains_with_memkits_own_operators(model: str, data: Dataset, tmp_path: Path) -> None:
    """In a separate process: DeepSpeed leaves a process group behind."""
    import subprocess
    import sys

    script = tmp_path / "script.py"
    script.write_text(
        "from datasets import Dataset\n"
        "from hf_memkit import preset\n"
        f"own = {dict(CPU, max_steps=2)!r}\n"
        f"data = Dataset.from_dict({data.to_dict()!r})\n"
        f"setup = preset('offload', model={model!r}, gpu_memory='16GB', global_batch_size=4, arguments=own)\n"
        f"trainer = setup.trainer({str(tmp_path / 'out')!r}, train_dataset=data)\n"
        "trainer.train()\n"
        "print('STEPS', trainer.state.global_step, type(trainer.model_wrapped).__name__)\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, cwd=tmp_path, timeout=500)
    assert "STEPS 2 DeepSpeedEngine" in done.stdout, done.stderr[-3000:]
