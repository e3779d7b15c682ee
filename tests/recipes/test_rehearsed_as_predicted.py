"""A rehearsal goes through what the stored predictions choose for the GPU, and says what nobody has predicted."""

from __future__ import annotations

from typing import Any

import pytest

from hf_memkit.cli.recipe_options import RecipeOptions, machine_here, read_request, resolve_run
from hf_memkit.prediction import Prediction
from hf_memkit.recipes.resolve import resolve
from hf_memkit.recipes.schema import load_recipe
from hf_memkit.run.folder import RecipeRun
from hf_memkit.run.ranks import LaunchLayout
from hf_memkit.setup.request import Request
from hf_memkit.setup.setup import Setup
from hf_memkit.setup.techniques.registry import TECHNIQUES


def refuses(setup: Setup) -> Prediction:
    raise AssertionError("a rehearsal traces nothing")


def rehearsed(name: str, **asked: Any) -> RecipeRun:
    options, recipe = RecipeOptions(name=name, **asked), load_recipe(name)
    request = read_request(options, recipe)
    job, _ = resolve_run(options, recipe, request, machine_here(request), LaunchLayout(1, 1), refuses)
    assert job.is_rehearsal and job.target is not None
    return job


def checkpointing(job: RecipeRun) -> list[str]:
    assert job.target is not None
    return [name for name in job.target.techniques if TECHNIQUES[name].family == "checkpointing"]


@pytest.mark.parametrize("card", ["8GB", "16GB"])
def test_the_classifier_is_checkpointed_where_its_activations_need_it(card: str) -> None:
    job = rehearsed("bert-large-on-8gb", gpu=card, ram="32GB")
    assert job.variant == "8bit"
    assert checkpointing(job) == (["activation-checkpointing"] if card == "8GB" else [])
    assert bool(job.setup.get("arguments.activation_checkpointing")) == (card == "8GB")
    assert job.target is not None
    assert any("by prediction" in note or "predicted to fit" in note for note in job.target.notes)


def test_a_gpu_without_bf16_is_rehearsed_with_what_was_predicted_for_it() -> None:
    job = rehearsed("bert-large-on-8gb", gpu="T4", ram="32GB")
    assert job.variant == "checkpointed" and job.target is not None and job.target["arguments.fp16"]


def test_predicting_a_recipe_takes_the_same_choice() -> None:
    recipe = load_recipe("whisper-small-on-8gb")
    setup, _ = resolve(Request(recipe=recipe.name, gpu_memory="8GB", ram="32GB"), recipe=recipe, stored=True)
    assert "activation-checkpointing" in setup.techniques and "predicted: " in setup.why


def test_another_length_is_rehearsed_at_once_without_a_prediction() -> None:
    """Would notice: a rehearsal that traces its target first, or calls it fitting."""
    job = rehearsed("bert-large-on-8gb", gpu="8GB", ram="32GB", sequence_length=128)
    assert job.target is not None and job.target_prediction is None
    assert "not predicted: memkit recipe bert-large-on-8gb --variant 8bit --dry-run predicts it" in job.target.why
