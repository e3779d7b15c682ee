"""What a recipe's run counts and prints: epochs, held-out rows, the steps that ran, metrics, sizes of the target."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pytest
import torch
from transformers import Trainer

from hf_memkit.catalog.hardware import Machine
from hf_memkit.cli.recipe_answer import closing
from hf_memkit.measuring.memory.records import RecordWriter
from hf_memkit.recipes.rehearse import made_smaller, rehearse
from hf_memkit.recipes.schema import load_recipe
from hf_memkit.run.folder import RecipeRun
from hf_memkit.run.result import result_of
from hf_memkit.run.training import epochs_of
from hf_memkit.setup.request import Request
from tests.recipes.resolving import resolve
from tests.recipes.test_tokenizer import job_of
from tests.tiny_trainer import samples, trainer_in


@pytest.mark.parametrize(
    ("rows", "batch", "accumulation", "steps", "drop_last"),
    [(16, 2, 2, 4, False), (13, 2, 2, 6, False), (13, 2, 2, 4, True), (3, 4, 2, 2, False), (9, 2, 3, 1, False)],
)
def test_how_often_the_rows_are_read(
    tmp_path: Path, rows: int, batch: int, accumulation: int, steps: int, drop_last: bool
) -> None:
    trainer = trainer_in(
        tmp_path, per_device_train_batch_size=batch, gradient_accumulation_steps=accumulation, max_steps=steps,
        dataloader_drop_last=drop_last,
    )  # fmt: skip
    trainer.train_dataset = samples(rows)
    expected = epochs_of(trainer.args, rows, 1)
    trainer.train()
    assert trainer.state.epoch == pytest.approx(expected)


def test_processes_share_the_rows() -> None:
    arguments = SimpleNamespace(
        per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=10, dataloader_drop_last=False
    )
    assert epochs_of(arguments, 64, 4) == 10 * 2 * 2 * 4 / 64


@pytest.mark.compat
def test_trainer_weighs_the_last_batch_by_its_rows(tmp_path: Path) -> None:
    """Otherwise held-out rows beyond whole batches would have to be left out."""

    class Given(Trainer):  # type: ignore[misc]
        def prediction_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            return inputs["labels"][:, 0].float().mean(), None, None

    losses = [1, 1, 1, 1, 11]
    trainer = trainer_in(tmp_path, trainer_class=Given, per_device_eval_batch_size=4)
    rows = [{"input_ids": torch.tensor([loss]), "labels": torch.tensor([loss])} for loss in losses]
    assert trainer.evaluate(rows)["eval_loss"] == sum(losses) / len(losses)


@pytest.mark.parametrize(
    ("rows", "share", "most", "held_out"),
    [(548, 0.02, 128, 11), (548, 0.25, 64, 64), (2, 0.05, 16, 1), (3, 0.9, 9, 2)],
)
def test_each_row_is_trained_on_or_evaluated(
    tmp_path: Path, rows: int, share: float, most: int, held_out: int
) -> None:
    job = job_of(tmp_path)
    job.data |= {"held_out": share, "evaluated_blocks": most}
    job.arguments["per_device_eval_batch_size"] = 4
    train, evaluated = job.hold_out(datasets.Dataset.from_dict({"row": list(range(rows))}))
    assert [*train["row"], *evaluated["row"]] == list(range(rows)) and len(evaluated) == held_out


def rehearsal(name: str, machine: Machine, output: Path, *, gpus: int | None = None) -> RecipeRun:
    recipe = load_recipe(name)
    variant = next(iter(recipe.variants))
    request = Request(variant=variant, output=str(output), gpus=recipe.gpus)
    return rehearse(recipe, resolve(recipe, machine, request, use_hub=False), gpus=gpus)


RESULT: dict[str, Any] = {
    "steps": 100, "steps_run": 100, "wall_time_s": 42.0, "held_out_loss": 1.0, "held_out_loss_before": None,
    "unigram_loss": None, "metrics": {}, "optimizer_classes": ["AdamW"], "engine": "Model", "recomputed_layers": 38,
    "disk_swap_gb": None, "peak_allocated_gib": None,
}  # fmt: skip


@pytest.mark.parametrize(
    ("result", "line"),
    [
        ({}, "Done: 100 steps in 42 s."),
        ({}, "recomputed a layer 38 times in 100 steps."),
        ({"steps_run": 19}, "Done: 19 more steps, 100 in total, in 42 s."),
        ({"steps_run": 19}, "recomputed a layer 38 times in 19 steps."),
        ({"steps_run": None, "recomputed_layers": None}, "Done: 100 steps in 42 s."),  # nothing was recorded
        ({"metrics": {"accuracy": 0.93, "generated_tokens": 96.0}}, "Evaluated: accuracy 0.930, generated_tokens 96."),
    ],
)  # fmt: skip
def test_the_closing_speaks_of_the_steps_that_ran(
    small_gpu: Machine, tmp_path: Path, capsys: pytest.CaptureFixture[str], result: dict[str, Any], line: str
) -> None:
    job = replace(rehearsal("vit-large-on-8gb", small_gpu, tmp_path), target=None)
    closing(job, {"status": "finished", "result": {**RESULT, **result}})
    assert line in capsys.readouterr().out


def test_images_have_no_length_in_tokens(
    small_gpu: Machine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = rehearsal("vit-large-on-8gb", small_gpu, tmp_path)
    closing(job, {"status": "finished", "result": RESULT})
    assert re.search(r" with \d+ × \d+ images a step, \d+ steps", capsys.readouterr().out)


@pytest.mark.parametrize("rehearsed_in", [None, 1])
def test_sizes_of_several_processes(small_gpu: Machine, tmp_path: Path, rehearsed_in: int | None) -> None:
    """The target's batch counts all processes, also where fewer rehearse it."""
    job = rehearsal("llama-8b-on-2x24gb", small_gpu, tmp_path, gpus=rehearsed_in)
    assert job.target is not None and job.target_processes == 2 and job.processes == (rehearsed_in or 2)
    each = [setup.micro_batch_size * setup.accumulation for setup in (job.target, job.setup)]
    expected = ("sequences a step", each[0] * 2, each[1] * job.processes)
    assert expected in made_smaller(job)
    assert f"{expected[2]} sequences a step" in str(
        next(s.reason for s in job.setup.settings if s.key == "arguments.per_device_train_batch_size")
    )


def test_the_result_has_metrics_only_and_is_of_the_last_run(small_gpu: Machine, tmp_path: Path) -> None:
    """TRL logs the tokens that were trained on with each evaluation. Another process may write into the folder."""
    job = replace(rehearsal("qwen3-1.7b-on-16gb", small_gpu, tmp_path), target=None)
    first, second = (RecordWriter(tmp_path / "memory-rank0.jsonl") for _ in range(2))
    first.write("run", {"start_step": 0})
    second.write("run", {"start_step": 81})
    second.write("end", {"status": "finished", "step": 100, "steps": 19, "recomputed_layers": 38})
    first.write("end", {"status": "failed", "step": 7, "steps": 7, "recomputed_layers": 14})
    logged = {"loss": 2.5, "runtime": 1.0, "samples_per_second": 1.0, "steps_per_second": 1.0, "num_tokens": 59096.0}
    metrics = {"entropy": 4.098, "rows": 3}
    evaluation = {"step": 100, **{f"eval_{name}": value for name, value in {**logged, **metrics}.items()}}
    trainer: Any = SimpleNamespace(
        state=SimpleNamespace(global_step=100, log_history=[evaluation]), model_wrapped=torch.nn.Linear(1, 1),
        train_dataset=datasets.Dataset.from_dict({"input_ids": [[1]]}),
    )  # fmt: skip
    result = result_of(job, trainer)
    assert result["metrics"] == metrics and type(result["metrics"]["rows"]) is int
    assert (result["steps"], result["steps_run"], result["recomputed_layers"]) == (100, 19, 38)
