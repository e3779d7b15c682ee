"""`memkit recipe` without a name: the recipes, and for a GPU those that fit it. And a recipe's file, copied.

Predictions come from `recipes/predictions.json`, made beforehand; nothing is traced here.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape

from hf_memkit.cli.tables import plain_table
from hf_memkit.common.units import GIB, format_size

if TYPE_CHECKING:
    from hf_memkit.catalog.hardware import Machine
    from hf_memkit.cli.recipe_options import RecipeOptions
    from hf_memkit.recipes.schema import Recipe
    from hf_memkit.recipes.stored_predictions import Option


def list_recipes(options: RecipeOptions) -> int:
    """Prints the list: of all recipes, or of what fits the GPU that is described, best first."""
    from hf_memkit.common import resources
    from hf_memkit.recipes.schema import load_recipe

    recipes = [load_recipe(name) for name in resources.names("recipes")]
    if options.gpu or options.gpu_memory or options.ram:
        from hf_memkit.catalog.hardware import gpu_of_size

        machine = options.machine()
        if machine.gpu is None:  # --ram alone, on a machine without a GPU
            machine = machine.with_gpu(gpu_of_size("16GB"))
        return _for_machine(recipes, machine, as_json=options.as_json)
    rows = [_row(recipe) for recipe in recipes]
    if options.as_json:
        print(json.dumps(rows, indent=2))
        return 0
    table = plain_table("recipe", "GPU", "variants: predicted GiB of the GPU", "what it does")
    table.columns[0].no_wrap = True  # a name in two pieces cannot be copied
    for row in rows:
        peaks = ", ".join(_peak(variant) for variant in row["variants_predicted"])
        gpus = row["card"] if row["gpus"] == 1 else f"{row['gpus']} × {row['card']}"
        table.add_row(row["name"], gpus, escape(peaks), escape(row["summary"]))
    console = Console(highlight=False)
    console.print(table)
    console.print("Predicted, not measured, on the recipe's own GPU (bf16); CUDA context included.")
    console.print("List what fits yours: memkit recipe --gpu 16GB [--ram 32GB], or --gpu T4.")
    console.print("Run one: memkit recipe NAME. See its settings first: memkit recipe NAME --dry-run.")
    return 0


def copy_recipe(name: str, target: Path) -> int:
    """Writes the recipe's file to `target`, which must be new."""
    from hf_memkit.common.errors import InputError
    from hf_memkit.common.user_files import refuse_existing, write_text
    from hf_memkit.recipes.schema import load_recipe

    recipe = load_recipe(name)
    if target.suffix not in (".yaml", ".yml"):
        raise InputError(f"--copy {target}: not a .yaml file; write --copy {target}.yaml")
    refuse_existing(target, overwrite=False, instead="give another name after --copy")
    write_text(target, recipe.path.read_text(encoding="utf-8"), make_folder=False)
    print(f"Wrote {target}. Change it, then: memkit recipe {target}")
    return 0


def _row(recipe: Recipe) -> dict[str, Any]:
    from hf_memkit.catalog.hardware import Machine, gpu_of_size
    from hf_memkit.recipes.stored_predictions import options

    endless = 2**60
    machine = Machine(gpu_of_size(recipe.card), endless, endless, ".", 1)
    found = {option.predicted.variant: option for option in options(recipe, machine)}
    return {
        "name": recipe.name,
        "summary": recipe.summary,
        "task": recipe.task,
        "card": recipe.card,
        "gpus": recipe.gpus,
        "model": recipe.model.hub_id,
        "variants": list(recipe.variants),
        "variants_predicted": [
            {"variant": name, **(_predicted(found[name]) if name in found else {"predicted_card_gib": None})}
            for name in recipe.variants
        ],
    }


def _predicted(option: Option) -> dict[str, Any]:
    one = option.predicted
    return {
        "predicted_card_gib": option.gpu_bytes / GIB,
        "predicted_allocated_gib": one.prediction.peak_allocated_bytes / GIB,
        "ram_gib": option.ram_bytes / GIB,
        "disk_gib": (one.prediction.disk_bytes or 0) / GIB,
        "verdict": option.verdict,
        "checkpointing": one.checkpointing,
        "micro_batch_size": one.micro_batch_size,
        "accumulation": one.accumulation,
        "sequence_length": one.sequence_length,
        "gpus": one.gpus,
        "nodes": one.nodes,
    }


def _peak(variant: dict[str, Any]) -> str:
    size = variant["predicted_card_gib"]
    return f"{variant['variant']} {'not predicted' if size is None else f'{size:.1f}'}"


def _for_machine(recipes: list[Recipe], machine: Machine, *, as_json: bool) -> int:
    from hf_memkit.recipes.stored_predictions import fitting

    assert machine.gpu is not None
    fit, others = fitting(recipes, machine)
    named = {option.recipe.name for some in (*fit, *others) for option in some}
    unknown = [recipe.name for recipe in recipes if recipe.name not in named]
    if as_json:
        content = {
            "gpu": machine.gpu.to_json(),
            "ram_gib": machine.ram_bytes / GIB,
            "fits": [_json(option) for some in fit for option in some],
            "does_not_fit": [_json(option) for some in others for option in some],
            "not_predicted": unknown,
        }
        print(json.dumps(content, indent=2))
        return 0
    dtype = "bf16" if machine.gpu.bf16 else "fp16 only"
    console = Console(highlight=False)
    console.print(
        escape(f"{machine.gpu.name} ({format_size(machine.gpu.capacity_bytes)}, {dtype}), "
               f"{format_size(machine.ram_bytes)} of RAM. What uses most of the GPU comes first.")
    )  # fmt: skip
    # All of it fits 80 columns.
    table = plain_table("run, or rehearse without a GPU", "GPU", "RAM", "batch ×\nlength")
    # A command in two pieces cannot be copied: it has its line whatever the width.
    table.columns[0].min_width = max((len(command(some[0])) for some in fit), default=0)
    table.columns[-1].no_wrap = True
    for some in fit:
        best, one = some[0], some[0].predicted
        times = f"{one.gpus * one.nodes} × " if one.gpus * one.nodes > 1 else ""
        tight = "\ntight" if best.verdict == "tight" else ""
        also = ", ".join(option.predicted.variant for option in some[1:])
        table.add_row(
            escape(command(best)),
            f"{times}{best.gpu_bytes / GIB:.1f}{tight}",
            f"{best.ram_bytes / GIB:.1f}",
            f"{one.micro_batch_size}·{one.accumulation} × {one.sequence_length}",
        )
        table.add_row(f"[dim]{escape(best.recipe.summary)}{f'; also fit: {also}' if also else ''}[/dim]", "", "", "")
    console.print(table)
    console.print(
        "Predicted, not measured. GPU, RAM: GiB, CUDA context included. batch: micro-batch · accumulation of one GPU."
    )
    if not machine.gpu.bf16:
        console.print(
            escape(
                f"Without a GPU these commands rehearse for the recipe's own GPU; with --gpu {machine.gpu.name}, for "
                "that one (fp16)."
            )
        )
    if others:
        console.print(escape("Does not fit: " + "; ".join(_lacks(some) for some in others) + "."))
    if unknown:
        kind = "" if machine.gpu.bf16 else " in fp16, and most variants need bf16"
        console.print(
            escape(
                f"No stored prediction for this kind of GPU{kind}: {', '.join(unknown)}. "
                f"Predict one now: memkit recipe NAME --dry-run, with this --gpu."
            )
        )
    return 0


def command(option: Option) -> str:
    """What runs it; without a GPU the same command rehearses it."""
    first = next(iter(option.recipe.variants))
    name = option.predicted.variant
    return f"memkit recipe {option.recipe.name}" + ("" if name == first else f" --variant {name}")


def _lacks(some: list[Option]) -> str:
    """The recipe with its least demanding variant."""
    least = min(some, key=lambda option: option.gpu_bytes)
    sizes = f"{format_size(least.gpu_bytes)} of the GPU, {format_size(least.ram_bytes)} of RAM"
    return f"{least.recipe.name} (its {least.predicted.variant}: {sizes})"


def _json(option: Option) -> dict[str, Any]:
    return {
        "recipe": option.recipe.name,
        "variant": option.predicted.variant,
        "command": command(option),
        **_predicted(option),
        "why": option.predicted.prediction.why,
    }
