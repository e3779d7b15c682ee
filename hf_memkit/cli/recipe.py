"""`memkit recipe`: lists the recipes, shows a setup, exports it, or runs it.

Imports of torch and transformers happen inside the functions, so that `memkit --help` stays quick.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hf_memkit.cli.options import MORE, Gpu, GpuMemory, Ram, Short, with_options
from hf_memkit.cli.run_folder import FolderOptions
from hf_memkit.common.resources import documentation
from hf_memkit.common.user_files import user_path

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
def recipe(
    name: Annotated[str | None, typer.Argument(help="Recipe name or YAML file. Omit to list all recipes.")] = None,
    variant: Annotated[
        str,
        typer.Option(help="Variant of the recipe; auto: the first that fits GPU, RAM and disk.", rich_help_panel=MORE),
    ] = "auto",
    model: Annotated[
        str | None,
        typer.Option(help="Use this model (hub ID or folder) instead of the recipe's.", rich_help_panel=MORE),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(help=f"Your data: a file, a folder or a hub ID. Formats: {documentation('your-own-recipe.md')}"),
    ] = None,
    gpu: Gpu = None,
    gpu_memory: GpuMemory = None,
    ram: Ram = None,
    max_steps: Annotated[
        int | None, typer.Option(min=1, help="Stop after this many optimizer steps.", rich_help_panel=MORE)
    ] = None,
    sequence_length: Annotated[
        int | None, typer.Option(min=2, help="Tokens in a sequence.", rich_help_panel=MORE)
    ] = None,
    output: Annotated[str, typer.Option(help="Folder for checkpoints, records and the model.")] = "",
    nvme_path: Annotated[
        str | None, typer.Option(help="Folder on a fast disk, for the infinity variant.", rich_help_panel=MORE)
    ] = None,
    *,
    of_run: FolderOptions,
    setting: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Override a TrainingArguments field, except those that the variant sets. Repeatable.",
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show whether it fits and every setting with its reason. Run nothing.")
    ] = False,
    short: Short = False,
    random_weights: Annotated[
        bool,
        typer.Option(
            "--random-weights",
            help="Where the model's weights cannot be reached, train from random ones.",
            rich_help_panel=MORE,
        ),
    ] = False,
    export: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="Write a plain script that does the same.", rich_help_panel=MORE),
    ] = None,
    copy: Annotated[
        str | None, typer.Option(metavar="FILE", help="Write the recipe's YAML file, to change.", rich_help_panel=MORE)
    ] = None,
) -> int:
    """List the recipes, or run one."""
    from hf_memkit.cli.recipe_flow import run_recipe
    from hf_memkit.cli.recipe_list import copy_recipe, list_recipes
    from hf_memkit.cli.recipe_options import RunOptions
    from hf_memkit.setup.request import Request

    if name is not None and copy is not None:
        return copy_recipe(name, Path(_expand(copy) or copy))
    request = Request(
        recipe=name,
        variant=variant,
        model=_expand(model),
        data=_expand(data),
        gpu=gpu,
        gpu_memory=gpu_memory,
        ram=ram,
        max_steps=max_steps,
        sequence_length=sequence_length,
        output=_expand(output) or "",
        nvme_path=_expand(nvme_path),
    )
    options = RunOptions(
        request,
        setting=tuple(setting or ()),
        dry_run=dry_run,
        short=short,
        random_weights=random_weights,
        export=export,
        **vars(of_run),
    )
    if name is None:
        _refuse_without_name([*options.given(*_OF_ONE_RECIPE), *(["--copy"] if copy is not None else [])], variant)
        return list_recipes(gpu, gpu_memory, ram, as_json=of_run.as_json)
    return run_recipe(options)


_OF_ONE_RECIPE = (
    "model", "data", "max_steps", "sequence_length", "output", "nvme_path", "gpus", "nodes", "node_rank",
    "master_addr", "master_port", "setting", "resume", "overwrite", "dry_run", "short",
    "random_weights", "export",
)  # fmt: skip


def _refuse_without_name(given: list[str], variant: str) -> None:
    """Without a name the recipes are listed; what asks for more than that has lost its name."""
    from hf_memkit.common.errors import InputError

    given += ["--variant"] if variant != "auto" else []
    if given:
        raise InputError(
            f"{', '.join(given)}: no recipe named. Write memkit recipe NAME {given[0]} …, such as bert-large-on-8gb; "
            f"memkit recipe lists all names"
        )


def _expand(path: str | None) -> str | None:
    """`~` stands for the home folder also where the shell leaves it alone, as in `--output=~/runs`."""
    return str(user_path(path)) if path and path.startswith("~") else path
