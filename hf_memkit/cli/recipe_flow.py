"""Runs `memkit recipe`: in this process, in processes that it starts, or as one rank of a launcher.

Functions import torch and transformers, so that `memkit --help` stays fast.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from hf_memkit.cli.environment import command_line
from hf_memkit.cli.options import flags_given
from hf_memkit.cli.printing import print_json, say, say_to_stderr
from hf_memkit.cli.recipe_options import (
    RecipeOptions,
    default_processes,
    machine_here,
    read_request,
    refuse_data,
    rehearses,
    resolve_run,
)
from hf_memkit.cli.run_folder import as_one_of_its_ranks, refuse_mistakes, refuse_too_few_gpus, run_folder, train
from hf_memkit.common.errors import InputError
from hf_memkit.common.units import GIB
from hf_memkit.run.ranks import FOLDER_VARIABLE, Ranks

if TYPE_CHECKING:
    from hf_memkit.prediction import Prediction
    from hf_memkit.recipes.schema import Recipe
    from hf_memkit.recipes.variant_search import Judge
    from hf_memkit.run.folder import RecipeRun
    from hf_memkit.setup.setup import Setup


def run_recipe(options: RecipeOptions) -> int:
    """Shows, exports or runs the recipe; returns the exit code."""
    run = _resume if options.resume else _start
    return as_one_of_its_ranks(lambda ranks: run(options, ranks))


_KEPT_BY_A_RUN: Final = (
    *("model", "data", "gpu", "gpu_memory", "ram", "settings", "max_steps", "sequence_length", "nvme_path"),
    *("overwrite", "dry_run", "export"),
)
"""Options that contradict `--resume`."""


def _resume(options: RecipeOptions, ranks: Ranks) -> int:
    from hf_memkit.recipes.schema import load_recipe
    from hf_memkit.run.folder import unfinished_run

    if others := flags_given(options, *_KEPT_BY_A_RUN):
        raise InputError(f"--resume: the run keeps its settings. Omit {', '.join(others)}")
    folder = Path()  # known by the first rank
    if ranks.is_first:
        request = options.request
        folder = unfinished_run(load_recipe(request.recipe or "").name, request.variant, request.output)
    return run_folder(folder, options, ranks)


def _start(options: RecipeOptions, ranks: Ranks) -> int:
    """Resolves the recipe, then shows, exports or runs its setup. Of several ranks, rank 0 decides what runs."""
    from hf_memkit.catalog.hardware import use_one_gpu
    from hf_memkit.recipes.by_data import judge_of
    from hf_memkit.recipes.schema import load_recipe
    from hf_memkit.run.folder import RecipeRun, refuse_used
    from hf_memkit.run.launch import launch

    if options.short and not options.dry_run:
        raise InputError("--short: only with --dry-run. Add --dry-run, or omit --short")
    if options.short and options.as_json:
        raise InputError("--short, --json: mutually exclusive. Omit --short: --json has everything.")
    if options.dry_run and options.export is not None:
        raise InputError("--dry-run, --export: mutually exclusive. Omit one of them.")
    if options.export is not None and Path(options.export).is_file():
        raise InputError(f"--export {options.export}: a file. Give a folder")
    launched = options.place(ranks) if ranks.launched else None
    if not ranks.is_first and not options.shown_only:
        return _train(RecipeRun.from_json(ranks.share("job")), ranks, options)

    recipe = load_recipe(options.request.recipe or "")
    request = read_request(options, recipe, launched)
    if options.export is not None:
        request = replace(request, output=options.export)
    if FOLDER_VARIABLE not in os.environ:  # otherwise the process that started this one has read it
        refuse_data(options, recipe)
    if request.output and not (options.overwrite or options.shown_only):
        refuse_used(request.output)  # the default folder is known only with the setup

    # `machine_here` may start CUDA with all GPUs visible, so for one GPU it comes after `use_one_gpu`.
    here = machine_here(request) if recipe.gpus > 1 else None
    rehearsal = here is not None and rehearses(options, here)
    place = launched or options.place(ranks, default_processes(recipe, rehearses=rehearsal))
    if place.processes > 1 and not options.shown_only and not launched:
        refuse_too_few_gpus(place)
        return launch(command_line, place)
    if place.gpus == 1:
        use_one_gpu()

    judge = judge_of(request)
    job, prediction = resolve_run(options, recipe, request, here or machine_here(request), place, judge)
    if options.dry_run:
        return _show(options, recipe, job, prediction, judge)
    if options.export is not None:
        return _export(job, prediction, Path(options.export), as_json=options.as_json)
    _print_and_check(job, recipe, options)
    job = _predict(job, recipe, prediction, judge)
    ranks.share("job", job.to_json())
    return _train(job, ranks, options)


def _export(job: RecipeRun, prediction: Prediction | None, folder: Path, *, as_json: bool) -> int:
    from hf_memkit.cli.recipe_answer import exported
    from hf_memkit.recipes.export import export_script, start_command
    from hf_memkit.run.training import mistakes_of_run

    for problem in job.setup.problems:
        say_to_stderr(f"memkit: warning: the script cannot run on this machine, which {problem}")
    for mistake in mistakes_of_run(job):
        say_to_stderr(f"memkit: {'warning' if mistake.refuses else 'hint'}: {mistake}")
    files = export_script(_with_prediction(job, prediction), folder)
    return exported(files, as_json, start_command(job, str(files[0])))


def _print_and_check(job: RecipeRun, recipe: Recipe, options: RecipeOptions) -> None:
    """Prints what will run, and refuses a run that cannot."""
    from hf_memkit.cli.recipe_answer import opening
    from hf_memkit.common.errors import DoesNotFitError
    from hf_memkit.run.folder import refuse_running, refuse_used
    from hf_memkit.setup import build

    build.refuse_random_weights(job.setup)
    build.require_packages(job.setup)
    if not options.as_json:
        for line in opening(recipe, job.target or job.setup, job):
            say(line)
    if not job.is_rehearsal and job.setup.problems:
        fix = "" if options.request.variant == "auto" else ". --variant auto takes the first that fits"
        raise DoesNotFitError(f"variant {job.variant!r} {'; '.join(job.setup.problems)}{fix}")
    if not options.overwrite and not options.request.output:  # a requested folder is checked earlier
        refuse_used(job.output)
    refuse_running(job.output)
    refuse_mistakes(job)


def _show(options: RecipeOptions, recipe: Recipe, job: RecipeRun, prediction: Prediction | None, judge: Judge) -> int:
    """Prints the setup. `prediction`: that by which `judge` chose it."""
    from hf_memkit.cli.predict_answer import batches_json
    from hf_memkit.cli.predict_next import next_variant
    from hf_memkit.cli.recipe_answer import setup_answer
    from hf_memkit.common.answer.terminal import show
    from hf_memkit.recipes.by_data import batches_of
    from hf_memkit.run.training import mistakes_of_target

    target = job.target or job.setup
    mistakes = mistakes_of_target(target)
    prediction = prediction or judge(target)
    batches = batches_of(judge, target, prediction)
    if options.as_json:
        content = {**_to_json(recipe, target), **job.to_json()}
        content["checks"] = [mistake.to_json() for mistake in mistakes]
        content["prediction"] = prediction.to_json()
        content["batches"] = batches_json(batches)
        print_json(content)
        return 0
    instead = None
    if prediction.verdict == "does not fit":
        instead = next_variant(recipe, target, judge=judge)
    show(setup_answer(recipe, target, job, mistakes, prediction, instead, batches), short=options.short)
    return 0


def _to_json(recipe: Recipe, setup: Setup) -> dict[str, Any]:
    job = setup.resolved_for
    assert job.model is not None  # a recipe names one
    return {
        "recipe": recipe.name,
        "variant": setup.preset,
        "why": setup.why,
        "gpus": job.gpus,
        "nodes": job.nodes,
        "rejected": [{"variant": name, "why": why} for name, why in setup.rejected],
        "machine": job.machine.to_json(),
        "model": job.model.to_json(),
        "setup": setup.to_json(),
    }


def _predict(job: RecipeRun, recipe: Recipe, prediction: Prediction | None, judge: Judge) -> RecipeRun:
    """The run with a prediction, which `judge` makes unless there is one; warns if it does not fit. Returns the run
    without one if it cannot be predicted."""
    from hf_memkit.catalog.models import hub_reachable
    from hf_memkit.common.errors import MemkitError
    from hf_memkit.recipes.variant_search import nearest_that_fits

    if job.target is None:
        try:
            prediction = prediction or judge(job.setup)
            if prediction.verdict == "does not fit":
                other = nearest_that_fits(recipe, job.setup, use_hub=hub_reachable(), judge=judge)
                fix = f"Predicted to fit: --variant {other}" if other else "No later variant is predicted to fit"
                say_to_stderr(f"memkit: warning: predicted not to fit: {prediction.why}. {fix}")
        except MemkitError as error:
            say_to_stderr(f"memkit: note: no prediction: {error}")
            return job
    return _with_prediction(job, prediction)


def _with_prediction(job: RecipeRun, prediction: Prediction | None) -> RecipeRun:
    """The run with this prediction, which for a rehearsal is that of its target."""
    if prediction is None:
        return job
    if job.target is None:
        return replace(job, prediction=prediction.to_json())
    # RAM and disk of this machine may differ from those of the machine with the GPU: `gpu_verdict` ignores them.
    machine = job.target.resolved_for.machine
    plenty = replace(machine, ram_bytes=sys.maxsize, disk_free_bytes=sys.maxsize)
    content = prediction.to_json()
    content["gpu"] = machine.gpu.name if machine.gpu is not None else None
    content["ram_gib"] = machine.ram_bytes / GIB
    content["gpu_verdict"] = prediction.with_verdict(plenty).verdict
    return replace(job, target_prediction=content)


def _train(job: RecipeRun, ranks: Ranks, options: RecipeOptions) -> int:
    """Writes the run's folder, then trains as `memkit run FOLDER` does."""
    from hf_memkit.recipes.export import export_script

    def write() -> None:
        try:
            Path(job.output).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            why = f"cannot be written ({error.strerror})"
            raise InputError(f"--output {job.output}: {why}. Choose another folder") from None
        export_script(job, Path(job.output))

    return train(job, ranks, options, write)
