"""`memkit predict`: the memory of a training by phase and category, and whether it fits a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import typer

from hf_memkit.cli.options import with_options
from hf_memkit.cli.predict_options import PredictOptions
from hf_memkit.cli.printing import print_json
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


@with_options
def predict(context: typer.Context, *, options: PredictOptions) -> int:
    """Predict a training's peak memory, and whether it fits. Needs no GPU."""
    options.refuse_contradictions()
    if options.html is not None:
        from hf_memkit.common.answer.document import check_file

        check_file(options.html)
    if options.script is not None:
        from hf_memkit.cli.predict_script import predict_script

        return predict_script(options, context.obj)
    return _predict_setup(options)


def _predict_setup(options: PredictOptions) -> int:
    """Predicts a model or a recipe, prints the answer and returns the exit code."""
    from hf_memkit.cli.predict_answer import (
        advice_for,
        batch_sentences,
        batches_json,
        predict_answer,
        present,
        title_of,
        write_prediction,
    )
    from hf_memkit.cli.predict_next import NextSetup, NextVariant, next_setup, next_variant
    from hf_memkit.cli.predict_script import searched
    from hf_memkit.recipes.by_data import batches_of, judge_of

    recipe, request = options.request()
    judge = judge_of(request)
    setup, prediction = _resolved(request, recipe, judge)
    if prediction is None and recipe is None:
        from hf_memkit.prediction import predict as predict_setup

        prediction = predict_setup(setup, trust_remote_code=options.trust_remote_code)
    prediction = prediction or judge(setup)
    batches = batches_of(judge, setup, prediction) if recipe is not None else None
    prediction = prediction.with_notes(*setup.warnings, *setup.notes)
    fails = prediction.verdict == "does not fit"

    def instead() -> NextSetup | NextVariant | None:
        if not fails:
            return None
        if recipe is not None:
            return searched(lambda: next_variant(recipe, setup, judge=judge), "the next variant that does")
        if prediction.confidence.level != "trace" or not prediction.lacks_room:
            return None
        from hf_memkit.plan.make_plan import nearest_of_setup

        trusted = options.trust_remote_code
        return searched(lambda: next_setup(lambda: nearest_of_setup(setup, trust_remote_code=trusted)))

    known = [*batch_sentences(prediction, batches)]
    title = title_of(setup)
    if options.as_json:
        nearest = instead()
        asked = {"recipe": recipe.name if recipe is not None else None, **_request_json(setup)}
        if recipe is not None:
            asked["batches"] = batches_json(batches)
        beside = {"request": asked, "try_next": nearest.to_json() if nearest else None}
        print_json({**prediction.to_json(), **beside})
        if options.html is not None:
            changes = [*known, *advice_for(prediction, setup, nearest)]
            write_prediction(options.html, predict_answer(prediction, title, changes, setup.warnings))
    else:
        present(
            prediction, title, known, lambda: advice_for(prediction, setup, instead()), warnings=setup.warnings,
            short=options.short, html=options.html,
        )  # fmt: skip
    return 1 if fails else 0


def _resolved(request: Request, recipe: Recipe | None, judge: Judge) -> tuple[Setup, Prediction | None]:
    """(the setup with notes about assumptions, the prediction that chose it if that was made now)."""
    from hf_memkit.recipes.resolve import resolve
    from hf_memkit.recipes.stored_predictions import is_stored
    from hf_memkit.recipes.variant_search import stored_or
    from hf_memkit.setup.job import shortages

    choosing = judge if recipe is None or request.data is not None else stored_or(judge, recipe)
    setup, prediction = resolve(request, choosing, recipe=recipe)
    if recipe is None:
        return setup, prediction
    if prediction is not None and is_stored(prediction):  # the answer shows one that is traced now
        prediction = None
    sums = shortages(setup.ledger, setup.resolved_for.machine)  # the prediction replaces them
    others = (each for each in setup.problems if each not in sums and "predicted not to fit" not in each)
    warnings = (f"variant {setup.preset} {problem}" for problem in others)
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
