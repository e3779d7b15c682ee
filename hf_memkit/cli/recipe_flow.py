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

from hf_memkit.recipe.ranks import (
    FOLDER_VARIABLE,
    Ranks,
    errors_to_launcher,
    leave_exit_code,
    ranks_from_environment,
)

if TYPE_CHECKING:
    from hf_memkit.cli.recipe_options import Options
    from hf_memkit.hardware import Gpu, Machine
    from hf_memkit.predict import Prediction
    from hf_memkit.recipe.launch import Place
    from hf_memkit.recipe.resolve import Overrides, Resolved
    from hf_memkit.recipe.run import Run
    from hf_memkit.recipe.schema import Recipe

__all__ = ["run_recipe"]


def run_recipe(options: Options) -> int:
    """Shows, exports or runs the recipe; returns the exit code."""
    from hf_memkit.cli.libraries import quiet_libraries

    quiet_libraries()
    ranks = ranks_from_environment()
    try:
        if ranks.launched and not options.shown_only:
            with errors_to_launcher():
                return _as_rank(options, ranks)
        return _here(options, ranks)
    except KeyboardInterrupt:  # here: typer would turn it into an exit code without a word
        if FOLDER_VARIABLE not in os.environ:  # otherwise the process that started this one says it
            print("\nmemkit: stopped at once; its records and checkpoints are whole: --resume", file=sys.stderr)
        return 1


def _here(options: Options, ranks: Ranks) -> int:
    """Shows or exports the setup, or runs it: in this process, or in several that are started for it."""
    from hf_memkit.cli import render
    from hf_memkit.hardware import use_one_card
    from hf_memkit.recipe.launch import launch
    from hf_memkit.recipe.mistakes import mistakes_of_run, mistakes_of_target

    if options.resume:
        _refuse_with_resume(options)
        job, earlier = _earlier_run(options)
        place = options.place(ranks, job.gpus, job.nodes)
        _same_processes(job, place)
        if place.processes > 1:
            return launch(replace(options, output=job.output).for_ranks(), place)
        use_one_card()
        _refuse_mistakes(job, None)
        return _train(job, earlier, ranks, options)
    place = options.place(ranks, _usual_gpus(options))
    if place.processes > 1 and not options.shown_only:
        _refuse_too_few_cards(place)
        return launch(options.for_ranks(), place)
    if place.gpus == 1:
        use_one_card()
    resolved, job, prediction = _resolve(options, place)
    if options.dry_run:
        from hf_memkit.recipe.predicted import predicted

        prediction = prediction or predicted(resolved, trace=not options.no_trace)
        return render.setup(resolved, job, mistakes_of_target(resolved), prediction, options.as_json)
    if options.export is not None:
        from hf_memkit.recipe.export import export_script, start_command

        for problem in job.setup.problems:
            render.say_to_stderr(f"memkit: warning: the script is for another machine: this one {problem}")
        for mistake in mistakes_of_run(job, resolved):
            render.say_to_stderr(f"memkit: warning: {mistake}")
        written = export_script(job, Path(options.export))
        return render.exported(written, options.as_json, start_command(job, str(written[0])))
    if not options.as_json:
        render.opening(resolved.recipe, resolved, job)
    _refuse_used(job, overwrite=options.overwrite)
    _refuse_mistakes(job, resolved)
    return _train(_with_prediction(job, resolved, options, prediction), None, ranks, options)


def _usual_gpus(options: Options) -> int:
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


def _with_prediction(job: Run, resolved: Resolved, options: Options, prediction: Prediction | None = None) -> Run:
    """The run with its prediction, which is told before the model is loaded if it says that the card is too small.

    A rehearsal has none: it runs on a CPU. What cannot be predicted is not in the way of a run. `prediction`: what the
    setup was chosen by, if it was.
    """
    from hf_memkit.cli import render
    from hf_memkit.errors import MemkitError
    from hf_memkit.models import hub_reachable
    from hf_memkit.recipe.predicted import nearest_that_fits, predicted

    if job.is_rehearsal:
        return job
    trace = not options.no_trace
    try:
        prediction = prediction or predicted(resolved, trace=trace)
        if prediction.verdict == "does not fit":
            other = nearest_that_fits(resolved, use_hub=hub_reachable(), trace=trace)
            instead = f"; predicted to fit: --variant {other}" if other else "; no later variant is predicted to fit"
            render.say_to_stderr(f"memkit: warning: predicted not to fit: {prediction.why}{instead}")
    except MemkitError as error:
        render.say_to_stderr(f"memkit: note: no prediction: {error}")
        return job
    return replace(job, prediction=prediction.to_json())


def _as_rank(options: Options, ranks: Ranks) -> int:
    """One of the processes that a launcher has started: rank 0 decides what runs, and speaks for all."""
    from hf_memkit.cli import render
    from hf_memkit.recipe.run import Run

    place = options.place(ranks)
    earlier: dict[str, Any] | None = None
    if not ranks.is_first:
        content, earlier = ranks.share("job")
        job = Run.from_json(content)
    else:
        if options.resume:
            _refuse_with_resume(options)
            job, earlier = _earlier_run(options)
            _same_processes(job, place)
            _refuse_mistakes(job, None)
        else:
            resolved, job, prediction = _resolve(options, place)
            if not options.as_json:
                render.opening(resolved.recipe, resolved, job)
            _refuse_used(job, overwrite=options.overwrite)
            _refuse_mistakes(job, resolved)
            job = _with_prediction(job, resolved, options, prediction)
        ranks.share("job", [job.to_json(), earlier])
    code = _train(job, earlier, ranks, options)
    if FOLDER_VARIABLE not in os.environ:
        return code
    leave_exit_code(ranks, code)
    return 0


def _resolve(options: Options, place: Place) -> tuple[Resolved, Run, Prediction | None]:
    """(the setup for the machine in question; what runs here: the setup itself on a card, its rehearsal without; the
    prediction that it was chosen by, None if it was chosen by formula)."""
    from hf_memkit.described import described_gpu
    from hf_memkit.hardware import this_machine
    from hf_memkit.models import hub_reachable
    from hf_memkit.recipe.choose import choose
    from hf_memkit.recipe.rehearse import rehearse
    from hf_memkit.recipe.resolve import Overrides
    from hf_memkit.recipe.run import Run
    from hf_memkit.recipe.schema import load_recipe
    from hf_memkit.recipe.settings import parse_settings
    from hf_memkit.recipe.tasks import find_task
    from hf_memkit.units import parse_size

    nvme_path = options.nvme_path
    loaded = load_recipe(options.name)
    here = this_machine(nvme_path or options.output or ".")
    described = described_gpu(options.gpu, options.gpu_memory)
    rehearses = here.gpu is None and (described is None or not options.shown_only)
    overrides = Overrides(
        variant=options.variant,
        model=options.model,
        data=options.data,
        max_steps=options.max_steps,
        sequence_length=options.sequence_length,
        output=options.output,
        nvme_path=nvme_path,
        gpus=max(place.gpus, loaded.gpus) if rehearses else place.gpus,
        nodes=place.nodes,
        settings=parse_settings(options.setting, further=find_task(loaded.task).further_arguments),
    )
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
    """Chosen by formula. A rehearsal needs next to nothing: where this machine's RAM or disk hold no variant, the
    recipe's first choice is rehearsed, and what stands in its way is told."""
    from hf_memkit.errors import DoesNotFitError
    from hf_memkit.models import hub_reachable
    from hf_memkit.recipe.resolve import resolve

    try:
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


def _refuse_too_few_cards(place: Place) -> None:
    """Fewer cards than processes would put two of them on one card; none at all means a rehearsal."""
    import torch

    from hf_memkit.errors import InputError

    cards = torch.cuda.device_count()
    if 0 < cards < place.gpus:
        raise InputError(
            f"--gpus {place.gpus}: this machine has {cards} that may be used here (CUDA_VISIBLE_DEVICES); "
            f"give --gpus {cards} or less"
        )


def _refuse_with_resume(options: Options) -> None:
    from hf_memkit.errors import InputError

    others = options.given(
        "model", "data", "gpu", "gpu_memory", "ram", "setting", "max_steps", "sequence_length", "nvme_path",
        "overwrite", "dry_run", "export",
    )  # fmt: skip
    if others:
        raise InputError(f"--resume goes on with the run's own settings; leave out {', '.join(others)}")


def _earlier_run(options: Options) -> tuple[Run, dict[str, Any]]:
    """The run that `--resume` means, with the settings it was started with."""
    from hf_memkit.recipe.output import unfinished_run
    from hf_memkit.recipe.run import Run
    from hf_memkit.recipe.schema import load_recipe

    _folder, earlier = unfinished_run(load_recipe(options.name).name, options.variant, options.output)
    return Run.from_json(earlier), earlier


def _same_processes(job: Run, place: Place) -> None:
    """The batch, the order of the data and the parts of a ZeRO checkpoint are those of so many processes."""
    from hf_memkit.errors import InputError

    if (place.gpus, place.nodes) != (job.gpus, job.nodes):
        machines = f" on each of {job.nodes} machines" if job.nodes > 1 else ""
        options = f"--gpus {job.gpus}" + (f" --nodes {job.nodes}" if job.nodes > 1 else "")
        raise InputError(
            f"--resume: the run in {job.output} has {job.gpus} processes{machines}, and its batch and checkpoints are "
            f"split among so many; start it with {options}"
        )


def _refuse_used(job: Run, *, overwrite: bool) -> None:
    """What cannot run here, and a folder that another run has."""
    from hf_memkit.errors import DoesNotFitError
    from hf_memkit.recipe.output import refuse_used

    if not job.is_rehearsal and job.setup.problems:
        raise DoesNotFitError(f"variant {job.variant!r} {'; '.join(job.setup.problems)}")
    if not overwrite:
        refuse_used(job.output)


def _refuse_mistakes(job: Run, resolved: Resolved | None) -> None:
    from hf_memkit.errors import InputError
    from hf_memkit.recipe.mistakes import mistakes_of_run

    if mistakes := mistakes_of_run(job, resolved):
        raise InputError("\n".join(str(mistake) for mistake in mistakes))


def _train(job: Run, earlier: dict[str, Any] | None, ranks: Ranks, options: Options) -> int:
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
        render.closing(job, content)
    return 0 if content["status"] == "finished" else 1


@contextlib.contextmanager
def _stdout_to_stderr() -> Iterator[None]:
    """Keeps standard output for the JSON: Trainer prints its log lines there."""
    with contextlib.redirect_stdout(sys.stderr):
        yield
