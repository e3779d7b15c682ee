"""The classifier's recipe: its metrics against counting by hand, what it keeps of an evaluation, its settings."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from transformers import BertConfig, BertForSequenceClassification, EvalPrediction, Trainer, TrainingArguments

from hf_memkit.catalog.hardware import Machine, gpu_of_size
from hf_memkit.catalog.models import describe
from hf_memkit.components.classification_metrics import accuracy_and_f1, likeliest_class
from hf_memkit.recipes.export import export_script
from hf_memkit.recipes.export.scripts.class_rows import read
from hf_memkit.recipes.export.scripts.job import TrainingJob
from hf_memkit.recipes.rehearse import rehearse
from hf_memkit.recipes.schema import Recipe, load_recipe
from hf_memkit.recipes.tasks.made_up_texts import kinds_of_text, summaries
from hf_memkit.run.folder import RecipeRun
from hf_memkit.setup import build
from hf_memkit.setup.request import Request
from hf_memkit.setup.setup import Setup
from tests.recipes.resolving import resolve


@pytest.fixture(scope="module")
def bert() -> Recipe:
    return load_recipe("bert-large-on-8gb")


@pytest.fixture(scope="module")
def card(machine: Machine) -> Machine:
    return machine.with_gpu(gpu_of_size("8GB"))


@pytest.fixture(scope="module")
def small(bert: Recipe, card: Machine) -> Setup:
    return rehearse(bert, resolve(bert, card, Request(variant="8bit"), use_hub=False)).setup


@dataclass
class Examples:
    """What the script makes of the made-up examples."""

    held_out: Dataset
    processing_class: Any
    labels: list[str]


@pytest.fixture(scope="module")
def examples(small: Setup, tmp_path_factory: pytest.TempPathFactory) -> Examples:
    folder = tmp_path_factory.mktemp("job")
    export_script(RecipeRun("bert", "8bit", small), folder)
    job = TrainingJob(folder)
    rows = read(job.source)
    tokenizer, labels = job.load_tokenizer(rows["text"]), sorted(set(rows["label"]))
    made = [{**tokenizer(row["text"]), "labels": labels.index(row["label"])} for row in rows.select(range(40))]
    return Examples(Dataset.from_list(made), tokenizer, labels)


def test_the_published_number_of_parameters(bert: Recipe) -> None:
    """The encoder's 335 141 888 of the published checkpoint, and a new head of two classes."""
    facts = describe("x/y", bert.model.architecture, use_hub=False, auto_class="AutoModelForSequenceClassification")
    assert facts.parameters == 335_141_888 + 2 * (1024 + 1)


def by_hand(predicted: list[int], there: list[int]) -> float:
    """Macro F1 from precision and recall, class by class."""
    scores = []
    for one in sorted({*predicted, *there}):
        right = sum(f == t == one for f, t in zip(predicted, there, strict=True))
        if right == 0:
            scores.append(0.0)
            continue
        precision, recall = right / predicted.count(one), right / there.count(one)
        scores.append(2 * precision * recall / (precision + recall))
    return sum(scores) / len(scores)


@pytest.mark.parametrize("classes", [2, 7, 50])
def test_metrics_are_what_counting_gives(classes: int) -> None:
    numbers = np.random.default_rng(classes)
    predicted, there = numbers.integers(0, classes, 60), numbers.integers(0, classes, 60)
    measured = accuracy_and_f1(EvalPrediction(predictions=predicted, label_ids=there))
    assert measured["accuracy"] == pytest.approx((predicted == there).mean())
    assert measured["macro_f1"] == pytest.approx(by_hand(predicted.tolist(), there.tolist()))


def tiny(examples: Examples) -> BertForSequenceClassification:
    torch.manual_seed(0)
    labels = len(examples.labels)
    return BertForSequenceClassification(
        BertConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, vocab_size=1024,
                   max_position_embeddings=128, num_labels=labels)
    )  # fmt: skip


def test_an_evaluation_keeps_a_number_an_example(small: Setup, examples: Examples, tmp_path: Path) -> None:
    kept: list[Any] = []

    def watched(prediction: EvalPrediction) -> dict[str, float]:
        kept.append(prediction.predictions)
        return accuracy_and_f1(prediction)

    arguments = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none", disable_tqdm=True)
    model = tiny(examples)
    own = {"compute_metrics": watched, "preprocess_logits_for_metrics": likeliest_class}
    given = build.trainer_options(
        small, model=model, arguments=arguments, processing_class=examples.processing_class, own=own
    )
    given.pop("callbacks")
    trainer = Trainer(model=model, args=arguments, eval_dataset=examples.held_out, **given)
    measured = trainer.evaluate()
    assert {"eval_loss", "eval_accuracy", "eval_macro_f1"} <= measured.keys()
    assert kept[0].shape == (len(examples.held_out),) and kept[0].dtype == np.int64


@pytest.mark.parametrize("variant", ["8bit", "resident", "lora"])
def test_settings_of_the_recipe(bert: Recipe, card: Machine, variant: str) -> None:
    setup = resolve(bert, card, Request(variant=variant), use_hub=False)
    assert setup.arguments["train_sampling_strategy"] == "group_by_length"
    assert setup["trainer_parts.pad_batches"]["multiple"] >= 8 and "model_parts.mean_loss" in setup
    assert setup.arguments["prediction_loss_only"] is False and "model_parts.chunked_loss" not in setup
    assert setup.get("adapter.task_type") == ("SEQ_CLS" if variant == "lora" else None)


def test_made_up_texts_are_the_same_every_time() -> None:
    first, again = kinds_of_text(), kinds_of_text()
    assert first == again and len(first) > 300 and {row["label"] for row in first} == {
        "bytecode", "code", "documentation",
    }  # fmt: skip
    assert not any(" at 0x" in row["text"] for row in first), "addresses, which are others in every process"
    assert summaries() == summaries() and len(summaries()) > 300
