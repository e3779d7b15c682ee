"""`memkit recipe`: lists the recipes, shows a setup, exports it, or runs it.

Imports of torch and transformers happen inside the functions, so that `memkit --help` stays quick.
"""

from __future__ import annotations

from pathlib import Path

from hf_memkit.cli.environment import refuse_without_libraries
from hf_memkit.cli.options import flags_given, with_options
from hf_memkit.cli.recipe_options import RecipeOptions, expand
from hf_memkit.common.errors import InputError

EXAMPLES = """[bold]Examples[/bold]

  memkit recipe                                        list them

  memkit recipe --gpu 16GB                             those that fit

  memkit recipe gpt2-on-16gb --data my.txt             train, or rehearse

  memkit recipe gpt2-on-16gb --dry-run --short --gpu T4

      FITS: needs up to 12.2 GiB; T4 has 14.6 GiB.

  memkit recipe gpt2-on-16gb --set learning_rate=1e-5

  memkit recipe bert-large-on-8gb --copy mine.yaml     its file, to change
"""


@with_options
def recipe(*, options: RecipeOptions) -> int:
    """List the recipes, or run one."""
    from hf_memkit.cli.recipe_flow import run_recipe
    from hf_memkit.cli.recipe_list import copy_recipe, list_recipes

    if options.name is None:
        if given := [flag for flag in flags_given(options) if flag not in _OF_LIST]:
            raise InputError(f"{', '.join(given)}: needs a recipe. Write memkit recipe NAME {given[0]} …")
        return list_recipes(options)
    if options.copy is not None:
        if others := [flag for flag in flags_given(options) if flag not in ("--name", "--copy")]:
            raise InputError(f"--copy copies the recipe's file; omit {', '.join(others)}")
        return copy_recipe(options.name, Path(expand(options.copy) or options.copy))
    refuse_without_libraries()
    return run_recipe(options)


_OF_LIST = ("--gpu", "--gpu-memory", "--ram", "--json")
"""Options of the list of recipes."""
