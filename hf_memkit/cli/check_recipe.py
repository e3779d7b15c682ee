"""`memkit check RECIPE`: mistakes of the file itself, then of each variant's setup."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hf_memkit.checks import Problem, Subject, check
from hf_memkit.checks.reading import File
from hf_memkit.errors import InputError, RecipeError
from hf_memkit.hardware import Machine, this_machine
from hf_memkit.models import hub_reachable
from hf_memkit.recipe.resolve import resolve
from hf_memkit.recipe.schema import read_recipe
from hf_memkit.request import Request

__all__ = ["recipe_problems"]


def recipe_problems(file: File, machine: Machine | None, gpus: int | None) -> list[Problem]:
    """All mistakes of a recipe; if the file itself has none, those of every variant's setup for the recipe's card.

    `machine` is where it is meant to run; None leaves RAM and disk out.
    """
    try:
        recipe = read_recipe(file.path)
    except RecipeError as error:
        return [_problem(file, line) for line in error.problems]
    gpus, found = gpus or recipe.gpus, []
    for variant in recipe.variants:
        request = Request(variant=variant, gpus=gpus)
        try:
            setup = resolve(recipe, machine or this_machine(), request, use_hub=hub_reachable())
        except InputError as error:
            key, fix = f"variants.{variant}", "see `memkit recipe`"
            found.append(Problem("recipe", "error", str(file.path), key, None, str(error), fix))
            continue
        subject = Subject.of_setup(setup)
        subject = subject if machine else replace(subject, machine=None)
        found += [_of_variant(problem, file, variant) for problem in check(subject)]
    return found


def _problem(file: File, line: str) -> Problem:
    """A line of RecipeError, `FILE: KEY: [VALUE:] what is allowed`, as a problem."""
    _, _, rest = line.partition(f"{file.path}: ")
    key, _, what = rest.partition(": ")
    value: Any = file.content
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return Problem("recipe", "error", str(file.path), key, value, what, "write what is allowed there")


def _of_variant(problem: Problem, file: File, variant: str) -> Problem:
    return replace(problem, file=str(file.path), key=f"variants.{variant}: {problem.key}")
