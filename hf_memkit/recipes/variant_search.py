"""Selects a recipe's variant, its kind of checkpointing and its sequence length for a machine.

Predicts candidates, fastest first, until one fits. A trace takes seconds, so a candidate whose weights and states
alone are too large is not traced.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from hf_memkit.catalog.hardware import Machine, gpu_of_size
from hf_memkit.catalog.models import describe
from hf_memkit.common.errors import DoesNotFitError, InputError, NoKernel
from hf_memkit.prediction import Prediction, predict
from hf_memkit.recipes.schema import Recipe
from hf_memkit.recipes.settings import refuse_wrong
from hf_memkit.recipes.stored_predictions import stored_length, stored_prediction
from hf_memkit.recipes.tasks import find_task
from hf_memkit.recipes.variant import MULTIPLE, VariantJob
from hf_memkit.setup.build.packages import missing_package
from hf_memkit.setup.job import gpu_shortage
from hf_memkit.setup.request import Request, refuse_too_long
from hf_memkit.setup.setup import Setup

MOST_TRACES: Final = 4
"""Maximum number of sequence lengths to predict: first the stored one or the recipe's, then the nearest to fitting."""

_LEAST_GAIN: Final = 0.03
"""A sequence is made longer by this share or more: predictions are not more exact."""

_SAFETY_FACTOR: Final = 0.985
"""A shorter sequence is shortened by this further factor, so that the next prediction fits."""

Judge = Callable[[Setup], Prediction]
"""Predicts a candidate, by a trace or from the recipe's stored predictions; raises an InputError if it cannot."""


def predict_nothing(setup: Setup) -> Prediction:
    """A judge that raises an InputError for each candidate."""
    raise InputError("no prediction was asked for")


def stored_or(judge: Judge | None, recipe: Recipe) -> Judge:
    """A judge that uses the recipe's stored prediction of a setup if it has one, else `judge`."""

    def stored_first(setup: Setup) -> Prediction:
        try:
            return stored_prediction(recipe, setup)
        except InputError:
            if judge is None:
                raise
            return judge(setup)

    return stored_first


@dataclass(frozen=True)
class _Result:
    """A candidate with its verdict.

    Attributes:
        verdict: of the prediction; empty without one.
        why: the prediction in short, or why there is none: the machine rules the candidate out, or it cannot be
            predicted.
    """

    candidate: VariantJob
    setup: Setup
    verdict: str
    why: str
    prediction: Prediction | None = None


def choose(
    recipe: Recipe, machine: Machine, request: Request, *, use_hub: bool, judge: Judge = predict, runs: bool = False
) -> tuple[Setup, Prediction | None]:
    """(the recipe's setup for `machine`, or for the recipe's GPU if the machine has none; its prediction or None).

    Selects the first variant and kind of checkpointing that fits; if none fits, the first that is tight, else the
    first that could not be predicted. A variant requested by name is always resolved, with the last kind of
    checkpointing if none fits: the setup's `problems` list what the machine lacks.

    Args:
        request: the user's options.
        use_hub: whether the model's config may be read from the hub.
        judge: predicts a candidate.
        runs: whether it will run on this machine: `auto` then skips variants that need a missing package.

    Raises:
        InputError: the request contradicts itself, the model or the variant.
        DoesNotFitError: `auto`, and no variant fits.
    """
    start = _start(recipe, machine, request, use_hub=use_hub)
    if request.variant != "auto":
        result = _try_variant(replace(start, variant=request.variant), judge, "asked for by name")
        return result.setup, result.prediction

    rejected: list[tuple[str, str]] = []
    possible: list[_Result] = []
    for name in recipe.variants:
        candidate = replace(start, variant=name)
        if runs and (package := missing_package(candidate.setup())):
            rejected.append((name, f"needs {package}"))
            continue
        why = "the first variant that fits" if rejected else "the recipe's first choice"
        result = _try_variant(candidate, judge, why)
        if result.verdict == "fits":
            return replace(result.setup, rejected=tuple(rejected)), result.prediction
        if not result.setup.problems:
            possible.append(result)
        rejected.append((name, result.why))

    if not possible:
        variants = {why: " and ".join(name for name, each in rejected if each == why) for _, why in rejected}
        reasons = "; ".join(f"{names} {why}" for why, names in variants.items())
        others = "To list recipes that fit, type: memkit recipe --gpu GPU"
        raise DoesNotFitError(f"no variant of {recipe.name} is predicted to fit this machine: {reasons}. {others}")
    best = min(possible, key=lambda result: result.prediction is None)
    why = f"no variant is predicted to fit better (predicted: {best.why})"
    if best.prediction is None:
        why = f"the first that nothing rules out ({best.why})"
    not_chosen = tuple(variant for variant in rejected if variant[0] != best.setup.preset)
    return replace(best.setup, why=why, rejected=not_chosen), best.prediction


def _start(recipe: Recipe, machine: Machine, request: Request, *, use_hub: bool) -> VariantJob:
    """The candidate without variant, from the recipe and the request."""
    refuse_wrong(recipe, request)
    name = request.model or recipe.model.hub_id
    task = find_task(recipe.task)
    architecture = recipe.model.architecture if name == recipe.model.hub_id else None
    model = describe(name, architecture, use_hub=use_hub, auto_class=task.auto_class)
    length = task.sequence_length(request.sequence_length, recipe.sequence_length, model)
    refuse_too_long(name, length, model.maximum_length, "--sequence-length ")
    return VariantJob(recipe, request, machine.with_gpu(machine.gpu or gpu_of_size(recipe.card)), model, length)


def _try_variant(candidate: VariantJob, judge: Judge, reason: str) -> _Result:
    """The variant with the first kind of checkpointing that fits, else the first that is tight, else the last.
    `reason`: for its choice, which the setup shows."""
    kinds = candidate.recipe.variants[candidate.variant].checkpointing or [""]
    by_name = candidate.request.variant != "auto"
    tried: list[_Result] = []
    for kind in kinds:
        next_candidate = replace(candidate, checkpointing=kind)
        if next_candidate.solves:
            tried.append(_try_lengths(next_candidate, judge))
        else:
            tried.append(_try(next_candidate, judge, must_predict=by_name and kind == kinds[-1]))
        if tried[-1].verdict == "fits":
            break

    best = tried[-1]
    if best.verdict != "fits":
        best = next((result for result in tried if result.verdict == "tight"), best)
    if best.prediction is None:
        return replace(best, setup=replace(best.setup, why=f"{reason} ({best.why})"))
    setup = replace(best.setup, why=f"{reason} (predicted: {best.why})")
    if best.candidate.checkpointing:
        which = "the first that is predicted to fit"
        if best.verdict != "fits":
            which = "the nearest to fitting, by prediction"
        others = "; ".join(f"{each.candidate.checkpointing}: {each.why}" for each in tried if each is not best)
        tried_too = f". Also tried: {others}" if others else ""
        setup = setup.with_notes(f"Activation checkpointing: {best.candidate.checkpointing}, {which}{tried_too}.")
    return replace(best, setup=setup)


def _try(candidate: VariantJob, judge: Judge, *, must_predict: bool) -> _Result:
    """One candidate, predicted if `must_predict`, or if the machine can run it and hold its weights and states."""
    setup = candidate.setup()
    too_large = gpu_shortage(setup.ledger, candidate.machine)
    others = [problem for problem in setup.problems if problem not in too_large]
    if others and not must_predict:
        return _Result(candidate, setup, "", "; ".join(others))
    if too_large and not must_predict:
        return _Result(candidate, setup, "", f"{too_large[0]}: not traced")
    try:
        prediction = judge(setup)
    except NoKernel as error:
        return _Result(candidate, setup.with_problems([str(error)]), "", str(error))
    except InputError as error:
        return _Result(candidate, setup, "", f"not predicted: {error}")

    if prediction.verdict in ("fits", "tight"):  # more exact than the sums of the ledger
        setup = replace(setup, problems=tuple(others))
    elif not setup.problems:
        setup = setup.with_problems([f"is predicted not to fit: {prediction.why}"])
    why = "; ".join((*others, f"{prediction.verdict}: {prediction.why}"))
    return _Result(candidate, setup, str(prediction.verdict), why, prediction)


def _try_lengths(candidate: VariantJob, judge: Judge) -> _Result:
    """The candidate with the longest sequence that is predicted to fit, else with the last that was tried."""
    shortest = candidate.recipe.sequence_length
    longest = candidate.model.maximum_length or shortest
    length = min(longest, stored_length(candidate.recipe, candidate.setup()))
    results: dict[int, _Result] = {}
    while length not in results and len(results) < MOST_TRACES:
        result = results[length] = _try(replace(candidate, length=length), judge, must_predict=True)
        if result.prediction is None:
            break
        length = _nearer_length(length, result.prediction, shortest=shortest, longest=longest)

    fitting = [length for length, each in results.items() if each.verdict == "fits"]
    if not fitting:
        return result
    length = max(fitting)
    limit = f"the longest multiple of {MULTIPLE} found that fits"
    if length == longest:
        limit = "all that the model allows"
    tried = ", ".join(f"{tokens} {each.verdict or each.why}" for tokens, each in sorted(results.items()))
    best = results[length]
    return replace(best, setup=best.setup.put("data.sequence_length", length, f"{limit} (predicted: {tried})"))


def _nearer_length(length: int, prediction: Prediction, *, shortest: int, longest: int) -> int:
    """The next length to predict, if activations grow in proportion to it; `length` if a longer one gains little."""
    constant = sum(prediction.categories[name] for name in ("weights", "gradients", "optimizer"))
    constant += prediction.outside_allocator_bytes
    grows = prediction.total_bytes[1] - constant
    room = prediction.limit_bytes - constant
    if grows <= 0 or room <= 0:
        return shortest if prediction.verdict != "fits" else length

    wanted = int(length * room / grows) // MULTIPLE * MULTIPLE
    wanted = max(shortest, min(longest, wanted))
    if prediction.verdict == "fits":
        return wanted if wanted > (1 + _LEAST_GAIN) * length else length
    lower = int(_SAFETY_FACTOR * wanted) // MULTIPLE * MULTIPLE
    return max(shortest, min(lower, length - MULTIPLE))


def nearest_that_fits(recipe: Recipe, setup: Setup, *, use_hub: bool, judge: Judge) -> str | None:
    """The next variant of the recipe that is predicted to fit where `setup` does not; None if there is none."""
    names = list(recipe.variants)
    later = names[names.index(setup.preset) + 1 :]
    if not later:
        return None
    machine, request = setup.resolved_for.machine, setup.request or Request()
    others = recipe.model_copy(update={"variants": {name: recipe.variants[name] for name in later}})
    try:
        other, prediction = choose(others, machine, replace(request, variant="auto"), use_hub=use_hub, judge=judge)
    except DoesNotFitError:
        return None
    return other.preset if prediction is not None else None
