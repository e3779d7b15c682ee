"""Which variant, which of its kinds of checkpointing and which sequence length: chosen by prediction.

In: what `resolve` takes. Out: what it gives, with the prediction that decided. `resolve` by itself chooses by formula,
at once; here each candidate is traced, cheapest first, until one fits. A trace takes seconds, so what the formula puts
far off is not traced, and says so. For models whose activations are in no formula the prediction is the only judge.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from hf_memkit.errors import DoesNotFitError, InputError, MemkitError
from hf_memkit.hardware import Gpu, Machine, described_machine
from hf_memkit.job import card_shortage
from hf_memkit.models import hub_reachable
from hf_memkit.own_arguments import of_trainer
from hf_memkit.prediction import Prediction, predict
from hf_memkit.recipe.resolve import MULTIPLE, resolve
from hf_memkit.recipe.schema import Recipe, load_recipe
from hf_memkit.request import Request
from hf_memkit.setup import Setup
from hf_memkit.units import format_size

__all__ = ["FAR_OFF", "Judge", "choose", "nearest_that_fits", "predict_recipe", "predicted"]

FAR_OFF: Final = 0.25
"""What a formula puts further above the card than this share of it is not traced. Assumed: against traces of this
pack's recipes the ledger's sums were too high by a few per cent at most, and much oftener too low."""


MOST_TRACES: Final = 4
"""Lengths that are traced: the first is the formula's, each further one follows from the one before."""

_CLOSE_ENOUGH: Final = 0.03
"""A length is not raised by a smaller share than this: the prediction itself is not that exact."""


_SURER: Final = 0.985
"""A length that is lowered is lowered a little further, so that the next prediction does not miss by a hair."""


Judge = Callable[[Setup], Prediction]
"""Predicts a candidate: by a trace, or from the recipe's stored predictions."""


def predicted(setup: Setup, *, trace: bool = True) -> Prediction:
    """The prediction of the setup for the card in question, which need not be here; by formula where no trace works.

    Raises:
        InputError: nothing can be said of it.
    """
    try:
        return predict(setup, trace=trace)
    except InputError as error:
        if not trace:
            raise
        return predict(setup, trace=False).with_notes(str(error))


@dataclass(frozen=True)
class _Candidate:
    """One variant with one kind of checkpointing and one length. `prediction` is None where the formula, or the
    machine, rules it out, or nothing could be predicted; `why` says why not, or in short what was predicted."""

    setup: Setup
    prediction: Prediction | None
    checkpointing: str
    why: str

    @property
    def verdict(self) -> str:
        return str(self.prediction.verdict) if self.prediction is not None else ""


@dataclass(frozen=True)
class _Search:
    """What all candidates have in common."""

    recipe: Recipe
    machine: Machine
    use_hub: bool
    judge: Judge


def choose(
    recipe: Recipe, machine: Machine, request: Request, *, use_hub: bool, judge: Judge = predicted
) -> tuple[Setup, Prediction | None]:
    """The recipe's setup for `machine`, chosen by prediction: the first variant, with its first kind of checkpointing,
    that is predicted to fit; if none is, the first that is tight. A variant that was asked for by name is always
    resolved, with the last of its kinds of checkpointing if none fits.

    Args:
        recipe, machine, request, use_hub: as `resolve` takes them.
        judge: makes the prediction of a candidate.

    Returns:
        The setup, and its prediction: None where nothing could be predicted, or nothing was worth predicting.

    Raises:
        InputError, SettingError: as `resolve` does.
        DoesNotFitError: `auto`, and no variant fits.
    """
    search = _Search(recipe, machine, use_hub, judge)
    if request.variant != "auto":
        found = _variant(search, request, "asked for by name", named=True)
        return replace(found.setup, request=request), found.prediction
    rejected: list[tuple[str, str]] = []
    tight: _Candidate | None = None
    for name in recipe.variants:
        first = "the recipe's first choice" if not rejected else "the first variant that fits"
        found = _variant(search, replace(request, variant=name), first, named=False)
        found = replace(found, setup=replace(found.setup, rejected=tuple(rejected), request=request))
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
    raise DoesNotFitError(f"no variant of {recipe.name} is predicted to fit this machine: {reasons}")


def _variant(search: _Search, request: Request, first: str, *, named: bool) -> _Candidate:
    """One variant: the first of its kinds of checkpointing that fits, or the first that is tight, or the last."""
    tried: list[_Candidate] = []
    for each in _candidates(search, request, named=named):
        tried.append(each)
        if each.verdict == "fits":
            break
    fitting = [each for each in tried if each.verdict == "fits"]
    tight = [each for each in tried if each.verdict == "tight"]
    best = (fitting or tight or tried[-1:])[0]
    if best.prediction is None:
        return best
    setup = best.setup
    if len(tried) > 1 or best.checkpointing:
        others = "; ".join(f"{each.checkpointing} {each.why}" for each in tried if each is not best)
        which = "the first that is predicted to fit" if fitting else "the nearest to fitting, by prediction"
        setup = setup.with_notes(
            f"Activation checkpointing: {best.checkpointing}, {which}{f'; not {others}' if others else ''}."
        )
    return replace(best, setup=replace(setup, why=f"{first} (predicted: {best.why})"))


def _candidates(search: _Search, request: Request, *, named: bool) -> Iterator[_Candidate]:
    """The variant with each of its kinds of checkpointing, cheapest first, each predicted as it is asked for."""
    variant = search.recipe.variants.get(request.variant)
    choices: list[str | None] = [*variant.checkpointing] if variant is not None and variant.checkpointing else [None]
    solves = variant is not None and variant.solve_for == "sequence" and not request.sequence_length
    for number, choice in enumerate(choices):
        setup = _resolve(search, request, choice, named=named)
        if solves:
            yield _longest(search, setup, request, choice, named=named)
        else:
            yield _judged(search, setup, choice, must=named and number == len(choices) - 1)


def _resolve(search: _Search, request: Request, choice: str | None, *, named: bool) -> Setup:
    return resolve(
        search.recipe, search.machine, request, use_hub=search.use_hub, checkpointing=choice, tried=not named
    )


def _judged(search: _Search, setup: Setup, choice: str | None, *, must: bool) -> _Candidate:
    """One candidate, predicted unless the formula puts it far off. `must`: it was asked for and there is none after
    it, so that it is traced all the same."""
    machine, label = setup.resolved_for.machine, choice or ""
    gpu = machine.gpu
    assert gpu is not None
    short = card_shortage(setup.ledger, machine)
    others = [problem for problem in setup.problems if problem not in short]
    if others and not must:
        return _Candidate(setup, None, label, "; ".join(others))
    needed = setup.ledger.total_bytes("device")
    if needed > (1 + FAR_OFF) * gpu.usable_bytes and not must:
        over = needed / gpu.usable_bytes - 1
        why = f"needs {format_size(needed)} by formula, {over:.0%} above what {gpu.name} leaves: not traced"
        return _Candidate(setup, None, label, why)
    try:
        prediction = search.judge(setup)
    except MemkitError as error:
        if not isinstance(error, InputError):
            raise
        return _Candidate(setup, None, label, f"no prediction: {error}")
    if prediction.verdict in ("fits", "tight"):  # the prediction is the better judge
        setup = replace(setup, problems=tuple(others))
    elif not setup.problems:
        setup = setup.with_problems([f"is predicted not to fit: {prediction.why}"])
    return _Candidate(setup, prediction, label, "; ".join((*others, _in_short(prediction, gpu))))


def _in_short(prediction: Prediction, gpu: Gpu) -> str:
    """The predicted peak in a few words."""
    low, high = prediction.peak_reserved_bytes
    return (
        f"{prediction.verdict}: peak {format_size(prediction.peak_allocated_bytes)} allocated, {format_size(low)} to "
        f"{format_size(high)} reserved, of {format_size(gpu.usable_bytes)} on {gpu.name}"
    )


def _longest(search: _Search, setup: Setup, request: Request, choice: str | None, *, named: bool) -> _Candidate:
    """The longest sequence that is predicted to fit: the formula's, lowered or raised by what traces say."""
    job, shortest = setup.resolved_for, search.recipe.sequence_length
    assert job.machine.gpu is not None and job.model is not None
    longest, usable = job.model.maximum_length or shortest, job.machine.gpu.usable_bytes
    length = by_formula = setup.sequence_length
    best: tuple[int, _Candidate] | None = None
    last = _judged(search, setup, choice, must=True)
    seen = {length: last}
    while last.prediction is not None:
        if last.verdict == "fits" and (best is None or length > best[0]):
            best = (length, last)
        length = _nearer_length(length, last.prediction, shortest=shortest, longest=longest, usable_bytes=usable)
        if length in seen or len(seen) == MOST_TRACES:
            break
        again = _resolve(search, replace(request, sequence_length=length), choice, named=named)
        last = seen[length] = _judged(search, again, choice, must=True)
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


def predict_recipe(
    name: str,
    *,
    variant: str = "auto",
    model: str | None = None,
    sequence_length: int | None = None,
    arguments: Mapping[str, Any] | None = None,
    gpu: str | None = None,
    gpu_memory: str | None = None,
    ram: str | None = None,
    gpus: int | None = None,
    nodes: int = 1,
    trace: bool = True,
) -> Prediction:
    """What a recipe will need on a card, which need not be here.

    >>> predict_recipe("gpt2-on-16gb", gpu="T4").verdict  # doctest: +SKIP
    'fits'

    Args:
        name: a recipe's name, or its YAML file.
        variant: one of its variants, or `"auto"`: the first that is predicted to fit.
        model, sequence_length: in the place of the recipe's.
        arguments: fields of TrainingArguments, which win over the recipe's.
        gpu: a card's name, or a size such as `"16GB"`; None: this machine's, or else the recipe's own.
        gpu_memory, ram: sizes in the place of the card's and of this machine's.
        gpus: cards on each machine; None: the recipe's.
        nodes: machines.
        trace: whether the training is traced; False: formulas only, at once.

    Raises:
        InputError: there is no such recipe, variant, model or card, or nothing can be said of it.
        SettingError: arguments that are wrong, or contradict the recipe.
        DoesNotFitError: `"auto"`, and no variant is predicted to fit.
    """
    machine = described_machine(gpu, gpu_memory, ram, None)
    recipe = load_recipe(name)
    request = Request(
        recipe=name,
        variant=variant,
        model=model,
        sequence_length=sequence_length,
        gpus=gpus or recipe.gpus,
        nodes=nodes,
        arguments=of_trainer(arguments)[0],
    )
    prediction = None
    if trace:
        setup, prediction = choose(recipe, machine, request, use_hub=hub_reachable())
    else:
        setup = resolve(recipe, machine, request, use_hub=hub_reachable())
    if prediction is None:
        prediction = predicted(setup, trace=trace)
    return prediction.with_notes(f"variant {setup.preset}: {setup.why}")


def nearest_that_fits(recipe: Recipe, setup: Setup, *, use_hub: bool, trace: bool = True) -> str | None:
    """The next variant of the recipe that is predicted to fit; None if there is none.

    Args:
        recipe: the recipe. Variants stand in the order in which it prefers them.
        setup: of it, and what does not fit.
        use_hub: as for `resolve`.
        trace: as for `predicted`.
    """
    names = list(recipe.variants)
    later = names[names.index(setup.preset) + 1 :]
    machine, request = setup.resolved_for.machine, setup.request or Request()
    if trace and later:
        others = recipe.model_copy(update={"variants": {name: recipe.variants[name] for name in later}})
        try:
            return choose(others, machine, replace(request, variant="auto"), use_hub=use_hub)[0].preset
        except DoesNotFitError:
            return None
    for name in later:
        other = resolve(recipe, machine, replace(request, variant=name), use_hub=use_hub)
        if not other.problems and predicted(other, trace=False).verdict in ("fits", "tight"):
            return name
    return None
