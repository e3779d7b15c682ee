"""A new head beside adapters on a GPU without bf16: its weights must be fp32, or the loss scaler stops the run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification, Trainer, TrainingArguments

from hf_memkit.catalog.hardware import Machine, named_gpu
from hf_memkit.recipes.export import export_script
from hf_memkit.recipes.export.scripts.job import TrainingJob
from hf_memkit.recipes.schema import load_recipe
from hf_memkit.run.folder import RecipeRun
from hf_memkit.setup import build
from hf_memkit.setup.request import Request
from hf_memkit.setup.setup import Setup
from tests.recipes.resolving import resolve

pytestmark = pytest.mark.bf16


@pytest.fixture(scope="module")
def on_t4(machine: Machine) -> Setup:
    """The classifier's `lora`, small, as it is on a T4: fp16 weights, fp16 autocast."""
    recipe = load_recipe("bert-large-on-8gb")
    setup = resolve(recipe, machine.with_gpu(named_gpu("T4")), Request(variant="lora"), use_hub=False)
    small = {**setup["model.architecture"], **recipe.rehearsal.model}
    return setup.put("model.architecture", small, "small")


def test_trained_parameters_are_fp32(on_t4: Setup, tmp_path: Path) -> None:
    setup = on_t4.put("arguments.use_cpu", True, "here")
    assert setup["model.dtype"] == "float16" and setup["arguments.fp16"]
    model = build.build_model(setup, lambda line: None, values={"num_labels": 3})

    trainer = Trainer(model, TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none"))
    trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
    assert any("classifier" in name and each.dtype is torch.float16 for name, each in trained.items()), (
        "as PEFT has it"
    )
    build.after_making(setup, trainer)
    assert {each.dtype for each in trained.values()} == {torch.float32}
    assert {each.dtype for each in model.parameters() if not each.requires_grad} == {torch.float16}


def test_the_script_does_the_same(on_t4: Setup, tmp_path: Path) -> None:
    export_script(
        RecipeRun("bert-large-on-8gb", "lora", on_t4.put("arguments.use_cpu", True, "here")), tmp_path / "job"
    )
    job = TrainingJob(tmp_path / "job")
    del job.model_parts["mean_loss"]  # a file beside the script
    model = job.load_model(AutoModelForSequenceClassification, num_labels=3)
    trainer = Trainer(model, TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none"))
    trained = [each for each in model.parameters() if each.requires_grad]
    job.prepare_trainer(trainer)
    assert any(each.dtype is torch.float16 for each in trained), "nothing scales the loss"
    trainer.args.fp16 = True
    job.prepare_trainer(trainer)
    assert {each.dtype for each in trained} == {torch.float32}
    assert {each.dtype for each in model.parameters() if not each.requires_grad} == {torch.float16}
