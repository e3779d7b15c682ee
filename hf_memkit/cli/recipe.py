"""`memkit recipe`: lists the recipes, shows a setup, exports it, or runs it.

Imports of torch and transformers happen inside the functions, so that `memkit --help` stays quick.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hf_memkit.cli.options import Short
from hf_memkit.user_files import user_path

__all__ = ["EXAMPLES", "recipe"]

EXAMPLES = """[bold]Examples[/bold]

  memkit recipe                                              lists the recipes

  memkit recipe --gpu 16GB                                   lists what fits this card, best first

  memkit recipe bert-large-on-8gb --copy mine.yaml           writes its file, to be changed

  memkit recipe gpt2-on-16gb --data my.txt                   runs one (rehearses it if there is no GPU)

  memkit recipe gpt2-on-16gb --dry-run --gpu T4              shows every setting for a card, with its reason

  memkit recipe gpt2-on-16gb --dry-run --short --gpu T4      whether it fits, on one screen

  memkit recipe gpt2-on-16gb --set learning_rate=1e-5        changes a field of TrainingArguments

  memkit recipe gpt2-on-16gb --gpus 4                        trains on four cards of this machine

  memkit recipe gpt2-on-16gb --resume                        goes on with a run that was stopped

  memkit recipe gpt2-on-16gb --gpu-memory 16GB --export job  writes a plain script
"""


def recipe(
    name: Annotated[str | None, typer.Argument(help="A recipe's name, or a YAML file. None: list them.")] = None,
    variant: Annotated[
        str, typer.Option(help="Which of the recipe's variants; auto: the first that fits card, RAM and disk.")
    ] = "auto",
    model: Annotated[str | None, typer.Option(help="Hub ID or local folder, instead of the recipe's model.")] = None,
    data: Annotated[
        str | None,
        typer.Option(
            help="What the recipe's task takes: a file or folder of texts, chats, tables, images, sound; or a hub ID."
        ),
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option(help="Resolve for this GPU, such as T4 or 'RTX 4090' (docs/predict.md has all), or 16GB."),
    ] = None,
    gpu_memory: Annotated[
        str | None, typer.Option(help="Resolve for a card of this size with bf16, such as 16GB.")
    ] = None,
    ram: Annotated[str | None, typer.Option(help="Resolve for this much RAM, such as 64GB.")] = None,
    max_steps: Annotated[int | None, typer.Option(min=1, help="Optimizer steps.")] = None,
    sequence_length: Annotated[int | None, typer.Option(min=2, help="Tokens in a sequence.")] = None,
    output: Annotated[str, typer.Option(help="Folder for checkpoints, records and the model.")] = "",
    nvme_path: Annotated[
        str | None, typer.Option(help="Folder on a fast disk for what the infinity variant swaps.")
    ] = None,
    gpus: Annotated[int | None, typer.Option(min=1, help="Processes on each machine, one card each.")] = None,
    nodes: Annotated[int | None, typer.Option(min=1, help="Machines.")] = None,
    node_rank: Annotated[int | None, typer.Option(min=0, help="Which of the machines this is, from 0.")] = None,
    master_addr: Annotated[str | None, typer.Option(help="Name or address of machine 0.")] = None,
    master_port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="A free port of machine 0; default 29500.")
    ] = None,
    setting: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="A field of TrainingArguments; what the variant decides is refused."
        ),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with a run that was stopped.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the run in --output.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show whether it fits, what to change, and every setting; run nothing.")
    ] = False,
    short: Short = False,
    no_trace: Annotated[
        bool,
        typer.Option(
            "--no-trace", help="Predict by formula only (causal language models): at once, and much less certain."
        ),
    ] = False,
    export: Annotated[str | None, typer.Option(metavar="DIR", help="Write a plain script that does the same.")] = None,
    copy: Annotated[
        str | None, typer.Option(metavar="FILE", help="Write the recipe's own file there, to be changed.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> int:
    """List the recipes, or run one."""
    from hf_memkit.cli.recipe_flow import run_recipe
    from hf_memkit.cli.recipe_list import copy_recipe, list_recipes
    from hf_memkit.cli.recipe_options import RunOptions
    from hf_memkit.request import Request

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
        gpus=gpus,
        nodes=nodes,
        node_rank=node_rank,
        master_addr=master_addr,
        master_port=master_port,
        resume=resume,
        overwrite=overwrite,
        dry_run=dry_run,
        short=short,
        no_trace=no_trace,
        export=export,
        as_json=as_json,
    )
    if name is None:
        _refuse_without_name([*options.given(*_OF_ONE_RECIPE), *(["--copy"] if copy is not None else [])], variant)
        return list_recipes(gpu, gpu_memory, ram, as_json=as_json)
    return run_recipe(options)


_OF_ONE_RECIPE = (
    "model", "data", "max_steps", "sequence_length", "output", "nvme_path", "gpus", "nodes", "node_rank",
    "master_addr", "master_port", "setting", "resume", "overwrite", "dry_run", "short", "no_trace",
    "export",
)  # fmt: skip


def _refuse_without_name(given: list[str], variant: str) -> None:
    """Without a name the recipes are listed; what asks for more than that has lost its name."""
    from hf_memkit.errors import InputError

    given += ["--variant"] if variant != "auto" else []
    if given:
        raise InputError(
            f"{', '.join(given)}: of which recipe? give its name, as in memkit recipe bert-large-on-8gb {given[0]} …; "
            f"memkit recipe by itself lists them"
        )


def _expand(path: str | None) -> str | None:
    """`~` stands for the home folder also where the shell leaves it alone, as in `--output=~/runs`."""
    return str(user_path(path)) if path and path.startswith("~") else path
