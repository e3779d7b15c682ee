"""Which variant, which of its kinds of checkpointing and which sequence length: one search, whoever judges.

In: a recipe, a machine, a request and a judge. Out: the setup, with the prediction that decided. Each candidate is
judged, cheapest first, until one fits. A trace takes seconds, so what cannot fit, whatever its activations take, is
not traced, and the reason says why. Only a prediction makes a candidate fit.
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
"""Lengths that are tried: the first is the stored one, or the recipe's; each next one follows from the one before."""

_CLOSE_ENOUGH: Final = 0.03
"""A length is not raised by a smaller share than this: the prediction itself is not that exact."""


_SURER: Final = 0.985
"""A length that is lowered is lowered a little further, so that the next prediction does not miss by a hair."""


Judge = Callable[[Setup], Prediction]
"""Predicts a candidate, by a trace or from the recipe's stored predictions; InputError where it cannot."""


def unjudged(setup: Setup) -> Prediction:
    """For setups of which nobody asks whether they fit: raises an InputError."""
    raise InputError("no prediction was asked for")


def stored_or(judge: Judge | None, recipe: Recipe) -> Judge:
    """The recipe's stored predictions where they are of the setup in question, else `judge`, where there is one."""

    def stored_first(setup: Setup) -> Prediction:
        try:
            return stored_prediction(recipe, setup)
        except InputError:
            if judge is None:
                raise
            return judge(setup)

    return stored_first


@dataclass(frozen=True)
class _Judged:
    """A candidate, and what was said of it. `prediction` is None where the machine rules it out, or nothing could be
    predicted; `why` says why not, or in short what was predicted."""

    of: Candidate
    setup: Setup
    verdict: str
    why: str
    prediction: Prediction | None = None


def choose(
    recipe: Recipe, machine: Machine, request: Request, *, use_hub: bool, judge: Judge = predict, runs: bool = False
) -> tuple[Setup, Prediction | None]:
    """The recipe's setup for `machine`, or for the recipe's own GPU if the machine has none, and its prediction if one
    was made: the first variant, with its first kind of checkpointing, that fits; if none does, the first that is
    tight, or else the first that could not be predicted. A variant that was asked for by name is always resolved, with
    the last of its kinds of checkpointing if none fits: what the machine lacks for it is in the setup's `problems`.
    Refuses what contradicts itself, the model or the variant; a DoesNotFitError: `auto`, and no variant fits.

    Args:
        request: what was asked for beyond the recipe.
        use_hub: whether the hub may be asked for the model's config.
        judge: makes the prediction of a candidate.
        runs: whether it will run here: then `auto` skips what needs a package that is missing.
    """
    start = _start(recipe, machine, request, use_hub=use_hub)
    if request.variant != "auto":
        found = _variant(replace(start, variant=request.variant), judge, "asked for by name")
        return found.setup, found.prediction
    rejected: list[tuple[str, str]] = []
    second_best: list[_Judged] = []
    for name in recipe.variants:
        first = "the first variant that fits" if rejected else "the recipe's first choice"
        candidate = replace(start, variant=name)
        if runs and (lacks_package := missing_package(candidate.setup())):
            rejected.append((name, f"needs {lacks_package}"))
            continue
        found = _variant(candidate, judge, first)
        if found.verdict == "fits":
            return replace(found.setup, rejected=tuple(rejected)), found.prediction
        if not found.setup.problems:
            second_best.append(found)
        rejected.append((name, found.why))
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
    """What all candidates have in common."""
    refuse_wrong(recipe, request)
    name, task = request.model or recipe.model.hub_id, find_task(recipe.task)
    architecture = recipe.model.architecture if name == recipe.model.hub_id else None
    model = describe(name, architecture, use_hub=use_hub, auto_class=task.auto_class)
    length = task.sequence_length(request.sequence_length, recipe.sequence_length, model)
    refuse_too_long(name, length, model.maximum_length, "--sequence-length ")
    return Candidate(recipe, request, machine.with_gpu(machine.gpu or gpu_of_size(recipe.card)), model, length)


def _variant(candidate: Candidate, judge: Judge, first: str) -> _Judged:
    """One variant: the first of its kinds of checkpointing that fits, or the first that is tight, or the last."""
    tried: list[_Judged] = []
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
    if kind := best.of.checkpointing:
        others = "; ".join(f"{each.of.checkpointing}: {each.why}" for each in tried if each is not best)
        which = "the first that is predicted to fit" if fitting else "the nearest to fitting, by prediction"
        tried_too = f". Also tried: {others}" if others else ""
        setup = setup.with_notes(f"Activation checkpointing: {kind}, {which}{tried_too}.")
    return replace(best, setup=replace(setup, why=f"{first} (predicted: {best.why})"))


def _candidates(candidate: Candidate, judge: Judge) -> Iterator[_Judged]:
    """The variant with each of its kinds of checkpointing, cheapest first, each judged as it is asked for."""
    kinds = candidate.recipe.variants[candidate.variant].checkpointing or [""]
    for number, kind in enumerate(kinds, 1):
        each = replace(candidate, checkpointing=kind)
        if each.solves:
            yield _longest(each, judge)
        else:
            yield _judged(each, judge, must=candidate.request.variant != "auto" and number == len(kinds))


def _judged(candidate: Candidate, judge: Judge, *, must: bool) -> _Judged:
    """One candidate, predicted unless its weights and states alone are more than the GPU has. `must`: it was asked
    for and there is none after it, so that it is predicted all the same."""
    setup, machine = candidate.setup(), candidate.machine
    short = gpu_shortage(setup.ledger, machine)
    others = [problem for problem in setup.problems if problem not in short]
    if others and not must:
        return _Judged(candidate, setup, "", "; ".join(others))
    if short and not must:
        return _Judged(candidate, setup, "", f"{short[0]}: not traced")
    try:
        prediction = judge(setup)
    except NoKernel as error:
        return _Judged(candidate, setup.with_problems([str(error)]), "", str(error))
    except InputError as error:
        return _Judged(candidate, setup, "", f"not predicted: {error}")
    if prediction.verdict in ("fits", "tight"):  # the prediction is the better judge
        setup = replace(setup, problems=tuple(others))
    elif not setup.problems:
        setup = setup.with_problems([f"is predicted not to fit: {prediction.why}"])
    why = "; ".join((*others, f"{prediction.verdict}: {prediction.why}"))
    return _Judged(candidate, setup, str(prediction.verdict), why, prediction)


def _longest(candidate: Candidate, judge: Judge) -> _Judged:
    """The longest sequence that is predicted to fit: the stored one, or the recipe's, lowered or raised by what
    predictions say."""
    shortest = candidate.recipe.sequence_length
    longest = candidate.model.maximum_length or shortest
    best: tuple[int, _Judged] | None = None
    length = min(longest, stored_length(candidate.recipe, candidate.setup()))
    last = _judged(replace(candidate, length=length), judge, must=True)
    seen = {length: last}
    while last.prediction is not None:
        if last.verdict == "fits" and (best is None or length > best[0]):
            best = (length, last)
        length = _nearer_length(length, last.prediction, shortest=shortest, longest=longest)
        if length in seen or len(seen) == MOST_TRACES:
            break
        last = seen[length] = _judged(replace(candidate, length=length), judge, must=True)
    if best is None:
        return last
    length, found = best
    predictions = ", ".join(f"{tokens} {each.verdict or each.why}" for tokens, each in sorted(seen.items()))
    most = "all that the model allows" if length == longest else f"the longest multiple of {MULTIPLE} found that fits"
    return replace(found, setup=found.setup.put("data.sequence_length", length, f"{most} (predicted: {predictions})"))


def _nearer_length(length: int, found: Prediction, *, shortest: int, longest: int) -> int:
    """The length to try after `length` was predicted: what fits if all that grows with the sequence grows in
    proportion. Weights, gradients and states do not grow with it. `length` itself where nothing is to be gained.
    """
    held = sum(found.categories[name] for name in ("weights", "gradients", "optimizer"))
    held += found.outside_allocator_bytes
    grows, room = found.total_bytes[1] - held, found.limit_bytes - held
    if grows <= 0 or room <= 0:
        return shortest if found.verdict != "fits" else length
    wanted = max(shortest, min(longest, int(length * room / grows) // MULTIPLE * MULTIPLE))
    if found.verdict == "fits":
        return wanted if wanted > (1 + _CLOSE_ENOUGH) * length else length
    lower = int(_SURER * wanted) // MULTIPLE * MULTIPLE
    return max(shortest, min(lower, length - MULTIPLE))


def nearest_that_fits(recipe: Recipe, setup: Setup, *, use_hub: bool, judge: Judge) -> str | None:
    """The next variant of the recipe, in its order, that is predicted to fit where `setup` does not; None if there is
    none."""
    names = list(recipe.variants)
    later = names[names.index(setup.preset) + 1 :]
    if not later:
        return None
    machine, request = setup.resolved_for.machine, setup.request or Request()
    others = recipe.model_copy(update={"variants": {name: recipe.variants[name] for name in later}})
    try:
        other, found = choose(others, machine, replace(request, variant="auto"), use_hub=use_hub, judge=judge)
    except DoesNotFitError:
        return None
    return other.preset if found is not None else None
