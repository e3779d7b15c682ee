"""What a recipe will need, before its model is loaded; and the nearest variant that fits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hf_memkit.described import described_machine
from hf_memkit.errors import DoesNotFitError, InputError
from hf_memkit.models import hub_reachable
from hf_memkit.predict import Prediction, predict
from hf_memkit.predict.given_arguments import given_arguments
from hf_memkit.recipe.resolve import Overrides, Resolved, resolve
from hf_memkit.recipe.schema import load_recipe

__all__ = ["nearest_that_fits", "predict_recipe", "predicted"]


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
    overrides = Overrides(
        variant=variant,
        model=model,
        sequence_length=sequence_length,
        gpus=gpus or recipe.gpus,
        nodes=nodes,
        settings=given_arguments(arguments)[0],
    )
    prediction = None
    if trace:
        from hf_memkit.recipe.choose import choose

        chosen = choose(recipe, machine, overrides, use_hub=hub_reachable())
        resolved, prediction = chosen.resolved, chosen.prediction
    else:
        resolved = resolve(recipe, machine, overrides, use_hub=hub_reachable())
    if prediction is None:
        prediction = predicted(resolved, trace=trace)
    return prediction.with_notes(f"variant {resolved.variant}: {resolved.why}")


def predicted(resolved: Resolved, *, trace: bool = True) -> Prediction:
    """The prediction of the setup for the card in question, which need not be here; by formula where no trace works.

    Raises:
        InputError: nothing can be said of it.
    """
    setup = resolved.setup

    def of(*, trace: bool) -> Prediction:
        return predict(
            setup,
            model=resolved.model,
            machine=resolved.machine,
            micro_batch_size=int(setup["arguments.per_device_train_batch_size"]),
            accumulation=int(setup.get("arguments.gradient_accumulation_steps", 1)),
            sequence_length=int(setup["data.sequence_length"]),
            gpus=resolved.gpus,
            nodes=resolved.nodes,
            trace=trace,
        )

    try:
        return of(trace=trace)
    except InputError as error:
        if not trace:
            raise
        return of(trace=False).with_notes(str(error))


def nearest_that_fits(resolved: Resolved, *, use_hub: bool, trace: bool = True) -> str | None:
    """The next variant of the recipe that is predicted to fit; None if there is none.

    Args:
        resolved: what does not fit. Variants stand in the order in which a recipe prefers them.
        use_hub: as for `resolve`.
        trace: as for `predicted`.
    """
    names = list(resolved.recipe.variants)
    later = names[names.index(resolved.variant) + 1 :]
    if trace and later:
        from hf_memkit.recipe.choose import choose

        others = resolved.recipe.model_copy(update={"variants": {n: resolved.recipe.variants[n] for n in later}})
        try:
            chosen = choose(others, resolved.machine, replace(resolved.overrides, variant="auto"), use_hub=use_hub)
        except DoesNotFitError:
            return None
        return chosen.resolved.variant
    for name in later:
        other = resolve(resolved.recipe, resolved.machine, replace(resolved.overrides, variant=name), use_hub=use_hub)
        if not other.setup.problems and predicted(other, trace=False).verdict in ("fits", "tight"):
            return name
    return None
