"""`memkit predict`: what a training will need, by phase and category, and whether it fits a GPU."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from hf_memkit.cli.options import (
    MORE,
    Args,
    Gpu,
    GpuMemory,
    Json,
    Module,
    Nodes,
    Ram,
    Script,
    ScriptArguments,
    SequenceLength,
    Set,
    Short,
    Technique,
    show_what_can_be_shown,
)
from hf_memkit.cli.printing import print_json
from hf_memkit.common.errors import InputError, SettingError
from hf_memkit.prediction.launch_command import is_command
from hf_memkit.setup.request import Request

if TYPE_CHECKING:
    from hf_memkit.prediction import Prediction
    from hf_memkit.recipes.schema import Recipe
    from hf_memkit.recipes.variant_search import Judge
    from hf_memkit.setup.setup import Setup


EXAMPLES = """[bold]Examples[/bold]

  memkit predict train.py --gpu "RTX 4090" --short -- --per_device_train_batch_size 8

      FITS: needs up to 17.1 GiB; RTX 4090 has 23.5 GiB.

  memkit predict -m trl.scripts.sft --gpu-memory 24GB -- --config sft.yaml

  memkit predict --gpu "A100 80GB" -- accelerate launch --config_file zero3.yaml train.py …

  memkit predict --model gpt2-xl --preset resident --gpu T4 --batch-size 8 --sequence-length 1024

  memkit predict --args mine.yaml --gpu "RTX 4090" --set optim=adamw_8bit

  memkit predict --recipe bert-large-on-8gb --data tickets.csv --gpu T4

  The script runs on this machine up to Trainer.train(); files that it writes before stay.
"""


def predict(
    context: typer.Context,
    script: Script = None,
    arguments: ScriptArguments = None,
    module: Module = False,
    model: Annotated[
        str | None, typer.Option(help="Instead of a script: hub ID or local folder. No weights are loaded.")
    ] = None,
    preset: Annotated[
        str | None, typer.Option(help="With --model: preset, or several joined by +. Default: Trainer's defaults.")
    ] = None,
    recipe: Annotated[str | None, typer.Option(help="Instead of a script: recipe name or YAML file.")] = None,
    variant: Annotated[
        str, typer.Option(help="With --recipe: variant; auto: the first that fits.", rich_help_panel=MORE)
    ] = "auto",
    data: Annotated[
        str | None,
        typer.Option(help="With --recipe: your data; its worst batch is predicted.", rich_help_panel=MORE),
    ] = None,
    gpu: Gpu = None,
    gpu_memory: GpuMemory = None,
    batch_size: Annotated[
        int | None,
        typer.Option(min=1, help="With --model: per_device_train_batch_size."),
    ] = None,
    sequence_length: SequenceLength = None,
    accumulation: Annotated[
        int | None, typer.Option(min=1, help="With --model: gradient_accumulation_steps.", rich_help_panel=MORE)
    ] = None,
    gpus: Annotated[int | None, typer.Option(min=1, help="GPUs on each machine. Default: the recipe's, or 1.")] = None,
    nodes: Nodes = 1,
    ram: Ram = None,
    compare_with: Annotated[
        str | None,
        typer.Option(
            metavar="PATH",
            help="With SCRIPT: Python of another environment. Compares the memory that its libraries need.",
            rich_help_panel=MORE,
        ),
    ] = None,
    args: Args = None,
    settings: Set = None,
    technique: Technique = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run code that comes with the model.", rich_help_panel=MORE)
    ] = False,
    no_search: Annotated[
        bool, typer.Option("--no-search", help="With SCRIPT: if it does not fit, search for no setup that does.")
    ] = False,
    html: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Write one HTML page with the GPU as a bar.", rich_help_panel=MORE),
    ] = None,
    short: Short = False,
    as_json: Json = False,
) -> int:
    """Predict a training's peak memory, and whether it fits. Needs no GPU."""
    from hf_memkit.cli.batches import batches_json, of_batches
    from hf_memkit.cli.predict_answer import advice_for, predict_answer, present, title_of, write_prediction
    from hf_memkit.cli.predict_next import NextSetup, NextVariant, next_setup, next_variant
    from hf_memkit.cli.predict_script import searched

    if short and as_json:
        raise InputError("--short, --json: mutually exclusive. Omit --short: --json has everything.")
    if html is not None:
        from hf_memkit.common.answer.document import check_file

        if compare_with is not None:
            raise InputError("--html, --compare-with: mutually exclusive: a page shows one prediction. Omit one.")
        check_file(html)
    show_what_can_be_shown()
    if module and script is None:
        raise InputError("-m: no module. Write its name after -m: memkit predict -m MODULE -- ARGUMENTS")
    if script is not None:
        from hf_memkit.cli.predict_script import (
            found_command,
            found_script,
            predict_script,
            refuse_beside_a_script,
        )

        environment = context.obj
        if not module and is_command(script):
            launched = found_command((script, *(arguments or ())), environment, gpus, nodes)
            given, gpus, nodes, environment = launched.script, launched.gpus, launched.nodes, launched.environment
        else:
            given = found_script(script, arguments or (), is_module=module)
        refuse_beside_a_script(
            model=model, preset=preset, recipe=recipe, variant=variant != "auto", data=data, batch_size=batch_size,
            sequence_length=sequence_length, accumulation=accumulation, args=args, set=settings, technique=technique,
            trust_remote_code=trust_remote_code,
        )  # fmt: skip
        return predict_script(
            given, gpu=gpu, gpu_memory=gpu_memory, ram=ram, gpus=gpus or 1, nodes=nodes,
            environment=environment, compare_with=compare_with,
            search=not no_search, html=html, short=short, as_json=as_json,
        )  # fmt: skip
    if compare_with is not None:
        raise InputError(
            "--compare-with: needs a training script: memkit predict train.py --compare-with PATH -- ARGUMENTS"
        )
    if no_search:
        raise InputError("--no-search: needs a training script: memkit predict train.py --no-search -- ARGUMENTS")
    request = Request(
        recipe=recipe, variant=variant, model=model, data=data, gpu=gpu, gpu_memory=gpu_memory, ram=ram, gpus=gpus,
        nodes=nodes, sequence_length=sequence_length, trust_remote_code=trust_remote_code,
    )  # fmt: skip
    loaded = None
    if recipe is not None:
        loaded, request = read_recipe(
            request, settings, preset=preset, technique=technique, args=args, batch_size=batch_size,
            accumulation=accumulation, trust_remote_code=trust_remote_code,
        )  # fmt: skip
    elif variant != "auto":
        raise InputError(f"--variant {variant}: only recipes have variants; add --recipe NAME")
    elif data is not None:
        raise InputError(f"--data {data}: only recipes read it; add --recipe NAME")
    else:
        request = _with_own(request, preset, technique, settings, args, batch_size, accumulation)
    from hf_memkit.recipes.by_data import batches_of, judge_of

    judge = judge_of(request)
    setup, prediction = _resolved(request, loaded, judge)
    if prediction is None and loaded is None:
        from hf_memkit.prediction import predict as predict_setup

        prediction = predict_setup(setup, trust_remote_code=trust_remote_code)
    prediction = prediction or judge(setup)
    batches = batches_of(judge, setup, prediction) if loaded is not None else None
    prediction = prediction.with_notes(*setup.warnings, *setup.notes)
    fails = prediction.verdict == "does not fit"

    def instead() -> NextSetup | NextVariant | None:
        if not fails:
            return None
        if loaded is not None:
            found = functools.partial(next_variant, loaded, setup, judge=judge)
            return searched(found, "the next variant that does")
        if prediction.confidence.level != "trace" or not prediction.lacks_room:
            return None
        from hf_memkit.plan.make_plan import nearest_of_setup

        nearest = functools.partial(nearest_of_setup, setup, trust_remote_code=trust_remote_code)
        return searched(functools.partial(next_setup, nearest))

    known = [*of_batches(prediction, batches)]
    title = title_of(setup)
    if as_json:
        found = instead()
        asked = {"recipe": loaded.name if loaded is not None else None, **_request_json(setup)}
        if loaded is not None:
            asked["batches"] = batches_json(batches)
        beside = {"request": asked, "try_next": found.to_json() if found else None}
        print_json({**prediction.to_json(), **beside})
        if html is not None:
            changes = [*known, *advice_for(prediction, setup, found)]
            write_prediction(html, predict_answer(prediction, title, changes, setup.warnings))
    else:
        present(
            prediction, title, known, lambda: advice_for(prediction, setup, instead()), warnings=setup.warnings,
            short=short, html=html,
        )  # fmt: skip
    return 1 if fails else 0


def _with_own(
    request: Request,
    preset: str | None,
    technique: list[str] | None,
    settings: list[str] | None,
    args: str | None,
    batch_size: int | None,
    accumulation: int | None,
) -> Request:
    """The request with its preset and the user's own arguments."""
    from hf_memkit.recipes.resolve import read_own_arguments
    from hf_memkit.setup.own_arguments import wrong_counts

    name, techniques = preset or "", tuple(technique or ())
    if techniques and not name:  # composed as a preset would be
        from hf_memkit.presets import PRESETS

        name = "+".join(each for each in techniques if each not in PRESETS)
        if not name:
            raise InputError(f"--technique {techniques[0]}: no preset to change; write --preset {techniques[0]}")
        techniques = tuple(each for each in techniques if each in PRESETS)
    request = replace(request, preset=name, techniques=techniques)
    request = read_own_arguments(request, settings or (), args, batch_size=batch_size, accumulation=accumulation)
    if problems := wrong_counts(request.arguments):
        raise SettingError("\n".join(problems))
    return request


_INSTEAD: Final = {
    "preset": "its variants are its presets; choose one with --variant",
    "technique": "its variants have theirs; choose one with --variant",
    "args": "write --set KEY=VALUE",
    "batch_size": "write --set per_device_train_batch_size=B",
    "accumulation": "write --set gradient_accumulation_steps=N",
    "trust_remote_code": "recipes train models of transformers only",
}
"""Options that a recipe answers itself, and what to do in their place."""


def read_recipe(request: Request, settings: list[str] | None, **options: Any) -> tuple[Recipe, Request]:
    """The recipe, and the request with its own arguments; refuses options that have no place beside a recipe."""
    from hf_memkit.recipes.resolve import read_own_arguments
    from hf_memkit.recipes.schema import load_recipe
    from hf_memkit.recipes.settings import check_data
    from hf_memkit.recipes.sources import is_here

    given = [name for name in _INSTEAD if options.get(name)]
    wrong = [f"--{name.replace('_', '-')}: not with --recipe; {_INSTEAD[name]}" for name in given]
    if wrong:
        raise InputError("\n".join(wrong))
    recipe = load_recipe(request.recipe or "")
    if request.data is not None and is_here(request.data):
        check_data(recipe, request.data)
    return recipe, read_own_arguments(request, settings or (), recipe=recipe)


def _resolved(request: Request, recipe: Recipe | None, judge: Judge) -> tuple[Setup, Prediction | None]:
    """The setup, whose notes say what was assumed; and its prediction, if it was chosen by one that was made now."""
    from hf_memkit.recipes.resolve import resolve
    from hf_memkit.recipes.stored_predictions import is_stored
    from hf_memkit.recipes.variant_search import stored_or

    choosing = judge if recipe is None or request.data is not None else stored_or(judge, recipe)
    setup, prediction = resolve(request, choosing, recipe=recipe)
    if recipe is None:
        return setup, prediction
    if prediction is not None and is_stored(prediction):  # which chose it; what is shown is traced here
        prediction = None
    warnings = (
        f"variant {setup.preset} {problem}"
        for problem in setup.problems
        if "by formula" not in problem and "predicted not to fit" not in problem
    )
    return replace(setup, notes=(f"variant {setup.preset}: {setup.why}",), warnings=tuple(warnings)), prediction


def _request_json(setup: Setup) -> dict[str, Any]:
    job = setup.resolved_for
    return {
        "preset": setup.preset,
        "techniques": list(setup.techniques),
        "model": setup["model.name"],
        "model_origin": setup["model.origin"],
        "parameters": job.model.parameters if job.model else None,
        "gpu": job.machine.gpu.to_json() if job.machine.gpu else None,
        "gpus": job.gpus,
        "nodes": job.nodes,
        "micro_batch_size": setup.micro_batch_size,
        "sequence_length": setup.sequence_length,
        "accumulation": setup.accumulation,
    }
