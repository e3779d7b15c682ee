"""The options of `memkit recipe` → the setup for the machine in question, and what of it runs here.

Imports of torch and transformers happen inside the functions, so that `memkit --help` stays quick.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hf_memkit.cli.recipe_options import Options
    from hf_memkit.hardware import Gpu, Machine
    from hf_memkit.predict import Prediction
    from hf_memkit.recipe.launch import Place
    from hf_memkit.recipe.resolve import Overrides, Resolved
    from hf_memkit.recipe.run import Run
    from hf_memkit.recipe.schema import Recipe

__all__ = ["check_options", "resolve_options", "usual_gpus"]


def check_options(options: Options) -> None:
    """Judges the options and the data, before a model is described, the hub is asked, or a process is started.

    Raises:
        InputError: there is no such recipe, variant, model or card, or a value is wrong.
        DataError: what `--data` names cannot be used.
    """
    from hf_memkit.described import described_gpu
    from hf_memkit.models import hub_switched_off
    from hf_memkit.recipe.resolve import refuse_wrong
    from hf_memkit.recipe.run_settings import check_data
    from hf_memkit.recipe.schema import load_recipe
    from hf_memkit.recipe.sources import is_local
    from hf_memkit.techniques.batch import split_batch
    from hf_memkit.units import parse_size

    recipe = load_recipe(options.name)
    described_gpu(options.gpu, options.gpu_memory)
    if options.ram:
        parse_size(options.ram, "RAM")
    gpus, nodes = options.gpus or recipe.gpus, options.nodes or 1
    overrides = _overrides(options, recipe, gpus, nodes)
    refuse_wrong(recipe, overrides)
    if gpus >= recipe.gpus:  # a rehearsal in fewer processes stands for as many as the recipe is for
        split_batch(recipe.sequences_per_step, 1, gpus * nodes, overrides.settings)
    # What is only shown downloads no data set.
    if options.data is not None and (not options.shown_only or hub_switched_off() or is_local(options.data)):
        check_data(recipe, options.data)


def _overrides(options: Options, recipe: Recipe, gpus: int, nodes: int) -> Overrides:
    from hf_memkit.recipe.resolve import Overrides
    from hf_memkit.recipe.settings import parse_settings
    from hf_memkit.recipe.tasks import find_task

    return Overrides(
        variant=options.variant,
        model=options.model,
        data=options.data,
        max_steps=options.max_steps,
        sequence_length=options.sequence_length,
        output=options.output,
        nvme_path=options.nvme_path,
        gpus=gpus,
        nodes=nodes,
        settings=parse_settings(options.setting, further=find_task(recipe.task).further_arguments),
    )


def usual_gpus(options: Options) -> int:
    """The cards that the recipe is for; where there is none to run on, two processes rehearse for them all."""
    from hf_memkit.described import described_gpu
    from hf_memkit.hardware import this_machine
    from hf_memkit.recipe.schema import load_recipe

    usual = load_recipe(options.name).gpus  # a wrong name is told at once
    if usual == 1:
        return usual
    described = described_gpu(options.gpu, options.gpu_memory) is not None
    rehearses = this_machine(".").gpu is None and not (described and options.shown_only)
    return min(2, usual) if rehearses else usual


def resolve_options(options: Options, place: Place) -> tuple[Resolved, Run, Prediction | None]:
    """(the setup for the machine in question; what runs here: the setup itself on a card, its rehearsal without; the
    prediction that it was chosen by, None if it was chosen by formula)."""
    from hf_memkit.described import described_gpu
    from hf_memkit.hardware import this_machine
    from hf_memkit.models import hub_reachable
    from hf_memkit.recipe.choose import choose
    from hf_memkit.recipe.rehearse import rehearse
    from hf_memkit.recipe.run import Run
    from hf_memkit.recipe.schema import load_recipe
    from hf_memkit.units import parse_size

    nvme_path = options.nvme_path
    loaded = load_recipe(options.name)
    here = this_machine(nvme_path or options.output or ".")
    described = described_gpu(options.gpu, options.gpu_memory)
    rehearses = here.gpu is None and (described is None or not options.shown_only)
    gpus = max(place.gpus, loaded.gpus) if rehearses else place.gpus
    overrides = _overrides(options, loaded, gpus, place.nodes)
    machine = here.with_gpu(described) if described else here
    machine = machine.with_ram(parse_size(options.ram)) if options.ram else machine
    if nvme_path:  # checkpoints go to another disk than the swapped states
        machine = replace(machine, output_free_bytes=this_machine(options.output or ".").disk_free_bytes)
    prediction = None
    if options.no_trace or (rehearses and not options.dry_run):
        resolved = _resolved(loaded, machine, overrides, rehearses=rehearses)
    else:
        chosen = choose(loaded, machine, overrides, use_hub=hub_reachable())
        resolved, prediction = chosen.resolved, chosen.prediction
    job = Run(loaded.name, resolved.variant, resolved.setup, gpus=place.gpus, nodes=place.nodes)
    # A card that is only described is shown.
    if here.gpu is not None and described is not None and not options.shown_only:
        _refuse_another_card(described, here.gpu)
    if rehearses:
        rehearsed = rehearse(resolved, gpus=place.gpus)
        job = replace(job, setup=rehearsed.setup, target=resolved.setup, not_rehearsed=rehearsed.not_rehearsed)
    return resolved, job, prediction


def _resolved(recipe: Recipe, machine: Machine, overrides: Overrides, *, rehearses: bool) -> Resolved:
    """Chosen by formula, or for a rehearsal by the recipe's stored predictions where they are of this very setup. A
    rehearsal needs next to nothing: where this machine's RAM or disk hold no variant, the recipe's first choice is
    rehearsed, and what stands in its way is told."""
    from hf_memkit.errors import DoesNotFitError
    from hf_memkit.models import hub_reachable
    from hf_memkit.recipe.predictions import chosen_beforehand
    from hf_memkit.recipe.resolve import resolve

    try:
        if rehearses and (found := chosen_beforehand(recipe, machine, overrides, use_hub=hub_reachable())):
            return found
        return resolve(recipe, machine, overrides, use_hub=hub_reachable())
    except DoesNotFitError:
        if not rehearses:
            raise
    first = replace(overrides, variant=next(iter(recipe.variants)))
    resolved = resolve(recipe, machine, first, use_hub=hub_reachable())
    why = "the recipe's first choice: here it is rehearsed only, and no variant's target would fit this machine"
    return replace(resolved, why=why)


def _refuse_another_card(described: Gpu, here: Gpu) -> None:
    """A setup for a card that is larger, or computes in bf16, would fail on the one that is here."""
    from hf_memkit.errors import DoesNotFitError

    if described.usable_bytes > here.usable_bytes or (described.bf16 and not here.bf16):
        raise DoesNotFitError(
            f"this machine has {here.name}, which is smaller than {described.name} or lacks its bf16; leave out --gpu "
            f"and --gpu-memory to run here, or add --dry-run or --export"
        )
