"""What a recipe is predicted to need, and the variant to take instead. By formula: traces are tested elsewhere."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hf_memkit.cli.recipe_flow import _with_prediction
from hf_memkit.cli.recipe_options import RunOptions
from hf_memkit.hardware import Machine, gpu_of_size
from hf_memkit.recipe.choose import nearest_that_fits, predicted, resolve
from hf_memkit.recipe.run import RecipeRun
from hf_memkit.recipe.schema import Recipe
from hf_memkit.request import Request
from hf_memkit.setup import Setup


def resolved_for(recipe: Recipe, machine: Machine, size: str, variant: str = "resident") -> Setup:
    machine = replace(machine, gpu=gpu_of_size(size))
    return resolve(recipe, machine, Request(variant=variant), use_hub=False)


def test_the_recipe_s_own_gpu_holds_it(recipe: Recipe, machine: Machine) -> None:
    found = predicted(resolved_for(recipe, machine, recipe.card), trace=False)
    assert found.verdict in ("fits", "tight") and found.confidence.level == "formula"
    assert predicted(resolved_for(recipe, machine, "80GB"), trace=False).verdict == "fits"


def test_a_smaller_gpu_is_told_what_to_take_instead(
    recipe: Recipe, machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    small = resolved_for(recipe, machine, "12GB")
    assert predicted(small, trace=False).verdict == "does not fit"
    assert nearest_that_fits(recipe, small, use_hub=False, trace=False) == "infinity"
    job = RecipeRun(recipe.name, small.preset, small)
    told = _with_prediction(job, recipe, RunOptions(Request(recipe=recipe.name), no_trace=True))
    assert told.prediction is not None and told.prediction["verdict"] == "does not fit"
    said = capsys.readouterr().err
    assert "predicted not to fit" in said and "--variant infinity" in said
    assert RecipeRun.from_json(told.to_json()).prediction == told.prediction, "ranks and a resume have it too"


def test_a_rehearsal_has_none(recipe: Recipe, machine: Machine) -> None:
    here = resolved_for(recipe, machine, "12GB")
    job = RecipeRun(recipe.name, here.preset, here, target=here)
    assert _with_prediction(job, recipe, RunOptions(Request(recipe=recipe.name))).prediction is None
