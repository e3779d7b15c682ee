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
        gpu = row["card"] if row["gpus"] == 1 else f"{row['gpus']} × {row['card']}"
        sizes = []
        for variant in row["variants_predicted"]:
            gib = variant["predicted_card_gib"]
            sizes.append(f"{variant['variant']} {'not predicted' if gib is None else f'{gib:.1f}'}")
        table.append((row["name"], gpu, ", ".join(sizes), row["summary"]))
    columns = ("recipe", "GPU", "variants: predicted GiB of the GPU", "what it does")
    hints = [
        "List those that fit your GPU: memkit recipe --gpu 16GB, or --gpu T4.",
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
    from hf_memkit.common.commands import command
    from hf_memkit.common.errors import InputError
    from hf_memkit.common.user_files import refuse_existing, write_text
    from hf_memkit.recipes.schema import load_recipe

    recipe = load_recipe(name)
    if target.suffix not in (".yaml", ".yml"):
        raise InputError(f"--copy {target}: not a .yaml file. Write --copy {target}.yaml")
    refuse_existing(target, overwrite=False, instead="give another name after --copy")
    write_text(target, recipe.path.read_text(encoding="utf-8"), make_folder=False)
    print(f"Wrote {target}. Change it, then type: {command('memkit', 'recipe', target)}")
    return 0


def _row(recipe: Recipe) -> dict[str, Any]:
    from hf_memkit.catalog.hardware import Machine, gpu_of_size
    from hf_memkit.recipes.stored_predictions import options

    unlimited = 2**60
    machine = Machine(gpu_of_size(recipe.card), unlimited, unlimited, ".", 1)
    predicted = {option.predicted.variant: _predicted(option) for option in options(recipe, machine)}
    unknown = {"predicted_card_gib": None}
    return {
        "name": recipe.name,
        "summary": recipe.summary,
        "task": recipe.task,
        "card": recipe.card,
        "gpus": recipe.gpus,
        "model": recipe.model.hub_id,
        "variants": list(recipe.variants),
        "variants_predicted": [{"variant": name, **predicted.get(name, unknown)} for name in recipe.variants],
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
    predicted = {options[0].recipe.name for options in (*fit, *others)}
    unknown = [recipe.name for recipe in recipes if recipe.name not in predicted]
    if as_json:
        content = {
            "gpu": machine.gpu.to_json(),
            "ram_gib": machine.ram_bytes / GIB,
            "fits": [_json(option) for options in fit for option in options],
            "does_not_fit": [_json(option) for options in others for option in options],
            "not_predicted": unknown,
        }
        print_json(content)
    else:
        show(_fitting_answer(machine, machine.gpu, fit, others, unknown))
    return 0


def _fitting_answer(
    machine: Machine, gpu: Gpu, fit: Sequence[Sequence[Option]], others: Sequence[Sequence[Option]], unknown: list[str]
) -> Answer:
    notes = [
        "Predicted, not measured. GPU, RAM: GiB, CUDA context included.",
        "batch: micro-batch · accumulation of one GPU × length.",
    ]
    if not gpu.bf16:
        here = f"with --gpu {gpu.name}, for that one (fp16)"
        notes.append(f"Without a GPU these commands rehearse for the recipe's own GPU; {here}.")
    if others:
        needs = []
        for options in others:
            least = min(options, key=lambda option: option.gpu_bytes)
            sizes = f"{format_size(least.gpu_bytes)} of the GPU, {format_size(least.ram_bytes)} of RAM"
            needs.append(f"{least.recipe.name} (its {least.predicted.variant}: {sizes})")
        notes.append(f"Does not fit: {'; '.join(needs)}.")
    if unknown:
        kind = "this kind of GPU" if gpu.bf16 else "GPUs without bf16, which most variants need"
        notes.append(f"No stored prediction for {kind}: {', '.join(unknown)}.")
        notes.append("Predict one now: memkit recipe NAME --dry-run, with this --gpu.")

    columns = ("run, or rehearse without a GPU", ">GPU", ">RAM", ">batch")
    dtype = "bf16" if gpu.bf16 else "fp16 only"
    return Answer(
        title="Recipes that fit",
        verdict=f"{gpu.name} ({format_size(gpu.capacity_bytes)}, {dtype}), {format_size(machine.ram_bytes)} of RAM",
        reason="what uses most of the GPU comes first." if fit else "no recipe fits.",
        blocks=(Table(columns, [_fitting_row(options) for options in fit], whole=True), Lines(notes)),
    )


def _fitting_row(options: Sequence[Option]) -> tuple[str | Cell, ...]:
    """A recipe's best variant that fits, with the names of the others."""
    best, *others = options
    one = best.predicted
    summary = best.recipe.summary
    if others:
        summary += f"; also fit: {', '.join(option.predicted.variant for option in others)}"
    gpus = one.gpus * one.nodes
    gpu = f"{gpus}×{best.gpu_bytes / GIB:.1f}" if gpus > 1 else f"{best.gpu_bytes / GIB:.1f}"
    batch = f"{one.micro_batch_size}·{one.accumulation} × {one.sequence_length}"
    tight = "tight" if best.verdict == "tight" else ""
    return Cell(_start(best), summary), Cell(gpu, tight), f"{best.ram_bytes / GIB:.1f}", batch


def _start(option: Option) -> str:
    """The command that runs the variant, or rehearses it without a GPU."""
    variant = option.predicted.variant
    is_first = variant == next(iter(option.recipe.variants))
    return f"memkit recipe {option.recipe.name}" + ("" if is_first else f" --variant {variant}")


def _json(option: Option) -> dict[str, Any]:
    return {
        "recipe": option.recipe.name,
        "variant": option.predicted.variant,
        "command": _start(option),
        **_predicted(option),
        "why": option.predicted.prediction.why,
    }
