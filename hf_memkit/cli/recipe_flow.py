"""From the options of `memkit recipe` to a run: here, in processes started for it, or as one of a launcher's.

Imports of torch and transformers happen inside the functions, so that `memkit --help` stays quick.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_memkit.cli.recipe_options import (
    RunOptions,
    machine_here,
    read_request,
    refuse_data,
    rehearses,
    resolved_run,
    usual_gpus,
)
from hf_memkit.errors import InputError
from hf_memkit.recipe.ranks import (
    FOLDER_VARIABLE,
    Ranks,
    errors_to_launcher,
    leave_exit_code,
    ranks_from_environment,
)
from hf_memkit.units import GIB

if TYPE_CHECKING:
    from hf_memkit.hardware import Machine
    from hf_memkit.prediction import Prediction
    from hf_memkit.recipe.choose import Judge
    from hf_memkit.recipe.launch import Place
    from hf_memkit.recipe.output import RecipeRun
    from hf_memkit.recipe.schema import Recipe
    from hf_memkit.setup import Setup


def run_recipe(options: RunOptions) -> int:
    """Shows, exports or runs the recipe; returns the exit code."""

    ranks = ranks_from_environment()
    try:
        if ranks.launched and not options.shown_only:
            with errors_to_launcher():
                return _as_rank(options, ranks)
        return _here(options, ranks)
    except KeyboardInterrupt:  # here: typer would turn it into an exit code without a word
        if FOLDER_VARIABLE not in os.environ:  # otherwise the process that started this one says it
            print(
                "\nmemkit: interrupted; records and the last checkpoint are intact: continue with --resume",
                file=sys.stderr,
            )
        return 1


def _here(options: RunOptions, ranks: Ranks) -> int:
    """Shows or exports the setup, or runs it: in this process, or in several that are started for it."""
    from hf_memkit.cli import render
    from hf_memkit.hardware import use_one_gpu
    from hf_memkit.recipe.by_data import judge_of
    from hf_memkit.recipe.launch import launch
    from hf_memkit.recipe.output import refuse_used
    from hf_memkit.recipe.schema import load_recipe

    if options.short and not options.dry_run:
        raise InputError("--short: only with --dry-run; add it, or omit --short")
    if options.short and options.as_json:
        raise InputError("--short, --json: mutually exclusive. Omit --short: --json has everything.")
    if options.dry_run and options.export is not None:
        raise InputError(
            "--dry-run, --export: mutually exclusive. --dry-run shows the setup; --export writes it as a script."
        )
    if options.resume:
        _refuse_with_resume(options)
        job, earlier = _earlier_run(options)
        place = options.place(ranks, job.gpus, job.nodes)
        _same_processes(job, place)
        if place.processes > 1:
            return launch(replace(options, request=replace(options.request, output=job.output)).for_ranks(), place)
        use_one_gpu()
        _refuse_mistakes(job)
        return _train(job, earlier, ranks, options)
    recipe = load_recipe(options.request.recipe or "")
    request = read_request(options, recipe)
    refuse_data(options, recipe)
    if request.output and not (options.overwrite or options.shown_only):
        refuse_used(request.output)  # at once: a folder of memkit's own choice is known with the setup only
    # Looking at the machine may start CUDA with every GPU in view: not before `use_one_gpu`, where one will do.
    here = machine_here(request) if recipe.gpus > 1 else None
    rehearsal = here is not None and rehearses(options, here)
    place = options.place(ranks, usual_gpus(recipe, rehearses=rehearsal))
    if place.processes > 1 and not options.shown_only:
        _refuse_too_few_gpus(place)
        return launch(options.for_ranks(), place)
    if place.gpus == 1:
        use_one_gpu()
    judge = judge_of(request)
    job, prediction = resolved_run(options, recipe, request, here or machine_here(request), place, judge)
    if options.dry_run:
        return _show(options, recipe, job, prediction, judge)
    if options.random_weights and not job.is_rehearsal:
        job = replace(job, setup=job.setup.put("model.random_weights", True, "--random-weights"))
    if options.export is not None:
        from hf_memkit.recipe.export import export_script, start_command
        from hf_memkit.recipe.run import mistakes_of_run

        for problem in job.setup.problems:
            render.say_to_stderr(f"memkit: warning: the script cannot run on this machine, which {problem}")
        for mistake in mistakes_of_run(job):
            render.say_to_stderr(f"memkit: {'warning' if mistake.refuses else 'hint'}: {mistake}")
        written = export_script(job, Path(options.export))
        return render.exported(written, options.as_json, start_command(job, str(written[0])))
    overwrite = options.overwrite or bool(request.output)
    job = _opened(job, recipe, options, prediction, judge, overwrite=overwrite)
    return _train(job, None, ranks, options)


def _opened(
    job: RecipeRun,
    recipe: Recipe,
    options: RunOptions,
    prediction: Prediction | None,
    judge: Judge,
    *,
    overwrite: bool,
) -> RecipeRun:
    """The run as it will be trained, which is told; what cannot run is refused."""
    from hf_memkit import train
    from hf_memkit.cli import render
    from hf_memkit.errors import DoesNotFitError
    from hf_memkit.recipe.output import refuse_used

    train.refuse_random_weights(job.setup)
    train.require_packages(job.setup)
    if not options.as_json:
        render.opening(recipe, job.target or job.setup, job)
    if not job.is_rehearsal and job.setup.problems:
        instead = "" if options.request.variant == "auto" else ". --variant auto takes the first that fits"
        raise DoesNotFitError(f"variant {job.variant!r} {'; '.join(job.setup.problems)}{instead}")
    if not overwrite:
        refuse_used(job.output)
    _refuse_mistakes(job)
    return _with_prediction(job, recipe, prediction, judge)


def _show(options: RunOptions, recipe: Recipe, job: RecipeRun, prediction: Prediction | None, judge: Judge) -> int:
    """Shows the setup; `prediction`: what it was chosen by, if it was, by `judge`."""
    from hf_memkit.cli import render
    from hf_memkit.cli.batches import batches_json
    from hf_memkit.cli.predict_next import next_variant
    from hf_memkit.recipe.by_data import batches_of
    from hf_memkit.recipe.run import mistakes_of_target

    target = job.target or job.setup
    mistakes = mistakes_of_target(target)
    prediction = prediction or judge(target)
    batches = batches_of(judge, target, prediction)
    if options.as_json:
        beside = {
            "checks": [mistake.to_json() for mistake in mistakes],
            "prediction": prediction.to_json(),
            "batches": batches_json(batches),
        }
        print(json.dumps({**_resolved_json(recipe, target), **job.to_json(), **beside}, indent=2))
        return 0
    fails = prediction.verdict == "does not fit"
    instead = next_variant(recipe, target, judge=judge) if fails else None
    render.setup(recipe, target, job, mistakes, prediction, instead, batches, short=options.short)
    return 0


def _resolved_json(recipe: Recipe, setup: Setup) -> dict[str, Any]:
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


def _with_prediction(job: RecipeRun, recipe: Recipe, prediction: Prediction | None, judge: Judge) -> RecipeRun:
    """The run with its prediction, which is told before the model is loaded if it says that the GPU is too small.

    A rehearsal, which runs on a CPU, has that of its target, where it is known at once. What cannot be predicted is
    not in the way of a run. `prediction`: what the setup was chosen by, if it was.
    """
    from hf_memkit.cli import render
    from hf_memkit.errors import MemkitError
    from hf_memkit.models import hub_reachable
    from hf_memkit.recipe.choose import nearest_that_fits

    if job.target is not None:
        if prediction is None:
            return job
        return replace(job, target_prediction=_of_target(prediction, job.target.resolved_for.machine))
    try:
        prediction = prediction or judge(job.setup)
        if prediction.verdict == "does not fit":
            other = nearest_that_fits(recipe, job.setup, use_hub=hub_reachable(), judge=judge)
            instead = f"; predicted to fit: --variant {other}" if other else "; no later variant is predicted to fit"
            render.say_to_stderr(f"memkit: warning: predicted not to fit: {prediction.why}{instead}")
    except MemkitError as error:
        render.say_to_stderr(f"memkit: note: no prediction: {error}")
        return job
    return replace(job, prediction=prediction.to_json())


def _of_target(prediction: Prediction, machine: Machine) -> dict[str, Any]:
    """The prediction's JSON form, with what a report says of the machine: this one's RAM and disk need not be those of
    the machine with the GPU, so that `gpu_verdict` is of the GPU alone."""
    plenty = replace(machine, ram_bytes=sys.maxsize, disk_free_bytes=sys.maxsize)
    about = {"gpu": machine.gpu.name if machine.gpu is not None else None, "ram_gib": machine.ram_bytes / GIB}
    return {**prediction.to_json(), **about, "gpu_verdict": prediction.judged(plenty).verdict}


def _as_rank(options: RunOptions, ranks: Ranks) -> int:
    """One of the processes that a launcher has started: rank 0 decides what runs, and speaks for all."""
    from hf_memkit.recipe.by_data import judge_of
    from hf_memkit.recipe.output import RecipeRun
    from hf_memkit.recipe.schema import load_recipe

    place = options.place(ranks)
    earlier: dict[str, Any] | None = None
    if not ranks.is_first:
        content, earlier = ranks.share("job")
        job = RecipeRun.from_json(content)
    else:
        if options.resume:
            _refuse_with_resume(options)
            job, earlier = _earlier_run(options)
            _same_processes(job, place)
            _refuse_mistakes(job)
        else:
            recipe = load_recipe(options.request.recipe or "")
            request = read_request(options, recipe, place.gpus, place.nodes)
            if FOLDER_VARIABLE not in os.environ:  # otherwise the process that started this one has read it
                refuse_data(options, recipe)
            judge = judge_of(request)
            job, prediction = resolved_run(options, recipe, request, machine_here(request), place, judge)
            job = _opened(job, recipe, options, prediction, judge, overwrite=options.overwrite)
        ranks.share("job", [job.to_json(), earlier])
    code = _train(job, earlier, ranks, options)
    if FOLDER_VARIABLE not in os.environ:
        return code
    leave_exit_code(ranks, code)
    return 0


def _refuse_too_few_gpus(place: Place) -> None:
    """Fewer GPUs than processes would put two of them on one GPU; none at all means a rehearsal."""
    import torch

    visible = torch.cuda.device_count()
    if 0 < visible < place.gpus:
        shown = os.environ.get("CUDA_VISIBLE_DEVICES")
        why = f"CUDA_VISIBLE_DEVICES={shown} leaves {visible}" if shown else f"this machine has {visible}"
        raise InputError(f"--gpus {place.gpus}: {why}. Give --gpus {visible} or fewer.")


def _refuse_with_resume(options: RunOptions) -> None:
    others = options.given(
        "model", "data", "gpu", "gpu_memory", "ram", "setting", "max_steps", "sequence_length", "nvme_path",
        "overwrite", "dry_run", "export",
    )  # fmt: skip
    if others:
        raise InputError(f"--resume: the run keeps its settings; omit {', '.join(others)}")


def _earlier_run(options: RunOptions) -> tuple[RecipeRun, dict[str, Any]]:
    """The run that `--resume` means, with the settings it was started with."""
    from hf_memkit.recipe.output import RecipeRun, unfinished_run
    from hf_memkit.recipe.schema import load_recipe

    request = options.request
    _folder, earlier = unfinished_run(load_recipe(request.recipe or "").name, request.variant, request.output)
    return RecipeRun.from_json(earlier), earlier


def _same_processes(job: RecipeRun, place: Place) -> None:
    """The batch, the order of the data and the parts of a ZeRO checkpoint are those of so many processes."""
    if (place.gpus, place.nodes) != (job.gpus, job.nodes):
        machines = f" on each of {job.nodes} machines" if job.nodes > 1 else ""
        options = f"--gpus {job.gpus}" + (f" --nodes {job.nodes}" if job.nodes > 1 else "")
        raise InputError(
            f"--resume: the run in {job.output} has {job.gpus} processes{machines}, among which its batch and "
            f"checkpoints are split; add {options}"
        )


def _refuse_mistakes(job: RecipeRun) -> None:
    from hf_memkit.cli import render
    from hf_memkit.recipe.run import mistakes_of_run

    found = mistakes_of_run(job)
    if mistakes := [str(problem) for problem in found if problem.refuses]:
        raise InputError("\n".join(mistakes))
    for hint in found:
        render.say_to_stderr(f"memkit: hint: {hint}")


def _train(job: RecipeRun, earlier: dict[str, Any] | None, ranks: Ranks, options: RunOptions) -> int:
    """Runs `job`; 0 if it finished, 1 if it was stopped."""
    from hf_memkit.cli import render
    from hf_memkit.recipe.output import clear
    from hf_memkit.recipe.run import run

    as_json = options.as_json
    say = render.silent if not ranks.is_first else render.say_to_stderr if as_json else render.say
    clear_first = (lambda: clear(job.output)) if options.overwrite else None
    with _stdout_to_stderr() if as_json else contextlib.nullcontext():
        content = run(job, say, ranks, resume=earlier, before_writing=clear_first)
    if ranks.is_first and as_json:
        print(json.dumps(content, indent=2))
    elif ranks.is_first:
        render.closing(job, content, options.request.recipe or "")
    return 0 if content["status"] == "finished" else 1


@contextlib.contextmanager
def _stdout_to_stderr() -> Iterator[None]:
    """Keeps standard output for the JSON: Trainer prints its log lines there."""
    with contextlib.redirect_stdout(sys.stderr):
        yield
