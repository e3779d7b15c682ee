"""The answers of `memkit recipe`: a setup, the start and the end of a run, an export."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_memkit.cli import predict_answer
from hf_memkit.cli.printing import print_json, say
from hf_memkit.cli.setup_blocks import ledger_block, settings_block, short_value
from hf_memkit.common.answer.answer import Answer, Lines, View, only
from hf_memkit.common.commands import command
from hf_memkit.common.units import GIB
from hf_memkit.setup.job import gpu_shortage, shortages

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hf_memkit.checks import Problem
    from hf_memkit.cli.predict_next import NextVariant
    from hf_memkit.prediction import Prediction
    from hf_memkit.prediction.script_prediction import BatchNeeds
    from hf_memkit.recipes.schema import Recipe
    from hf_memkit.run.folder import RecipeRun
    from hf_memkit.setup.setup import Setup


def setup_answer(
    recipe: Recipe,
    target: Setup,
    job: RecipeRun,
    mistakes: Sequence[Problem],
    prediction: Prediction,
    instead: NextVariant | None = None,
    batches: BatchNeeds | None = None,
) -> Answer:
    """The verdict, what to change, problems and the prediction; then the ledger and all settings with reasons.

    Args:
        instead: a variant that fits, if this one does not.
        batches: predictions for batches of real data.
    """
    problems = [f"PROBLEM: {mistake}" for mistake in mistakes if mistake.refuses]
    problems += [f"PROBLEM: {line}" for line in _beside_the_verdict(target, prediction.why)]
    hints = [f"HINT: {mistake}" for mistake in mistakes if not mistake.refuses]
    change = [
        *predict_answer.batch_sentences(prediction, batches),
        *predict_answer.advice_for(prediction, target, instead),
    ]
    what = f"{recipe.name}, variant {target.preset}; {target['model.name']}"
    first = predict_answer.opening(prediction, f"{what}; {predict_answer.batch_of(target)} per GPU", change)
    rest = "Omit --short to see every setting with its reason, the ledger and notes."
    here = ["This is what runs here. For the setup on a GPU: --gpu NAME or --gpu 16GB."] if job.is_rehearsal else []
    *numbers, _ = predict_answer.details(prediction)
    if problems:  # it would not train, even if it fits
        blocks = (Lines(problems[1:], "warning"), Lines([first.headline]), *first.blocks)
        first = Answer(title=first.title, verdict=problems[0], state="bad", blocks=blocks)
    return first.then(
        Lines(hints, "warning"),
        Lines([f"Not {name}: {why}" for name, why in target.rejected], views=View.SHORT),
        Lines(list(opening(recipe, target, job, problems=False)), heading="The run", views=View.TERMINAL),
        numbers[0],
        Lines([rest], views=View.SHORT),
        *only(View.TERMINAL, *numbers[2:], ledger_block(target.ledger), settings_block(job.setup.settings)),
        Lines([*_left_out(job), *here], views=View.TERMINAL),
    )


def _beside_the_verdict(setup: Setup, why: str) -> list[str]:
    """The problems that the prediction's verdict does not contain: it covers the GPU, and RAM and disk if `why` names
    them."""
    machine = setup.resolved_for.machine
    covered = gpu_shortage(setup.ledger, machine)
    for line in shortages(setup.ledger, machine):
        covered += [line for what in ("of RAM", "of disk") if what in line and what in why]
    return [each for each in setup.problems if each not in covered and "predicted not to fit" not in each]


def opening(recipe: Recipe, target: Setup, job: RecipeRun, *, problems: bool = True) -> Iterator[str]:
    """Lines: what will run and why; with the problems on this machine if `problems`."""
    model, gpu = target.resolved_for.model, target.resolved_for.machine.gpu
    assert model is not None and gpu is not None
    yield recipe.summary
    yield f"Variant {target.preset}: {target.why}."
    for name, why in target.rejected:
        yield f"  not {name}: {why}"
    usable = f"{gpu.usable_bytes / GIB:.1f} GiB available after the CUDA context (assumed)"
    yield f"GPU: {gpu.name} ({gpu.source}); {usable}."
    yield f"Model: {model.name}, {model.parameters:,} parameters."
    if model.origin == "architecture":
        yield "  WARNING: its weights cannot be reached. Give a folder that has them: --model FOLDER."
    for note in target.notes:
        yield f"Note: {note}"
    for problem in target.problems if problems else ():
        yield f"PROBLEM: {problem}"
    if job.is_rehearsal:
        import torch

        why = "This machine has no GPU"
        if Path("/dev/nvidiactl").exists() and torch.version.cuda is None:
            why = f"torch {torch.__version__} is a CPU build and cannot use this machine's GPU"
        yield f"{why}, so this is a REHEARSAL: a small model trains with the same techniques."
        for setting in job.setup.settings:
            if setting.key == "trainer_parts.fp32_products":
                yield f"bf16: {setting.reason}."


def closing(job: RecipeRun, content: dict[str, Any]) -> None:
    """Prints the result of a run, and what a rehearsal does not show."""
    from hf_memkit.recipes.rehearse import made_smaller
    from hf_memkit.recipes.tasks import task_of

    result = content["result"]
    say("")
    if content["status"] == "interrupted":
        say(f"Stopped after step {result['steps']}. Continue: {command('memkit', 'run', job.output, '--resume')}")
        return
    adapted = job.is_rehearsal and bool(job.setup.section("adapter"))
    steps, ran = result["steps"], result["steps_run"]
    done = f"{steps} steps" if ran in (None, steps) else f"{ran} more steps, {steps} in total,"
    say(f"Done: {done} in {result['wall_time_s']:.0f} s. {_losses(result, adapted=adapted)}")
    if metrics := result.get("metrics"):
        say(f"Evaluated: {', '.join(f'{name} {_number(value)}' for name, value in metrics.items())}.")
    say(f"Optimizer: {' > '.join(result['optimizer_classes'] or ['unknown'])}; engine: {result['engine']}.")
    if recomputed := result["recomputed_layers"]:
        say(f"Checkpointing recomputed a layer {recomputed} times in {ran} steps.")
    if result["disk_swap_gb"]:
        say(f"On disk at the end: {result['disk_swap_gb']:.3f} GB of swapped states (removed).")
    if result["peak_allocated_gib"] is not None:
        say(f"Peak on the GPU, measured: {result['peak_allocated_gib']:.2f} GiB allocated.")
    say(f"Model: {job.output}/model   Records: {job.output}/memory-rank0.jsonl")
    if job.target is None:
        return
    say("")
    say(f"This was a REHEARSAL of variant {job.variant} on a machine without a GPU. GPU memory was not measured.")
    target, task = job.target, task_of(job.target)
    processes = f" × {job.target_processes} processes" if job.target_processes > 1 else ""
    size = f" of {target['data.sequence_length']} tokens" if task.takes_length else ""
    say(
        f"The target run trains {target['model.name']} with {target['arguments.per_device_train_batch_size']} × "
        f"{target['arguments.gradient_accumulation_steps']}{processes} {task.examples_are}{size} a step, "
        f"{target['arguments.max_steps']} steps."
    )
    for problem in target.problems:
        say(f"The target run would not start on this machine: it {problem}.")
    settings = command("memkit", "recipe", job.asked, "--variant", job.variant, "--dry-run", "--gpu", "NAME")
    say(f"All its settings: {settings}")
    smaller = [f"{what} {large} → {small}" for what, large, small in made_smaller(job)]
    say(f"Smaller than the target: {', '.join(smaller)}.")
    for line in _left_out(job):
        say(line)


def exported(written: list[Path], as_json: bool, alone: str) -> int:
    if as_json:
        print_json({"files": [str(path) for path in written], "run": alone})
    else:
        for path in written:
            say(f"Wrote {path}")
        say(f"Run it: {command('memkit', 'run', written[0].parent)}")
        say(f"Alone:  {alone}")
    return 0


def _number(value: float) -> str:
    """A metric: whole numbers without decimals."""
    return f"{value:.0f}" if float(value).is_integer() else f"{value:.3f}"


def _losses(result: dict[str, Any], *, adapted: bool) -> str:
    """The held-out loss before and after. `adapted`: adapters were trained on random frozen weights, as in a
    rehearsal. Two decimals: the third differs between CPUs, and with the number of threads."""
    after, before, unigram = result["held_out_loss"], result["held_out_loss_before"], result["unigram_loss"]
    if after is None:
        return "No held-out loss was measured."
    start = f"{before:.2f} before, " if before is not None else ""
    loss, of_what, unit = unigram, "the same blocks' unigram distribution", ", in nats a token"
    if loss is None:
        loss, of_what, unit = result.get("label_frequency_loss"), "always answering with the labels' frequencies", ""
    if loss is None:
        return f"Held-out loss: {start}{after:.2f} after."
    relation = "below" if after < loss else "NOT below"
    line = f"Held-out loss: {start}{after:.2f} after ({relation} the {loss:.2f} of {of_what}){unit}."
    if after >= loss and adapted:
        line += " Adapters on random frozen weights cannot reach it: in a rehearsal their loss must only fall."
    return line


def _left_out(job: RecipeRun) -> Iterator[str]:
    for setting in job.not_rehearsed:
        yield f"Not rehearsed: {setting.key} = {short_value(setting.value)}: {setting.reason}."
