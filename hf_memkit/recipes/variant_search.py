"""Selects a recipe's variant, its kind of checkpointing and its sequence length for a machine.

Predicts candidates, fastest first, until one fits. A trace takes seconds, so a candidate whose weights and states
alone are too large is not traced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
from hf_memkit.recipes.variant import MULTIPLE, Candidate
from hf_memkit.setup.build.packages import missing_package
from hf_memkit.setup.job import gpu_shortage
from hf_memkit.setup.request import Request, refuse_too_long
from hf_memkit.setup.setup import Setup

MOST_TRACES: Final = 4
"""Maximum number of sequence lengths to predict: first the stored one or the recipe's, then the nearest to fitting."""

_CLOSE_ENOUGH: Final = 0.03
"""A length is not raised by a smaller share: predictions are not that exact."""

_SURER: Final = 0.985
"""A lower length is multiplied by this, so that the next prediction fits."""

Judge = Callable[[Setup], Prediction]
"""Predicts a candidate, by a trace or from the recipe's stored predictions; raises an InputError if it cannot."""


def unjudged(setup: Setup) -> Prediction:
    """A judge that predicts nothing: raises an InputError."""
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

    `prediction` is None if the machine rules the candidate out or it cannot be predicted; `why` is that reason, or the
    prediction in short.
    """

    candidate: Candidate
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
        chosen = _variant(replace(start, variant=request.variant), judge, "asked for by name")
        return chosen.setup, chosen.prediction
    rejected: list[tuple[str, str]] = []
    second_best: list[_Result] = []
    for name in recipe.variants:
        first = "the first variant that fits" if rejected else "the recipe's first choice"
        candidate = replace(start, variant=name)
        if runs and (lacks_package := missing_package(candidate.setup())):
            rejected.append((name, f"needs {lacks_package}"))
            continue
        chosen = _variant(candidate, judge, first)
        if chosen.verdict == "fits":
            return replace(chosen.setup, rejected=tuple(rejected)), chosen.prediction
        if not chosen.setup.problems:
            second_best.append(chosen)
        rejected.append((name, chosen.why))
    if second_best:
        best = min(second_best, key=lambda each: each.prediction is None)
        why = f"no variant is predicted to fit better (predicted: {best.why})"
        if best.prediction is None:
            why = f"the first that nothing rules out ({best.why})"
        others = tuple(each for each in rejected if each[0] != best.setup.preset)
        return replace(best.setup, why=why, rejected=others), best.prediction
    reasons = "; ".join(f"{variant} {why}" for variant, why in rejected)
    raise DoesNotFitError(
        f"no variant of {recipe.name} is predicted to fit this machine: {reasons}; `memkit recipe` lists others"
    )


def _start(recipe: Recipe, machine: Machine, request: Request, *, use_hub: bool) -> Candidate:
    """The candidate without variant, from the recipe and the request."""
    refuse_wrong(recipe, request)
    name, task = request.model or recipe.model.hub_id, find_task(recipe.task)
    architecture = recipe.model.architecture if name == recipe.model.hub_id else None
    model = describe(name, architecture, use_hub=use_hub, auto_class=task.auto_class)
    length = task.sequence_length(request.sequence_length, recipe.sequence_length, model)
    refuse_too_long(name, length, model.maximum_length, "--sequence-length ")
    return Candidate(recipe, request, machine.with_gpu(machine.gpu or gpu_of_size(recipe.card)), model, length)


def _variant(candidate: Candidate, judge: Judge, first: str) -> _Result:
    """The variant with the first kind of checkpointing that fits, else the first that is tight, else the last."""
    tried: list[_Result] = []
    for each in _candidates(candidate, judge):
        tried.append(each)
        if each.verdict == "fits":
            break
    fitting = [each for each in tried if each.verdict == "fits"]
    tight = [each for each in tried if each.verdict == "tight"]
    best = (fitting or tight or tried[-1:])[0]
    setup = best.setup
    if best.prediction is None:
        return replace(best, setup=replace(setup, why=f"{first} ({best.why})"))
    if kind := best.candidate.checkpointing:
        others = "; ".join(f"{each.candidate.checkpointing}: {each.why}" for each in tried if each is not best)
        which = "the first that is predicted to fit" if fitting else "the nearest to fitting, by prediction"
        tried_too = f". Also tried: {others}" if others else ""
        setup = setup.with_notes(f"Activation checkpointing: {kind}, {which}{tried_too}.")
    return replace(best, setup=replace(setup, why=f"{first} (predicted: {best.why})"))


def _candidates(candidate: Candidate, judge: Judge) -> Iterator[_Result]:
    """The variant with each kind of checkpointing, fastest first, each predicted when the caller needs it."""
    kinds = candidate.recipe.variants[candidate.variant].checkpointing or [""]
    for number, kind in enumerate(kinds, 1):
        each = replace(candidate, checkpointing=kind)
        if each.solves:
            yield _longest(each, judge)
        else:
            yield _predicted(each, judge, must=candidate.request.variant != "auto" and number == len(kinds))


def _predicted(candidate: Candidate, judge: Judge, *, must: bool) -> _Result:
    """One candidate, predicted unless its weights and states alone are too large. `must`: predict it anyway."""
    setup, machine = candidate.setup(), candidate.machine
    short = gpu_shortage(setup.ledger, machine)
    others = [problem for problem in setup.problems if problem not in short]
    if others and not must:
        return _Result(candidate, setup, "", "; ".join(others))
    if short and not must:
        return _Result(candidate, setup, "", f"{short[0]}: not traced")
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


def _longest(candidate: Candidate, judge: Judge) -> _Result:
    """The candidate with the longest sequence that is predicted to fit."""
    shortest = candidate.recipe.sequence_length
    longest = candidate.model.maximum_length or shortest
    best: tuple[int, _Result] | None = None
    length = min(longest, stored_length(candidate.recipe, candidate.setup()))
    last = _predicted(replace(candidate, length=length), judge, must=True)
    seen = {length: last}
    while last.prediction is not None:
        if last.verdict == "fits" and (best is None or length > best[0]):
            best = (length, last)
        length = _nearer_length(length, last.prediction, shortest=shortest, longest=longest)
        if length in seen or len(seen) == MOST_TRACES:
            break
        last = seen[length] = _predicted(replace(candidate, length=length), judge, must=True)
    if best is None:
        return last
    length, result = best
    predictions = ", ".join(f"{tokens} {each.verdict or each.why}" for tokens, each in sorted(seen.items()))
    most = "all that the model allows" if length == longest else f"the longest multiple of {MULTIPLE} found that fits"
    setup = result.setup.put("data.sequence_length", length, f"{most} (predicted: {predictions})")
    return replace(result, setup=setup)


def _nearer_length(length: int, prediction: Prediction, *, shortest: int, longest: int) -> int:
    """The next length to predict, if activations grow in proportion to it; `length` if a longer one gains little."""
    held = sum(prediction.categories[name] for name in ("weights", "gradients", "optimizer"))
    held += prediction.outside_allocator_bytes
    grows, room = prediction.total_bytes[1] - held, prediction.limit_bytes - held
    if grows <= 0 or room <= 0:
        return shortest if prediction.verdict != "fits" else length
    wanted = max(shortest, min(longest, int(length * room / grows) // MULTIPLE * MULTIPLE))
    if prediction.verdict == "fits":
        return wanted if wanted > (1 + _CLOSE_ENOUGH) * length else length
    lower = int(_SURER * wanted) // MULTIPLE * MULTIPLE
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
