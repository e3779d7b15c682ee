"""A recipe's setup, chosen by its stored predictions where they are of it, and by nobody else: nothing is traced."""

from __future__ import annotations

from hf_memkit.catalog.hardware import Machine
from hf_memkit.recipes.schema import Recipe
from hf_memkit.recipes.variant_search import choose, stored_or
from hf_memkit.setup.request import Request
from hf_memkit.setup.setup import Setup


def resolve(recipe: Recipe, machine: Machine, request: Request, *, use_hub: bool) -> Setup:
    return choose(recipe, machine, request, use_hub=use_hub, judge=stored_or(None, recipe))[0]
