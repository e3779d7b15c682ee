"""A recipe for several GPUs: its default number of processes, also without a GPU."""

from __future__ import annotations

import json

import pytest

from hf_memkit.catalog.hardware import this_machine
from hf_memkit.catalog.models import describe
from hf_memkit.cli.recipe_options import (
    RecipeOptions,
    default_processes,
    machine_here,
    read_request,
    rehearses,
    resolve_run,
)
from hf_memkit.prediction import predict
from hf_memkit.recipes.schema import load_recipe
from hf_memkit.run.ranks import Ranks
from tests.conftest import Quick

NAME = "llama-70b-lora-on-8x80gb"

without_a_gpu = pytest.mark.skipif(this_machine(".").gpu is not None, reason="this machine has a GPU")


def default_gpus(options: RecipeOptions) -> int:
    return default_processes(
        load_recipe(options.request.recipe or ""), rehearses=rehearses(options, machine_here(options.request))
    )


@without_a_gpu
def test_as_many_as_the_recipe_says_and_two_to_rehearse() -> None:
    assert load_recipe(NAME).gpus == 8
    assert default_gpus(RecipeOptions(name=NAME)) == 2, "a rehearsal"
    assert default_gpus(RecipeOptions(name=NAME, gpu="80GB")) == 2, "what is only described does not run"
    assert default_gpus(RecipeOptions(name=NAME, gpu="80GB", dry_run=True)) == 8
    assert default_gpus(RecipeOptions(name="gpt2-on-16gb")) == 1


@without_a_gpu
@pytest.mark.parametrize(("asked", "processes"), [(None, 2), (1, 1)])
def test_a_rehearsal_is_of_all_the_gpus(asked: int | None, processes: int) -> None:
    options = RecipeOptions(name=NAME, output="run", gpus=asked)
    recipe = load_recipe(NAME)
    request = read_request(options, recipe)
    job, _ = resolve_run(
        options, recipe, request, machine_here(request), options.place(Ranks(), default_gpus(options)), predict
    )
    assert job.target is not None and job.target.resolved_for.gpus == 8 and job.gpus == processes
    assert job.target["arguments.per_device_train_batch_size"] == 4
    (left_out,) = [each for each in job.not_rehearsed if each.key == "environment.WORLD_SIZE"]
    assert left_out.value == 8 and str(processes) in left_out.reason
    batch = job.setup["arguments.per_device_train_batch_size"] * job.setup["arguments.gradient_accumulation_steps"]
    assert batch * processes == load_recipe(NAME).rehearsal.sequences_per_step


@without_a_gpu
def test_dry_run_is_for_all_the_gpus(memkit_here: Quick) -> None:
    ran = memkit_here("recipe", NAME, "--gpu", "80GB", "--ram", "512GB", "--dry-run", "--json")
    assert ran.returncode == 0, ran.stderr
    content = json.loads(ran.stdout)
    assert content["gpus"] == 8 and not content["setup"]["problems"]


def test_an_architecture_with_a_word_a_layer_can_be_made_small() -> None:
    """Qwen3's config lists the type of each layer, and compares their number."""
    recipe = load_recipe("qwen3-1.7b-on-16gb")
    small = describe(
        recipe.model.hub_id, recipe.model.architecture, use_hub=False, changes=dict(recipe.rehearsal.model)
    )  # fmt: skip
    assert small.layers == 2 and describe("x", small.config, use_hub=False).parameters == small.parameters
