"""What a recipe is predicted to need, and the variant to take instead. By stored predictions: nothing is traced."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hf_memkit.catalog.hardware import Machine, gpu_of_size
from hf_memkit.cli.recipe_flow import _predict
from hf_memkit.common import resources
from hf_memkit.common.errors import InputError
from hf_memkit.common.units import GIB
from hf_memkit.recipes.schema import Recipe, load_recipe
from hf_memkit.recipes.stored_predictions import is_stored, stored_prediction
from hf_memkit.recipes.variant_search import nearest_that_fits, predict_nothing, stored_or
from hf_memkit.run.folder import RecipeRun
from hf_memkit.setup.request import Request
from hf_memkit.setup.setup import Setup
from tests.recipes.resolving import resolve


def resolved_for(recipe: Recipe, machine: Machine, size: str, **asked: object) -> Setup:
    machine = replace(machine, gpu=gpu_of_size(size))
    return resolve(recipe, machine, Request(variant="resident", **asked), use_hub=False)  # type: ignore[arg-type]


def test_the_recipe_s_own_gpu_holds_it(recipe: Recipe, machine: Machine) -> None:
    result = stored_prediction(recipe, resolved_for(recipe, machine, recipe.card))
    assert result.verdict in ("fits", "tight") and is_stored(result) and result.confidence.level == "trace"
    assert stored_prediction(recipe, resolved_for(recipe, machine, "80GB")).verdict == "fits"


@pytest.mark.parametrize("name", resources.names("recipes"))
def test_weights_and_states_alone_are_never_more_than_a_trace_needs(name: str, machine: Machine) -> None:
    """No variant that would fit is ruled out without a trace."""
    recipe = load_recipe(name)
    own = replace(machine, gpu=gpu_of_size(recipe.card), ram_bytes=2000 * GIB, disk_free_bytes=2000 * GIB)
    for variant in recipe.variants:
        setup = resolve(recipe, own, Request(variant=variant, gpus=recipe.gpus), use_hub=False)
        try:
            predicted = stored_prediction(recipe, setup)
        except InputError:  # one that cannot be traced here
            continue
        assert setup.ledger.total_bytes("device") <= predicted.smallest_cap_bytes, variant


def test_what_was_changed_is_not_stored_prediction(recipe: Recipe, machine: Machine) -> None:
    """Would notice: a prediction of AdamW in 8 bits for SGD, or of another length."""
    for asked in ({"arguments": {"weight_decay": 0.1}}, {"sequence_length": 512}):
        setup = resolved_for(recipe, machine, "80GB", **asked)
        with pytest.raises(InputError, match="--variant resident --dry-run predicts it"):
            stored_prediction(recipe, setup)


def test_a_smaller_gpu_gets_an_alternative(
    recipe: Recipe, machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    small, judge = resolved_for(recipe, machine, "12GB"), stored_or(None, recipe)
    result = judge(small)
    assert result.verdict == "does not fit"
    assert nearest_that_fits(recipe, small, use_hub=False, judge=judge) == "infinity"
    job = RecipeRun(recipe.name, small.preset, small)
    reported = _predict(job, recipe, result, judge)
    assert reported.prediction is not None and reported.prediction["verdict"] == "does not fit"
    output = capsys.readouterr().err
    assert "predicted not to fit" in output and "--variant infinity" in output
    assert RecipeRun.from_json(reported.to_json()).prediction == reported.prediction, "ranks and a resume have it too"


def test_a_rehearsal_has_that_of_its_target(recipe: Recipe, machine: Machine) -> None:
    here = resolved_for(recipe, machine, "12GB")
    job = RecipeRun(recipe.name, here.preset, here, target=here)
    without = _predict(job, recipe, None, predict_nothing)
    assert without.prediction is None and without.target_prediction is None
    result = stored_prediction(recipe, here)
    reported = _predict(job, recipe, result, predict_nothing)
    assert reported.prediction is None and reported.target_prediction is not None
    assert (
        reported.target_prediction["gpu"] == "12GB GPU" and reported.target_prediction["gpu_verdict"] == "does not fit"
    )
