"""`memkit recipe` without a name: lists the recipes, or those that fit a GPU. Also copies a recipe's file.

Predictions are read from `recipes/predictions.json`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_memkit.cli.printing import print_json
from hf_memkit.common.answer.answer import Answer, Cell, Lines, Table
from hf_memkit.common.answer.terminal import show
from hf_memkit.common.units import GIB, format_size

if TYPE_CHECKING:
    from hf_memkit.catalog.hardware import Gpu, Machine
    from hf_memkit.cli.recipe_options import RecipeOptions
    from hf_memkit.recipes.schema import Recipe
    from hf_memkit.recipes.stored_predictions import Option


def list_recipes(options: RecipeOptions) -> int:
    """Prints all recipes, or those that fit the described GPU, the best first."""
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
        print_json(rows)
    else:
        show(_all_answer(rows))
    return 0


def _all_answer(rows: Sequence[dict[str, Any]]) -> Answer:
    table = []
    for row in rows:
        sizes = {each["variant"]: each["predicted_card_gib"] for each in row["variants_predicted"]}
        peaks = [f"{name} {'not predicted' if gib is None else f'{gib:.1f}'}" for name, gib in sizes.items()]
        gpu = row["card"] if row["gpus"] == 1 else f"{row['gpus']} × {row['card']}"
        table.append((row["name"], gpu, ", ".join(peaks), row["summary"]))
    columns = ("recipe", "GPU", "variants: predicted GiB of the GPU", "what it does")
    hints = [
        "List what fits yours: memkit recipe --gpu 16GB [--ram 32GB], or --gpu T4.",
        "Run one: memkit recipe NAME. See its settings first: memkit recipe NAME --dry-run.",
    ]
    return Answer(
        title="Recipes",
        verdict=f"{len(rows)} recipes",
        reason="sizes are predicted, not measured, for the recipe's own GPU (bf16), with its CUDA context.",
        blocks=(Table(columns, table, whole=True), Lines(hints)),
    )


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
    predicted = {option.predicted.variant: option for option in options(recipe, machine)}
    return {
        "name": recipe.name,
        "summary": recipe.summary,
        "task": recipe.task,
        "card": recipe.card,
        "gpus": recipe.gpus,
        "model": recipe.model.hub_id,
        "variants": list(recipe.variants),
        "variants_predicted": [
            {"variant": name, **(_predicted(predicted[name]) if name in predicted else {"predicted_card_gib": None})}
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
        print_json(content)
    else:
        show(_fitting_answer(machine, machine.gpu, fit, others, unknown))
    return 0


def _fitting_answer(
    machine: Machine, gpu: Gpu, fit: Sequence[Sequence[Option]], others: Sequence[Sequence[Option]], unknown: list[str]
) -> Answer:
    rows = []
    for some in fit:
        best, one = some[0], some[0].predicted
        times = f"{one.gpus * one.nodes} × " if one.gpus * one.nodes > 1 else ""
        also = ", ".join(option.predicted.variant for option in some[1:])
        rows.append(
            (
                Cell(command(best), f"{best.recipe.summary}{f'; also fit: {also}' if also else ''}"),
                Cell(f"{times}{best.gpu_bytes / GIB:.1f}", "tight" if best.verdict == "tight" else ""),
                f"{best.ram_bytes / GIB:.1f}",
                f"{one.micro_batch_size}·{one.accumulation} × {one.sequence_length}",
            )
        )
    notes = ["Predicted, not measured. GPU, RAM: GiB, CUDA context included."]
    notes.append("batch: micro-batch · accumulation of one GPU × length.")
    if not gpu.bf16:
        notes.append(
            f"Without a GPU these commands rehearse for the recipe's own GPU; with --gpu {gpu.name}, for that "
            "one (fp16)."
        )
    if others:
        least = [min(some, key=lambda option: option.gpu_bytes) for some in others]
        needs = [
            f"{each.recipe.name} (its {each.predicted.variant}: {format_size(each.gpu_bytes)} of the GPU, "
            f"{format_size(each.ram_bytes)} of RAM)"
            for each in least
        ]
        notes.append(f"Does not fit: {'; '.join(needs)}.")
    if unknown:
        kind = "" if gpu.bf16 else " in fp16, and most variants need bf16"
        notes.append(
            f"No stored prediction for this kind of GPU{kind}: {', '.join(unknown)}. "
            f"Predict one now: memkit recipe NAME --dry-run, with this --gpu."
        )
    dtype = "bf16" if gpu.bf16 else "fp16 only"
    size, ram = format_size(gpu.capacity_bytes), format_size(machine.ram_bytes)
    table = Table(("run, or rehearse without a GPU", ">GPU", ">RAM", ">batch"), rows, whole=True)
    return Answer(
        title="Recipes that fit",
        verdict=f"{gpu.name} ({size}, {dtype}), {ram} of RAM",
        reason="what uses most of the GPU comes first.",
        blocks=(table, Lines(notes)),
    )


def command(option: Option) -> str:
    """The command that runs the variant, or rehearses it without a GPU."""
    first = next(iter(option.recipe.variants))
    name = option.predicted.variant
    return f"memkit recipe {option.recipe.name}" + ("" if name == first else f" --variant {name}")


def _json(option: Option) -> dict[str, Any]:
    return {
        "recipe": option.recipe.name,
        "variant": option.predicted.variant,
        "command": command(option),
        **_predicted(option),
        "why": option.predicted.prediction.why,
    }
