"""Pairs as tokens, what an evaluation measures of them, and the Trainer that is used for them."""

from __future__ import annotations

import json
import random
import runpy
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from transformers import (
    DataCollatorForSeq2Seq,
    EvalPrediction,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
)

from hf_memkit.catalog.hardware import Machine
from hf_memkit.catalog.models import describe
from hf_memkit.common.errors import InputError
from hf_memkit.components.generating_trainer import GeneratingTrainer
from hf_memkit.components.generation_metrics import generation_metrics, rouge_l
from hf_memkit.components.stochastic_adafactor import Adafactor
from hf_memkit.recipes.export import export_script
from hf_memkit.recipes.rehearse import rehearse
from hf_memkit.recipes.schema import Recipe, load_recipe
from hf_memkit.recipes.tasks import find_task
from hf_memkit.run.folder import RecipeRun
from hf_memkit.setup.request import Request
from hf_memkit.setup.setup import Setup
from tests.recipes.resolving import resolve

TASK = find_task("text-pairs")


@pytest.fixture(scope="module")
def flan_t5() -> Recipe:
    return load_recipe("flan-t5-xl-on-24gb")


@pytest.fixture(scope="module")
def small(flan_t5: Recipe, machine: Machine) -> Setup:
    from hf_memkit.catalog.hardware import gpu_of_size

    card = machine.with_gpu(gpu_of_size("24GB"))
    return rehearse(flan_t5, resolve(flan_t5, card, Request(variant="resident"), use_hub=False)).setup


@dataclass
class Examples:
    """What the script trains and evaluates on."""

    train: datasets.Dataset
    held_out: datasets.Dataset
    processing_class: Any


@pytest.fixture(scope="module")
def pairs(small: Setup, tmp_path_factory: pytest.TempPathFactory) -> Examples:
    path = tmp_path_factory.mktemp("pairs") / "pairs.jsonl"
    words = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta"]
    choose = random.Random(0)
    rows = [[choose.choice(words) for _ in range(1 + number % 200)] for number in range(300)]
    path.write_text("".join(json.dumps({"source": " ".join(row), "target": row[0]}) + "\n" for row in rows))
    folder = tmp_path_factory.mktemp("job")
    export_script(RecipeRun("flan", "resident", small.put("data.source", str(path), "asked for")), folder)
    made: list[Trainer] = []

    def ready(self: Trainer, **_: object) -> None:
        made.append(self)
        raise SystemExit

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))
        patch.setattr(Trainer, "train", ready)
        patch.setattr("sys.path", [str(folder), *sys.path])
        with pytest.raises(SystemExit):
            runpy.run_path(str(folder / "train_text_pairs.py"), run_name="__main__")
    for name in ("job", "resuming", "rows", "stopping", "pair_rows"):
        sys.modules.pop(name, None)
    return Examples(made[0].train_dataset, made[0].eval_dataset, made[0].processing_class)


def test_the_published_number_of_parameters(flan_t5: Recipe) -> None:
    """2 849 757 184 in the published checkpoint, whose output layer is its own. transformers 5.23.0 ties it to the
    embedding in a model made from its config (configuration_t5.py 75-83), and leaves it apart where a checkpoint has
    both (modeling_utils.py 2566-2572)."""
    facts = describe("x/y", flan_t5.model.architecture, use_hub=False, auto_class="AutoModelForSeq2SeqLM")
    assert facts.parameters + 32128 * 2048 == 2_849_757_184 and facts.model_class == "T5ForConditionalGeneration"


def test_sources_have_the_prefix_and_each_side_its_length(small: Setup, pairs: Examples) -> None:
    tokenizer = pairs.processing_class
    row = pairs.train[0]
    assert row.keys() == {"input_ids", "labels"}
    assert tokenizer.decode(row["input_ids"]).startswith("summarize: ")
    ends = {tokenizer.eos_token_id}
    assert {row["input_ids"][-1] for row in pairs.train} == {row["labels"][-1] for row in pairs.train} == ends
    longest = max(len(row["input_ids"]) for row in pairs.train)
    assert longest == small["data.sequence_length"]
    assert len(pairs.train) == 300 - round(0.02 * 300) and len(pairs.held_out) == 4, "whole batches are evaluated"


def test_the_same_data_has_the_same_checksum_and_other_data_another(
    small: Setup, pairs: Examples, tmp_path: Path
) -> None:
    from hf_memkit.run.training import checksum

    pairs.train.save_to_disk(str(tmp_path / "train"))
    assert checksum(datasets.load_from_disk(str(tmp_path / "train"))) == checksum(pairs.train)
    assert checksum(pairs.train.select([*range(1, len(pairs.train)), 0])) != checksum(pairs.train)


def test_rouge_l_is_the_paper_s() -> None:
    """The examples of Lin 2004, section 3.1: two of three words in order."""
    assert rouge_l("police kill the gunman", "police killed the gunman") == 0.75
    assert rouge_l("the gunman kill police", "police killed the gunman") == 0.5
    assert rouge_l("The Gunman!", "the gunman") == 1.0
    assert rouge_l("", "the gunman") == rouge_l("the gunman", "") == rouge_l("a", "b") == 0.0
    assert rouge_l("Дом мал", "дом велик") == 0.5, "words of any script count"


def test_metrics_read_generated_tokens(pairs: Examples) -> None:
    tokenizer = pairs.processing_class
    ids = [tokenizer(text)["input_ids"] for text in ("alpha beta", "gamma", "delta")]
    wide = max(map(len, ids)) + 2
    labels = np.array([row + [-100] * (wide - len(row)) for row in ids])
    result = np.array([[tokenizer.pad_token_id, *row, *[tokenizer.pad_token_id] * (wide - len(row))] for row in ids])
    result[1] = result[2]
    measured = generation_metrics(tokenizer)(EvalPrediction(predictions=result, label_ids=labels))
    assert measured["exact_match"] == pytest.approx(2 / 3) and measured["rouge_l"] == pytest.approx(2 / 3)
    assert measured["generated_tokens"] == pytest.approx(np.mean([len(ids[i]) - 1 for i in (0, 2, 2)]))


def test_a_model_whose_decoder_does_not_know_how_to_begin(tmp_path: Path) -> None:
    T5Config(d_model=32, d_kv=16, d_ff=32, num_layers=1, num_heads=2).save_pretrained(tmp_path)
    with pytest.raises(InputError, match="has no decoder_start_token_id"):
        describe(str(tmp_path), use_hub=False, auto_class=TASK.auto_class)


def test_a_trainer_that_generates_takes_an_optimizer_and_keeps_no_logits(
    small: Setup, pairs: Examples, tmp_path: Path
) -> None:
    seen: list[Any] = []
    measure = generation_metrics(pairs.processing_class)
    options = {"data_collator": DataCollatorForSeq2Seq(pairs.processing_class)}

    def watched(prediction: EvalPrediction) -> dict[str, float]:
        seen.append(prediction)
        result: dict[str, float] = measure(prediction)
        return result

    arguments = Seq2SeqTrainingArguments(
        output_dir=str(tmp_path), use_cpu=True, max_steps=2, report_to="none", predict_with_generate=True,
        generation_max_length=9, per_device_eval_batch_size=3, disable_tqdm=True, save_strategy="no",
    )  # fmt: skip
    sizes = {"d_model": 32, "d_kv": 16, "d_ff": 32, "num_layers": 1, "num_decoder_layers": 1, "num_heads": 2}
    config = T5Config(vocab_size=len(pairs.processing_class), decoder_start_token_id=0, **sizes)
    trainer = GeneratingTrainer(
        model=T5ForConditionalGeneration(config), args=arguments, train_dataset=pairs.train,
        eval_dataset=pairs.held_out, processing_class=pairs.processing_class, compute_metrics=watched,
        optimizer_cls_and_kwargs=(Adafactor, {"lr": 1e-3}), **options,
    )  # fmt: skip
    trainer.train()
    assert type(trainer.optimizer.optimizer) is Adafactor
    measured = trainer.evaluate()
    assert {"eval_loss", "eval_exact_match", "eval_rouge_l", "eval_generated_tokens"} <= measured.keys()
    kept = seen[0].predictions  # token ids, padded: no logits
    assert kept.ndim == 2 and len(kept) == len(pairs.held_out) and kept.dtype.kind == "i"


def test_settings_of_the_recipe(flan_t5: Recipe, machine: Machine) -> None:
    from hf_memkit.catalog.hardware import gpu_of_size

    setup = resolve(flan_t5, machine.with_gpu(gpu_of_size("24GB")), Request(variant="resident"), use_hub=False)
    assert setup["trainer.arguments_class"] == "transformers:Seq2SeqTrainingArguments"
    assert setup.arguments["predict_with_generate"] is True and setup.arguments["prediction_loss_only"] is False
    assert setup.arguments["generation_max_length"] == 129 and setup["data.target_length"] == 128
    assert setup["optimizer.class"].endswith("stochastic_adafactor:Adafactor")
    assert "model_parts.chunked_loss" not in setup and "model_parts.mean_loss" in setup
    assert setup["model.dtype"] == "bfloat16" and not setup.arguments["fp16"]


def test_a_gpu_without_bf16_is_refused(flan_t5: Recipe, machine: Machine) -> None:
    from hf_memkit.catalog.hardware import named_gpu

    setup = resolve(flan_t5, machine.with_gpu(named_gpu("T4")), Request(variant="resident"), use_hub=False)
    assert any("computes in bf16" in problem for problem in setup.problems)
