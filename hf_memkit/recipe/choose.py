"""Which variant, which of its kinds of checkpointing and which sequence length: one search, whoever judges.

In: a recipe, a machine, a request and a judge. Out: the setup, with the prediction that decided. Each candidate is
judged, cheapest first, until one fits. A trace takes seconds, so what the formula puts far off is not traced, and says
so. Without a judge the sums of formulas decide, at once; for models whose activations are in no formula they are a
lower bound, and a prediction is the only judge.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Final

from hf_memkit.errors import DoesNotFitError, InputError, NoKernel
from hf_memkit.hardware import Gpu, Machine, gpu_of_size
from hf_memkit.job import gpu_shortage
from hf_memkit.models import describe
from hf_memkit.prediction import Prediction, predict
from hf_memkit.recipe.schema import Recipe
from hf_memkit.recipe.settings import refuse_wrong
from hf_memkit.recipe.tasks import find_task
from hf_memkit.recipe.variant import MULTIPLE, Candidate
from hf_memkit.request import Request, refuse_too_long
from hf_memkit.setup import Setup
from hf_memkit.train.packages import missing_package
from hf_memkit.units import format_size

FAR_OFF: Final = 0.25
"""What a formula puts further above the GPU than this share of it is not traced. Assumed: against traces of this
pack's recipes the ledger's sums were too high by a few per cent at most, and much oftener too low."""


MOST_TRACES: Final = 4
"""Lengths that are traced: the first is the formula's, each further one follows from the one before."""

_CLOSE_ENOUGH: Final = 0.03
"""A length is not raised by a smaller share than this: the prediction itself is not that exact."""


_SURER: Final = 0.985
"""A length that is lowered is lowered a little further, so that the next prediction does not miss by a hair."""


Judge = Callable[[Setup], Prediction]
"""Predicts a candidate: by a trace, or from the recipe's stored predictions."""


def predicted(setup: Setup, *, trace: bool = True, usual: Setup | None = None) -> Prediction:
    """The prediction of the setup for the GPU in question, which need not be here; by formula where no trace works.
    `usual`: as for `predict`.

    Raises:
        InputError: nothing can be said of it, or the GPU refuses an operation of it.
    """
    try:
        return predict(setup, trace=trace, usual=usual)
    except NoKernel:  # no formula makes that a training
        raise
    except InputError as error:
        if not trace:
            raise
        return predict(setup, trace=False).with_notes(str(error))


@dataclass(frozen=True)
class _Judged:
    """A candidate, and what was said of it. `prediction` is None where the formula, or the machine, rules it out, or
    nothing could be predicted; `why` says why not, or in short what was predicted."""

    of: Candidate
    setup: Setup
    verdict: str
    why: str
    prediction: Prediction | None = None


def choose(
    recipe: Recipe,
    machine: Machine,
    request: Request,
    *,
    use_hub: bool,
    judge: Judge | None = predicted,
    runs: bool = False,
) -> tuple[Setup, Prediction | None]:
    """The recipe's setup for `machine`, or for the recipe's own GPU if the machine has none: the first variant, with
    its first kind of checkpointing, that fits; if none does, the first that is tight. A variant that was asked for by
    name is always resolved, with the last of its kinds of checkpointing if none fits: what the machine lacks for it is
    in the setup's `problems`.

    Args:
        recipe, machine: what is resolved, and where it will run.
        request: what was asked for beyond the recipe.
        use_hub: whether the hub may be asked for the model's config.
        judge: makes the prediction of a candidate; None: the sums of formulas decide, at once.
        runs: whether it will run here: then `auto` skips what needs a package that is missing.

    Returns:
        The setup, and its prediction: None where nothing could be predicted, or nothing was worth predicting.

    Raises:
        InputError: unknown variant or model, or a sequence that is longer than the model allows.
        SettingError: requests that contradict each other, the batch or the variant.
        DoesNotFitError: `auto`, and no variant fits.
    """
    start = _start(recipe, machine, request, use_hub=use_hub)
    if request.variant != "auto":
        found = _variant(replace(start, variant=request.variant), judge, "asked for by name")
        return found.setup, found.prediction
    rejected: list[tuple[str, str]] = []
    tight: _Judged | None = None
    later = "the first variant within the GPU and RAM" if judge is None else "the first variant that fits"
    for name in recipe.variants:
        first = later if rejected else "the recipe's first choice"
        if runs and (lacks_package := missing_package(_variant(replace(start, variant=name), None, first).setup)):
            rejected.append((name, f"needs {lacks_package}"))
            continue
        found = _variant(replace(start, variant=name), judge, first)
        found = replace(found, setup=replace(found.setup, rejected=tuple(rejected)))
        lacks, prediction = found.setup.problems, found.prediction
        if not lacks and (prediction is None or prediction.verdict == "fits"):
            return found.setup, prediction
        if not lacks and tight is None:
            tight = found
        rejected.append((name, found.why))
    if tight is not None:
        why = f"no variant is predicted to fit better (predicted: {tight.why})"
        others = tuple(each for each in rejected if each[0] != tight.setup.preset)
        return replace(tight.setup, why=why, rejected=others), tight.prediction
    reasons = "; ".join(f"{variant} {why}" for variant, why in rejected)
    fits = "fits" if judge is None else "is predicted to fit"
    raise DoesNotFitError(f"no variant of {recipe.name} {fits} this machine: {reasons}; `memkit recipe` lists others")


def resolve(recipe: Recipe, machine: Machine, request: Request, *, use_hub: bool) -> Setup:
    """As `choose`, by formula."""
    return choose(recipe, machine, request, use_hub=use_hub, judge=None)[0]


def _start(recipe: Recipe, machine: Machine, request: Request, *, use_hub: bool) -> Candidate:
    """What all candidates have in common."""
    refuse_wrong(recipe, request)
    name, task = request.model or recipe.model.hub_id, find_task(recipe.task)
    architecture = recipe.model.architecture if name == recipe.model.hub_id else None
    model = describe(name, architecture, use_hub=use_hub, auto_class=task.auto_class)
    length = task.sequence_length(request.sequence_length, recipe.sequence_length, model)
    refuse_too_long(name, length, model.maximum_length, "--sequence-length ")
    return Candidate(recipe, request, machine.with_gpu(machine.gpu or gpu_of_size(recipe.card)), model, length)


def _variant(candidate: Candidate, judge: Judge | None, first: str) -> _Judged:
    """One variant: the first of its kinds of checkpointing that fits, or the first that is tight, or the last."""
    tried: list[_Judged] = []
    for each in _candidates(candidate, judge):
        tried.append(each)
        if each.verdict == "fits":
            break
    fitting = [each for each in tried if each.verdict == "fits"]
    tight = [each for each in tried if each.verdict == "tight"]
    best = (fitting or tight or tried[-1:])[0]
    if judge is None:
        return _by_formula(best, tried, first)
    setup = best.setup
    if best.prediction is None:
        return replace(best, setup=replace(setup, why=first))
    if kind := best.of.checkpointing:
        others = "; ".join(f"{each.of.checkpointing}: {each.why}" for each in tried if each is not best)
        which = "the first that is predicted to fit" if fitting else "the nearest to fitting, by prediction"
        tried_too = f". Also tried: {others}" if others else ""
        setup = setup.with_notes(f"Activation checkpointing: {kind}, {which}{tried_too}.")
    return replace(best, setup=replace(setup, why=f"{first} (predicted: {best.why})"))


def _by_formula(best: _Judged, tried: list[_Judged], first: str) -> _Judged:
    """What the sums chose, with a note on how, and why it is this."""
    candidate, setup = best.of, best.setup
    # Other models than causal language models have a class of their own, and no formula for their activations.
    bare = candidate.model.model_class is not None
    if kind := candidate.checkpointing:
        fits = best.verdict == "fits"
        which = (
            "the first of those listed that fits by formula"
            if fits
            else "the last of those listed, of which none fits"
        )
        without = (
            " (formulas have no activations of this kind of model: a prediction may choose another)" if bare else ""
        )
        sums = (f"{each.of.checkpointing} {format_size(each.setup.ledger.total_bytes('device'))}" for each in tried)
        note = (
            f"Activation checkpointing: {kind}, {which}{without}. On the GPU, by formula: {', '.join(sums)}, of "
            f"{format_size(candidate.usable_bytes)}."
        )
        setup = replace(candidate, note=note).setup()
    if candidate.request.variant == "auto":
        ledger, machine, disk = setup.ledger, candidate.machine, setup.ledger.total_bytes("disk")
        assert machine.gpu is not None
        parts = [
            f"{format_size(ledger.total_bytes('device'))} of {format_size(machine.gpu.usable_bytes)} on "
            f"{machine.gpu.name}",
            f"{format_size(ledger.total_bytes('host', 'pinned'))} of {format_size(machine.ram_bytes)} of RAM",
        ]
        parts += [f"{format_size(disk)} of {format_size(machine.disk_free_bytes)} of disk"] if disk else []
        without = ", without activations" if bare else ""
        first += f" (estimated by formula{without}: {', '.join(parts)})"
    return replace(best, setup=replace(setup, why=first))


def _candidates(candidate: Candidate, judge: Judge | None) -> Iterator[_Judged]:
    """The variant with each of its kinds of checkpointing, cheapest first, each judged as it is asked for."""
    kinds = candidate.recipe.variants[candidate.variant].checkpointing or [""]
    for number, kind in enumerate(kinds, 1):
        each = replace(candidate, checkpointing=kind)
        if judge is None:
            setup = each.setup()
            short = gpu_shortage(setup.ledger, each.machine)
            yield _Judged(each, setup, "does not fit" if short else "fits", "; ".join(setup.problems))
        elif each.solves:
            yield _longest(each, judge)
        else:
            yield _judged(each, judge, must=candidate.request.variant != "auto" and number == len(kinds))


def _judged(candidate: Candidate, judge: Judge, *, must: bool) -> _Judged:
    """One candidate, predicted unless the formula puts it far off. `must`: it was asked for and there is none after
    it, so that it is traced all the same."""
    setup, machine = candidate.setup(), candidate.machine
    gpu = machine.gpu
    assert gpu is not None
    short = gpu_shortage(setup.ledger, machine)
    others = [problem for problem in setup.problems if problem not in short]
    if others and not must:
        return _Judged(candidate, setup, "", "; ".join(others))
    needed = setup.ledger.total_bytes("device")
    if needed > (1 + FAR_OFF) * gpu.usable_bytes and not must:
        over = needed / gpu.usable_bytes - 1
        why = f"needs {format_size(needed)} by formula, {over:.0%} above what {gpu.name} leaves: not traced"
        return _Judged(candidate, setup, "", why)
    try:
        prediction = judge(setup)
    except NoKernel as error:
        return _Judged(candidate, setup.with_problems([str(error)]), "", str(error))
    except InputError as error:
        return _Judged(candidate, setup, "", f"no prediction: {error}")
    if prediction.verdict in ("fits", "tight"):  # the prediction is the better judge
        setup = replace(setup, problems=tuple(others))
    elif not setup.problems:
        setup = setup.with_problems([f"is predicted not to fit: {prediction.why}"])
    why = "; ".join((*others, _in_short(prediction, gpu)))
    return _Judged(candidate, setup, str(prediction.verdict), why, prediction)


def _in_short(prediction: Prediction, gpu: Gpu) -> str:
    """The predicted peak in a few words."""
    low, high = prediction.peak_reserved_bytes
    return (
        f"{prediction.verdict}: peak {format_size(prediction.peak_allocated_bytes)} allocated, {format_size(low)} to "
        f"{format_size(high)} reserved, of {format_size(gpu.usable_bytes)} on {gpu.name}"
    )


def _longest(candidate: Candidate, judge: Judge) -> _Judged:
    """The longest sequence that is predicted to fit: the formula's, lowered or raised by what traces say."""
    shortest, usable = candidate.recipe.sequence_length, candidate.usable_bytes
    longest = candidate.model.maximum_length or shortest
    best: tuple[int, _Judged] | None = None
    last = _judged(candidate, judge, must=True)
    length = by_formula = last.setup.sequence_length
    seen = {length: last}
    while last.prediction is not None:
        if last.verdict == "fits" and (best is None or length > best[0]):
            best = (length, last)
        length = _nearer_length(length, last.prediction, shortest=shortest, longest=longest, usable_bytes=usable)
        if length in seen or len(seen) == MOST_TRACES:
            break
        last = seen[length] = _judged(replace(candidate, length=length), judge, must=True)
    if best is None:
        return last
    length, found = best
    predictions = ", ".join(f"{tokens} {each.verdict or each.why}" for tokens, each in sorted(seen.items()))
    most = "all that the model allows" if length == longest else f"the longest multiple of {MULTIPLE} found that fits"
    why = f"{most} (by formula {by_formula}; predicted: {predictions})"
    return replace(found, setup=found.setup.put("data.sequence_length", length, why))


def _nearer_length(length: int, found: Prediction, *, shortest: int, longest: int, usable_bytes: int) -> int:
    """The length to try after `length` was predicted: what fits if all that grows with the sequence grows in
    proportion. Weights, gradients and states do not grow with it. `length` itself where nothing is to be gained.
    """
    held = sum(found.categories[name] for name in ("weights", "gradients", "optimizer"))
    needs = found.confidence.reserved_with_slack(found.peak_reserved_bytes[1])
    grows = needs - found.confidence.reserved_with_slack(held)
    room = usable_bytes - found.confidence.reserved_with_slack(held)
    if grows <= 0 or room <= 0:
        return shortest if found.verdict != "fits" else length
    wanted = max(shortest, min(longest, int(length * room / grows) // MULTIPLE * MULTIPLE))
    if found.verdict == "fits":
        return wanted if wanted > (1 + _CLOSE_ENOUGH) * length else length
    lower = int(_SURER * wanted) // MULTIPLE * MULTIPLE
    return max(shortest, min(lower, length - MULTIPLE))


def nearest_that_fits(
    recipe: Recipe, setup: Setup, *, use_hub: bool, trace: bool = True, judge: Judge = predicted
) -> str | None:
    """The next variant of the recipe that is predicted to fit; None if there is none.

    Args:
        recipe: the recipe. Variants stand in the order in which it prefers them.
        setup: of it, and what does not fit.
        use_hub: as for `choose`.
        trace: as for `predicted`.
        judge: as for `choose`, with a trace.
    """
    names = list(recipe.variants)
    later = names[names.index(setup.preset) + 1 :]
    machine, request = setup.resolved_for.machine, setup.request or Request()
    if trace and later:
        others = recipe.model_copy(update={"variants": {name: recipe.variants[name] for name in later}})
        try:
            return choose(others, machine, replace(request, variant="auto"), use_hub=use_hub, judge=judge)[0].preset
        except DoesNotFitError:
            return None
    for name in later:
        other = resolve(recipe, machine, replace(request, variant=name), use_hub=use_hub)
        if not other.problems and predicted(other, trace=False).verdict in ("fits", "tight"):
            return name
    return None
